"""Importers, one for each source format. They return a `SourceModel` and never change the source file."""
