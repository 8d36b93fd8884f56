"""Opens the store, and brings its tables to the newest form."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session

from edgekit_runtime.errors import ConfigError, OutputError

_MIGRATIONS: Final = Path(__file__).with_name("migrations")
_BUSY_S: Final = 10.0  # the command line and the manager write to the same file
_CACHE_KIB: Final = 16 << 10


class Store:
    """The database of a fleet. Any thread may use it; each takes a session of its own.

    Attributes:
        engine: of SQLAlchemy.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session whose changes are kept if the block ends without an error.

        With SQLite the transaction takes the lock for writing at its beginning, so that what it reads is what
        it changes.

        Raises:
            OutputError: the database cannot be reached, is locked, or its disk is full.
        """
        try:
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                yield session
        except DBAPIError as cause:
            if not isinstance(cause.orig, Exception) or type(cause.orig).__name__ != "OperationalError":
                raise
            raise OutputError(f"the store {self.name}: {cause.orig}") from cause

    @property
    def name(self) -> str:
        """Return the URL without its password, for messages."""
        return self.engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def sqlite_url(path: Path) -> str:
    """Return the URL of a database in a file."""
    return f"sqlite:///{path.absolute()}"


def open_store(url: str) -> Store:
    """Open a store; makes its tables, or brings them to the newest form.

    Args:
        url: of SQLAlchemy: `sqlite:////FILE` or `postgresql+psycopg://USER@HOST/DATABASE`.

    Raises:
        ConfigError: the URL is malformed or its driver missing, or a newer edgekit made the tables.
        OutputError: the database cannot be opened.
    """
    try:
        parsed = make_url(url)
        engine = create_engine(parsed, json_serializer=_write_json)
    except (ArgumentError, NoSuchModuleError, ImportError) as cause:
        raise ConfigError(f"store {url!r}: {cause}; expected sqlite:////FILE or a postgresql URL") from cause
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    try:
        _migrate(engine)
    except DBAPIError as cause:
        engine.dispose()
        raise OutputError(f"cannot open the store {parsed.render_as_string()}: {cause.orig}") from cause
    except CommandError as cause:
        engine.dispose()
        raise ConfigError(
            f"the store {parsed.render_as_string()} was made by a newer edgekit ({cause}); update edgekit"
        ) from cause
    return Store(engine)


def _write_json(value: Any) -> str:
    import json

    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy begins transactions by the listener below
        for setting in (
            "journal_mode=WAL",
            "synchronous=FULL",  # a published document must not be forgotten by a power cut
            "foreign_keys=ON",
            f"busy_timeout={int(_BUSY_S * 1000)}",
            f"cache_size=-{_CACHE_KIB}",
        ):
            connection.execute(f"PRAGMA {setting}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def alembic_config(connection: Connection | None = None) -> Config:
    """Return the configuration of the migrations in this package."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _migrate(engine: Engine) -> None:
    from alembic.migration import MigrationContext

    config = alembic_config()
    newest = ScriptDirectory.from_config(config).get_current_head()
    with engine.connect() as connection:
        if MigrationContext.configure(connection).get_current_revision() == newest:
            return
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7203184)")  # two first starts at once
        command.upgrade(alembic_config(connection), "head")
