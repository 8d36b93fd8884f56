"""Migrations of the tables, for alembic."""
