"""The service's options as plain data, and how they are read from a TOML file."""
