"""The store of all fleet data, in SQLite or PostgreSQL."""
