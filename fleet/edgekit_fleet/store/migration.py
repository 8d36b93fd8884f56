"""Creates or migrates the tables of a store. This module is imported only when needed."""

from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, insert

from edgekit_fleet.store.migrations import FOLDER
from edgekit_fleet.store.tables import SHARDS, ShardRow, Table
from edgekit_runtime.errors import ConfigError

_LOCK: Final = 7203184  # of PostgreSQL


def migrate_store(engine: Engine, name: str) -> None:
    """Create the tables of a store, or migrate them to this version of edgekit.

    Args:
        engine: The engine of the store.
        name: The URL without a password, for messages.

    Raises:
        ConfigError: A newer version created the tables.
    """
    try:
        migrate(engine, alembic_config())
    except CommandError as cause:
        raise ConfigError(
            f"the store {name} was made by a newer edgekit ({cause}); update edgekit"
        ) from cause


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def migrate(engine: Engine, config: Config) -> None:
    """Create the tables in an empty database, or apply all missing migrations.

    Raises:
        CommandError: The revision of the tables is unknown.
    """
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")  # two first starts
        config.attributes["connection"] = connection
        if MigrationContext.configure(connection).get_current_revision() is None:
            _make_tables(connection)
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")


def _make_tables(connection: Connection) -> None:
    Table.metadata.create_all(connection)
    shards = [{"number": number, "holder": "", "epoch": 0} for number in range(SHARDS)]
    connection.execute(insert(ShardRow), shards)
    # The database itself refuses to change or delete entries of the audit log.
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
            " EXECUTE FUNCTION refuse_change()"
        )
        return
    for change in ("UPDATE", "DELETE"):
        connection.exec_driver_sql(
            f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit"
            " BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )
