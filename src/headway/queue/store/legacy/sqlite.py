"""Triggers of a legacy table on SQLite."""

from __future__ import annotations

from headway._sql import Database
from headway.errors import InvalidInput
from headway.queue.store.insert import LEGACY_BUSY, LEGACY_TAKEN
from headway.queue.store.legacy.table import (
    FINAL_STATUSES,
    LegacyTable,
    Table,
    active_counts,
    active_words,
    allowed_tasks,
    changes_of,
    literal,
    quoted,
    word_of,
)

IS_INSTALLED = "SELECT 1 FROM sqlite_master WHERE type = 'trigger' AND name = ?"


def find_table(database: Database, schema: str | None, name: str) -> Table:
    """Look up a table; it has no columns if it does not exist."""
    rows = database.all("SELECT name, type FROM pragma_table_info(?, ?)", (name, schema or "main"))
    return Table(quoted(name) if schema in (None, "main") else f"{schema}.{quoted(name)}", dict(rows))


def check_table(legacy: LegacyTable, table: Table) -> None:
    """Raise `InvalidInput` for a table of another file: its triggers could not see ``tasks``."""
    if "." in table.sql:
        raise InvalidInput(f"{legacy.table} is not in the main database.", hint="Name a table of the queue's own file.")


def drop_statements(legacy: LegacyTable, _table: Table) -> list[str]:
    """Return the statements that remove the triggers."""
    return [f"DROP TRIGGER IF EXISTS {legacy.trigger}_{part}" for part in ("insert", "update", "legacy")]


def create_statements(legacy: LegacyTable, table: Table) -> list[str]:
    """Return the statements that create the triggers."""
    queued = literal(legacy.queued)
    statements = [
        _follow(legacy, table, "insert", "INSERT ON tasks", begins="1", known_words=queued),
        _follow(
            legacy, table, "update",
            "UPDATE OF status, percent ON tasks WHEN NEW.status <> OLD.status OR NEW.percent <> OLD.percent",
            begins=f"OLD.status IN ({FINAL_STATUSES}) AND NEW.status = 'QUEUED'",
            known_words=f"{queued}, {word_of(legacy, 'OLD.status')}",
        ),
    ]  # fmt: skip
    return statements if legacy.user_id is None else [*statements, _refuse_rows(legacy, table)]


def _follow(legacy: LegacyTable, table: Table, name: str, event: str, *, begins: str, known_words: str) -> str:
    """Return the trigger that checks and updates the row of a task.

    ``begins``: condition for a task that becomes active. ``known_words``: words that its row may have then.
    """
    id, status = table.column(legacy.id), table.column(legacy.status)
    refuse = (
        f"SELECT RAISE(ABORT, {literal(f'{LEGACY_TAKEN}: {legacy.table}')}) WHERE {begins} AND EXISTS "
        f"(SELECT 1 FROM {table.sql} l WHERE l.{id} = NEW.id AND CAST(l.{status} AS TEXT) NOT IN ({known_words}));"
    )
    if legacy.user_id is not None:
        own_row = f"EXISTS (SELECT 1 FROM {table.sql} o WHERE o.{id} = NEW.id)"
        rows, tasks = active_counts(legacy, table, schema="", user="NEW.user_id", value="NEW.user_id", own_row=own_row)
        refuse += (
            f" SELECT RAISE(ABORT, {literal(f'{LEGACY_BUSY}: {legacy.table}')}) WHERE {begins} AND NEW.slot IS NOT NULL "
            f"AND {rows} > 0 AND {rows} + {tasks} > {allowed_tasks('')};"
        )
    changes = changes_of(legacy, table, word_of(legacy, "NEW.status"))
    update = f"UPDATE {table.sql} SET {changes} WHERE {id} = NEW.id;"
    return f"CREATE TRIGGER {legacy.trigger}_{name} AFTER {event} BEGIN {refuse} {update} END"


def _refuse_rows(legacy: LegacyTable, table: Table) -> str:
    """Return the trigger that refuses a new row of a user with too many active tasks."""
    assert legacy.user_id is not None
    status, user = table.column(legacy.status), f"NEW.{table.column(legacy.user_id)}"
    rows, tasks = active_counts(legacy, table, schema="", user=f"CAST({user} AS TEXT)", value=user, own_row="0")
    return (
        f"CREATE TRIGGER {legacy.trigger}_legacy AFTER INSERT ON {table.sql} "
        f"WHEN CAST(NEW.{status} AS TEXT) IN ({active_words(legacy, legacy.queued)}) "
        f"BEGIN SELECT RAISE(ABORT, {literal(f'{LEGACY_BUSY}: the user has a task in Headway')}) WHERE {tasks} > 0 "
        f"AND {rows} + {tasks} > {allowed_tasks('')}; END"
    )
