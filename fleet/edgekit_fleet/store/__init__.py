"""The store: all data of the fleet, in SQLite or PostgreSQL."""
