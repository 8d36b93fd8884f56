"""How the tables came to their form, for alembic."""
