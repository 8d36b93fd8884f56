"""The store: all that the fleet knows, in SQLite or PostgreSQL."""
