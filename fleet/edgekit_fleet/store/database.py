"""Opens the store, and creates or migrates its tables."""

import contextlib
import functools
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Insert,
    Update,
    bindparam,
    create_engine,
    event,
    insert,
    inspect,
    text,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DataError,
    DBAPIError,
    InterfaceError,
    InternalError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.orm import Session

from edgekit_fleet.store import audit
from edgekit_fleet.store.migrations import find_newest_revision
from edgekit_fleet.store.tables import Table
from edgekit_runtime.errors import ConfigError, OutputError

_BUSY_S: Final = 10.0  # the command line and the manager write to the same file
_CACHE_KIB: Final = 16 << 10
_UNREACHABLE: Final = (OperationalError, InterfaceError, InternalError)
"""Errors of a database that is locked, full, gone or read-only. It may be available again soon."""

_POSTGRESQL: Final[Mapping[str, str | int]] = {
    "connect_timeout": 5,  # seconds, for each host of a URL
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # ms. A server whose machine is gone does not answer
    "options": "-c lock_timeout=10s -c statement_timeout=60s -c idle_in_transaction_session_timeout=60s",
    "application_name": "edgekit",
}
_MOST_CONNECTIONS: Final = 40  # as many as the threads of the web server
_WRITER: Final = 7203183  # locks of PostgreSQL
_PREFIX: Final = "new_"  # an update may not name its parameters as its columns


class Store:
    """The database of a fleet. Any thread may use it with a separate session."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reader = engine.execution_options(is_reading=True, postgresql_readonly=True)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session that commits if the block ends without an error.

        Only one such transaction runs at a time, so the rows that it reads do not change until it ends.

        Raises:
            OutputError: The database cannot be reached, is locked or damaged, or its disk is full.
            ConfigError: The database cannot store a value.
        """
        with self.concurrent_transaction() as session:
            if session.get_bind().dialect.name == "postgresql":
                session.execute(text(f"SELECT pg_advisory_xact_lock({_WRITER})"))
            yield session

    @contextmanager
    def concurrent_transaction(self) -> Iterator[Session]:
        """Yield a session like `transaction`, but allow simultaneous transactions in PostgreSQL.

        The caller must lock the rows that it changes.

        Raises:
            OutputError: See `transaction`.
            ConfigError: See `transaction`.
        """
        with self._session(self.engine) as session:
            yield session
            audit.write(session)

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """Yield a read-only session. With SQLite it does not wait for a writer.

        Raises:
            OutputError: See `transaction`.
        """
        with self._session(self._reader) as session:
            yield session

    @contextmanager
    def _session(self, engine: Engine) -> Iterator[Session]:
        try:
            with Session(engine, expire_on_commit=False) as session, session.begin():
                yield session
        except _UNREACHABLE as cause:
            raise OutputError(f"the store {self.name}: {cause.orig}") from cause
        except DataError as cause:
            raise ConfigError(f"the store cannot hold a value: {cause.orig}") from cause
        except DatabaseError as cause:
            if type(cause) is not DatabaseError:  # else it is damaged
                raise
            raise OutputError(f"the store {self.name}: {cause.orig}; restore a backup") from cause

    @property
    def name(self) -> str:
        """The URL without its password, for messages."""
        return _hide_password(self.engine.url)

    def close(self) -> None:
        self.engine.dispose()


def try_exclude_writers(session: Session) -> bool:
    """Try to block `Store.transaction` until this transaction ends. Return True if it is blocked.

    If another transaction holds the lock, this returns False at once. The other transaction may be waiting
    for rows that this one has locked. With SQLite no lock is needed, and the result is always True.
    """
    if session.get_bind().dialect.name != "postgresql":
        return True
    return bool(session.scalar(text(f"SELECT pg_try_advisory_xact_lock({_WRITER})")))


