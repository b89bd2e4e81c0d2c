"""Changing rows of tasks and telling of it, in one statement: whoever sees the change finds its event."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headway._sql import Row, Tx, Value
from headway.events.sql import SHARE_APPENDING

SKIP_LOCKED = {"sqlite": "", "postgresql": " FOR UPDATE SKIP LOCKED"}
#: The database's time, the same throughout a statement, so that an index can be asked with it.
STATEMENT_TIME = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM statement_timestamp())::double precision",
}
#: Numbers of rows as one parameter, so that the statement is the same for one and for a hundred.
AMONG = {
    "sqlite": "no IN (SELECT value FROM json_each(?))",
    "postgresql": "no = ANY (CAST(translate(?, '[]', '{}') AS bigint[]))",
}
TOLD = "id, kind, queue, status, version, user_id, attempts, error, updated_at"
# The event of each row that was changed, as `records.tell` writes it.
_TELL = (
    "INSERT INTO outbox (id, type, at, source, job, version, data) SELECT id || '-' || version, 'task.' || lower(status), "
    "updated_at, 'headway.queue', id, version, {object}('kind', kind, 'status', status, 'queue', queue, 'user_id', user_id, "
    "'attempts', attempts, 'error', error) FROM {rows} ON CONFLICT (id) DO NOTHING"
)


def change(tx: Tx, source: str, values: Sequence[Value], changes: str, match: str, columns: str) -> list[Row]:
    """Change the rows that match those of ``source``, and tell of each; the changed rows."""
    if tx.engine == "postgresql":
        return tx.all(f"WITH {changing(source, changes, match, columns)}", values)
    rows = tx.all(
        f"WITH source AS MATERIALIZED ({source}) UPDATE tasks SET {changes} FROM source WHERE {match} "
        f"RETURNING {columns}, no",
        values,
    )
    if rows:
        tell = _TELL.format(object="json_object", rows=f"tasks WHERE {AMONG['sqlite']}")
        tx.execute(tell, (json.dumps([row[-1] for row in rows]),))
    return [row[:-1] for row in rows]


def changing(source: str, changes: str, match: str, columns: str, more: str = "") -> str:
    """The same as one statement of PostgreSQL, from behind its WITH; ``more`` is done with what was changed.

    ``source`` is evaluated once: inside an IN the planner might evaluate it again, and lock and take more rows than its
    LIMIT. The lock of those who append comes before the first number of the outbox, because the rows that are inserted
    there are those of a join with it.
    """
    return (
        f"source AS MATERIALIZED ({source}), appending AS MATERIALIZED ({SHARE_APPENDING}), changed AS (UPDATE tasks "
        f"SET {changes} FROM source WHERE {match} RETURNING tasks.*), told AS ({telling('changed')}){more} "
        f"SELECT {columns} FROM changed"
    )


def telling(rows: str) -> str:
    return _TELL.format(object="json_build_object", rows=f"{rows} CROSS JOIN appending")
