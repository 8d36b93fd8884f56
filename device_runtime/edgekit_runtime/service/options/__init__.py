"""The options of the service as dataclasses, and the reader of their TOML file."""
