"""Run by alembic: applies migrations on the connection that `database` opened."""

from alembic import context

from edgekit_fleet.store.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
)
context.run_migrations()
