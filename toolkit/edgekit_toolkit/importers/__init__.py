"""Importers: one a source format. Each returns a `SourceModel` and never touches the file that it reads."""