def insert_many(session: Session, table: type[Table], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows about four times as fast as SQLAlchemy's `Session.execute`.

    Args:
        session: The session of a transaction.
        table: The table to change.
        rows: A dict from column to value for each row. All rows have the same columns, including those with a
            default.
    """
    if rows:
        connection = session.connection()
        _compile_insert(table, tuple(rows[0]), connection.dialect).execute(connection, rows)


def upsert_many(session: Session, table: type[Table], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows as `insert_many` does, but update the rows whose primary key exists."""
    if rows:
        connection = session.connection()
        _compile_upsert(table, tuple(rows[0]), connection.dialect).execute(connection, rows)


def update_many(
    session: Session,
    table: type[Table],
    rows: Sequence[Mapping[str, Any]],
    *,
    keys: tuple[str, ...],
    condition: ColumnElement[bool] | None = None,
) -> None:
    """Update rows about four times as fast as SQLAlchemy's `Session.execute`.

    Args:
        session: The session of a transaction.
        table: The table to change.
        rows: A dict from column to value for each row. All rows have the same columns.
        keys: The columns that identify the rows to change. The other columns are written.
        condition: A further condition for the rows to change.
    """
    if rows:
        connection = session.connection()
        statement = _compile_update(table, tuple(rows[0]), keys, condition, connection.dialect)
        statement.execute(connection, rows)


class _Compiled:
    """A statement for many rows, as text with the order of its parameters."""

    def __init__(self, statement: Insert | Update, names: tuple[str, ...], dialect: Dialect) -> None:
        columns = list(names) if isinstance(statement, Insert) else None
        compiled = statement.compile(dialect=dialect, column_keys=columns)
        self._text = compiled.string
        self._is_positional = compiled.positiontup is not None
        self._names = list(compiled.positiontup or compiled.binds)
        self._columns = [  # with the converters of their values
            (
                name.removeprefix(_PREFIX),
                compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect),
            )
            for name in self._names
        ]

    def execute(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        parameters: list[Any] = []
        for row in rows:
            values = [
                row[column] if convert is None else convert(row[column]) for column, convert in self._columns
            ]
            parameters.append(
                tuple(values) if self._is_positional else dict(zip(self._names, values, strict=True))
            )
        connection.exec_driver_sql(self._text, parameters)


@functools.lru_cache(64)
def _compile_insert(table: type[Table], names: tuple[str, ...], dialect: Dialect) -> _Compiled:
    return _Compiled(insert(table), names, dialect)


@functools.lru_cache(64)
def _compile_upsert(table: type[Table], names: tuple[str, ...], dialect: Dialect) -> _Compiled:
    if dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as begin_upsert  # 30 ms of a core
    else:
        from sqlalchemy.dialects.sqlite import insert as begin_upsert  # type: ignore[assignment]
    statement = begin_upsert(table)
    keys = [column.name for column in inspect(table).primary_key]
    changed = {name: statement.excluded[name] for name in names if name not in keys}
    return _Compiled(statement.on_conflict_do_update(index_elements=keys, set_=changed), names, dialect)


@functools.lru_cache(64)
def _compile_update(
    table: type[Table],
    names: tuple[str, ...],
    keys: tuple[str, ...],
    condition: ColumnElement[bool] | None,
    dialect: Dialect,
) -> _Compiled:
    columns = inspect(table).columns
    statement = update(table).where(*(columns[key] == bindparam(_PREFIX + key) for key in keys))
    statement = statement if condition is None else statement.where(condition)
    changed: dict[str, Any] = {name: bindparam(_PREFIX + name) for name in names if name not in keys}
    return _Compiled(statement.values(changed), names, dialect)


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path.absolute()}"


def open_store(url: str) -> Store:
    """Open a store, and create or migrate its tables.

    Args:
        url: `sqlite:////FILE`, or a PostgreSQL URL as in libpq, `postgresql://USER@HOST,HOST/DATABASE`.

    Raises:
        ConfigError: The URL is malformed, its driver is missing, or the tables are from a newer edgekit.
        OutputError: The database cannot be opened.
    """
    try:
        parsed = _parse(url)
        is_remote = parsed.get_backend_name() == "postgresql"
        engine = create_engine(
            parsed,
            json_serializer=json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode,
            pool_pre_ping=is_remote,  # the server may have been restarted
            pool_use_lifo=True,  # the connection used last has most in its cache
            connect_args={**_POSTGRESQL} if is_remote else {},
            **({"max_overflow": _MOST_CONNECTIONS} if is_remote else {}),
        )
    except (ArgumentError, NoSuchModuleError, ImportError) as cause:
        scheme = url.partition("://")[0][:40]
        raise ConfigError(
            f"store {scheme}://...: {cause}; expected sqlite:////FILE or a postgresql URL"
        ) from cause
    if engine.dialect.name == "sqlite":
        _make_private(parsed.database)
        _prepare_sqlite(engine)
    name = _hide_password(parsed)
    try:
        if _read_revision(engine) != find_newest_revision():
            from edgekit_fleet.store.migration import migrate_store  # alembic takes a fifth of each start

            migrate_store(engine, name)
    except DBAPIError as cause:
        engine.dispose()
        raise OutputError(
            f"cannot open the store {name}: {cause.orig}; if it is damaged, restore a backup"
        ) from cause
    except ConfigError:
        engine.dispose()
        raise
    return Store(engine)


def _read_revision(engine: Engine) -> str | None:
    with engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
        return revision


def _make_private(path: str | None) -> None:
    """Make a database readable only by its owner, because it contains the secrets of webhooks.

    SQLite's other files get the same permissions.

    Raises:
        OutputError: The file cannot be created.
    """
    if not path or path == ":memory:":
        return
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        for file in (path, f"{path}-wal", f"{path}-shm"):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # another owner's is as he has it
                Path(file).chmod(0o600)
    except OSError as cause:
        raise OutputError(f"cannot open the store {path}: {cause.strerror}") from cause


def _parse(url: str) -> URL:
    """Convert a URL to the form of SQLAlchemy, with several hosts and libpq's options in its query.

    Raises:
        ArgumentError: The URL is malformed.
    """
    scheme, separator, address = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        return make_url(url)
    authority, slash, path = address.partition("/")
    user, at, hosts = authority.rpartition("@")
    parsed = make_url(f"postgresql+psycopg{separator}{user}{at}{slash}{path}")
    return parsed.update_query_dict({"host": hosts.split(",")}, append=True) if hosts else parsed


def _hide_password(url: URL) -> str:
    """Return a URL without passwords for messages. libpq also accepts a password in the query."""
    return url.difference_update_query(("password", "sslpassword")).render_as_string()


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
        is_reading = connection.get_execution_options().get("is_reading", False)
        connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")
