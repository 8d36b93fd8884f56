"""Copies a store from SQLite to PostgreSQL."""

from typing import Any, Final

from sqlalchemy import JSON, Column, String, bindparam, cast, delete, func, select, type_coerce
from sqlalchemy.orm import Session
from sqlalchemy.sql.schema import Table as SqlTable

from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import ManagerRow, ShardRow, Table
from edgekit_runtime.errors import ConfigError

_ROWS: Final = 1000  # rows at a time
_NOT_COPIED: Final = ManagerRow.__tablename__  # processes of elsewhere
_FILLED_WHEN_MADE: Final = ShardRow.__tablename__


def copy_store(source: Store, target: Store, *, actor: str, subject: str) -> int:
    """Copy all rows including the audit log in one transaction, and add an audit entry about the copy.

    Args:
        source: The store to copy. Nobody may write to it at the same time.
        target: An empty PostgreSQL store.
        actor: The actor of the audit entry.
        subject: The subject of the audit entry.

    Returns:
        The number of copied rows.

    Raises:
        ConfigError: The target contains a fleet, or the chain of the copied audit log is broken.
        OutputError: A database cannot be read or written.
    """
    count = 0
    with source.snapshot() as reader, target.transaction() as writer:
        for table in Table.metadata.sorted_tables:
            if table.name != _FILLED_WHEN_MADE and _count(writer, table):
                raise ConfigError(
                    f"the database {target.name} holds a fleet already: {table.name} has rows; name an empty"
                    " one"
                )
        writer.execute(delete(ShardRow))
        for table in Table.metadata.sorted_tables:
            if table.name != _NOT_COPIED:
                count += _copy_table(reader, writer, table)
        broken_at = audit.find_break(writer)
        if broken_at is not None:
            raise ConfigError(
                f"the chain of the audit log is broken at entry {broken_at}; nothing was copied"
            )
        audit.record(writer, actor, "fleet.restore", subject)
    return count


def _copy_table(reader: Session, writer: Session, table: SqlTable) -> int:
    # JSON goes as text: None and the null of JSON would become one.
    read = select(*(type_coerce(column, String) if _is_json(column) else column for column in table.columns))
    write = table.insert().values({column.name: _parameter(column) for column in table.columns})
    names = [f"new_{column.name}" for column in table.columns]
    connection = writer.connection()
    for rows in reader.execute(read.execution_options(yield_per=_ROWS)).partitions():
        connection.execute(write, [dict(zip(names, row, strict=True)) for row in rows])
    copied, expected = _count(writer, table), _count(reader, table)
    if copied != expected:
        raise ConfigError(f"{copied} rows of {table.name} arrived, expected {expected}; nothing was copied")
    return copied


def _parameter(column: Column[Any]) -> Any:
    name = f"new_{column.name}"
    return cast(bindparam(name, type_=String), JSON) if _is_json(column) else bindparam(name)


def _is_json(column: Column[Any]) -> bool:
    return isinstance(column.type, JSON)


def _count(session: Session, table: SqlTable) -> int:
    return session.scalar(select(func.count()).select_from(table)) or 0
