"""Install the triggers of a legacy table; read, lock and write its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from headway._sql import Database, Tx, Value
from headway.errors import InvalidInput
from headway.queue.store.administration import declare_per_user
from headway.queue.store.legacy import postgres, sqlite
from headway.queue.store.legacy.table import LegacyTable, Table, quoted

_PAGE = 500


def _engine(of: Database | Tx) -> ModuleType:
    """Return the module with the statements of an engine."""
    return postgres if of.engine == "postgresql" else sqlite


def find_table(database: Database, name: str) -> Table:
    """Look up a table. ``name`` may have a schema. Raises `InvalidInput` if there is none."""
    parts = str(name).split(".")
    if not 1 <= len(parts) <= 2 or not all(part.isidentifier() for part in parts):
        raise InvalidInput(f"{name!r} is not the name of a table.", hint="Use table or schema.table.")
    found: Table = _engine(database).find_table(database, parts[0] if len(parts) == 2 else None, parts[-1])
    if not found.types:
        raise InvalidInput(f"There is no table {name!r} in {database.name}.")
    return found


def check_table(database: Database, legacy: LegacyTable) -> Table:
    """Look up the table of a mapping. Raises `InvalidInput` for a mapping that does not fit it."""
    legacy.check()
    table = find_table(database, legacy.table)
    _engine(database).check_table(legacy, table)
    for column in legacy.columns.values():
        table.column(column)
    return table


def is_followed(database: Database, legacy: LegacyTable) -> bool:
    """Return whether the triggers of this table are installed."""
    return database.one(_engine(database).IS_INSTALLED, (f"{legacy.trigger}_insert",)) is not None


def install_triggers(tx: Tx, legacy: LegacyTable, table: Table, *, per_user: int | None) -> None:
    """Create or replace the triggers."""
    declare_per_user(tx, per_user)
    engine = _engine(tx)
    for statement in (*engine.drop_statements(legacy, table), *engine.create_statements(legacy, table)):
        tx.execute(statement)


def remove_triggers(tx: Tx, legacy: LegacyTable, table: Table) -> None:
    """Remove the triggers. Refused while a row of the table has an active task."""
    row = tx.one(
        f"SELECT t.id FROM tasks t JOIN {table.sql} l ON CAST(l.{table.column(legacy.id)} AS TEXT) = t.id "
        "WHERE t.status IN ('QUEUED', 'RUNNING') LIMIT 1"
    )
    if row is not None:
        raise InvalidInput(
            f"Task {row[0]} of {legacy.table} is still active: its row would no longer follow it.",
            hint="Wait until it has ended, or return it: release(queue, legacy).",
        )
    for statement in _engine(tx).drop_statements(legacy, table):
        tx.execute(statement)


def waiting_keys(database: Database, legacy: LegacyTable, table: Table) -> Iterator[Value]:
    """Return the keys of the rows that wait, page by page."""
    id, status = table.column(legacy.id), table.column(legacy.status)
    for page in pages_by(database, table, [id], id, f"CAST({status} AS TEXT) = ?", [legacy.queued]):
        yield from (row[0] for row in page)


def lock_waiting(tx: Tx, legacy: LegacyTable, table: Table, key: Value) -> dict[str, Any] | None:
    """Lock a waiting row and return its mapped columns; None if an old worker has locked or claimed it."""
    id, status = table.column(legacy.id), table.column(legacy.status)
    names = list(dict.fromkeys(legacy.columns.values()))
    found = tx.one(
        f"SELECT {', '.join(map(quoted, names))} FROM {table.sql} WHERE {id} = ? AND CAST({status} AS TEXT) = ?"
        f"{tx.skip_locked}",
        (key, legacy.queued),
    )
    return None if found is None else dict(zip(names, found, strict=True))


def waiting_tasks(database: Database, legacy: LegacyTable, table: Table) -> list[tuple[str, Value]]:
    """Return (task id, key of its row or None) of all tasks that wait, in order of submission."""
    id = table.column(legacy.id)
    return [
        (task, key)
        for task, key in database.all(
            f"SELECT t.id, l.{id} FROM tasks t LEFT JOIN {table.sql} l ON CAST(l.{id} AS TEXT) = t.id "
            "WHERE t.status = 'QUEUED' ORDER BY t.no"
        )
    ]


def lock_task(tx: Tx, task_id: str) -> Sequence[Any] | None:
    """Lock a waiting task; return (kind, queue, user, role, payload), or None if a worker has claimed it."""
    return tx.one(
        f"SELECT kind, queue, user_id, role, payload FROM tasks WHERE id = ? AND status = 'QUEUED'{tx.skip_locked}",
        (task_id,),
    )


def count_active(database: Database) -> int:
    """Count the tasks that wait or run."""
    row = database.one("SELECT count(*) FROM tasks WHERE status IN ('QUEUED', 'RUNNING')")
    return int(row[0]) if row else 0


def return_row(tx: Tx, legacy: LegacyTable, table: Table, key: Value) -> None:
    """Let old workers claim a row again."""
    id, status = table.column(legacy.id), table.column(legacy.status)
    tx.execute(f"UPDATE {table.sql} SET {status} = ? WHERE {id} = ?", (legacy.queued, key))


def insert_row(tx: Tx, table: Table, values: Mapping[str, Value]) -> None:
    """Insert a row of the legacy table."""
    tx.execute(
        f"INSERT INTO {table.sql} ({', '.join(map(table.column, values))}) VALUES ({', '.join('?' for _ in values)})",
        list(values.values()),
    )


def cancelled_by(tx: Tx, task_id: str, actor: str) -> Sequence[Any] | None:
    """Return (user id,) of a task that ``actor`` cancelled; None for any other task."""
    return tx.one("SELECT user_id FROM tasks WHERE id = ? AND status = 'CANCELLED' AND cancel_by = ?", (task_id, actor))


def savepoint(tx: Tx) -> None:
    """Set a savepoint inside the transaction."""
    tx.execute("SAVEPOINT headway_move")


def roll_back_to_savepoint(tx: Tx) -> None:
    """Undo what the transaction did since `savepoint`."""
    tx.execute("ROLLBACK TO SAVEPOINT headway_move")


def release_savepoint(tx: Tx) -> None:
    """Keep the changes since `savepoint`."""
    tx.execute("RELEASE SAVEPOINT headway_move")


def all_rows(database: Database, name: str, key: str, where: Mapping[str, str]) -> Iterator[dict[str, object]]:
    """Return the rows of a table whose columns equal ``where``, in the order of ``key``."""
    table = find_table(database, name)
    condition = " AND ".join(f"{table.column(column)} = ?" for column in where) or "true"
    columns = list(map(quoted, table.types))
    for page in pages_by(database, table, columns, table.column(key), condition, list(where.values())):
        yield from (dict(zip(table.types, row, strict=True)) for row in page)


def pages_by(
    database: Database, table: Table, columns: Sequence[str], key: str, condition: str, values: Sequence[Value]
) -> Iterator[Sequence[Any]]:
    """Return pages of a table along ``key``."""
    last: list[Value] = []
    while True:
        after = f" AND {key} > ?" if last else ""
        rows = database.all(
            f"SELECT {', '.join(columns)}, {key} FROM {table.sql} WHERE {condition}{after} ORDER BY {key} LIMIT ?",
            (*values, *last, _PAGE),
        )
        yield [row[:-1] for row in rows]
        if len(rows) < _PAGE:
            return
        last = [rows[-1][-1]]
