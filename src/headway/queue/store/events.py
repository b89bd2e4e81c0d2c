"""Update task rows and append their events in one statement, so that a visible change always has its event."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headway._sql import Row, Tx, Value
from headway.events.store.postgres import SHARE_APPENDING

SKIP_LOCKED = {"sqlite": "", "postgresql": " FOR UPDATE SKIP LOCKED"}
#: The database's time as an expression that is constant within a statement, so that indexes can be used with it.
STATEMENT_TIME = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM statement_timestamp())::double precision",
}
#: Condition on row numbers as one parameter, so that the statement text does not depend on their count.
AMONG = {
    "sqlite": "no IN (SELECT value FROM json_each(?))",
    "postgresql": "no = ANY (CAST(translate(?, '[]', '{}') AS bigint[]))",
}
TOLD = "id, kind, queue, status, version, user_id, attempts, error, updated_at"
# Append the event of each changed row, in the format of `records.tell`.
_TELL = (
    "INSERT INTO outbox (id, type, at, source, job, version, data) SELECT id || '-' || version, 'task.' || lower(status), "
    "updated_at, 'headway.queue', id, version, {object}('kind', kind, 'status', status, 'queue', queue, 'user_id', user_id, "
    "'attempts', attempts, 'error', error) FROM {rows} ON CONFLICT (id) DO NOTHING"
)


def change(tx: Tx, source: str, values: Sequence[Value], changes: str, match: str, columns: str) -> list[Row]:
    """Update the rows that match ``source``, append their events and return ``columns`` of the updated rows."""
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
    """Return the PostgreSQL form of `change`, without the leading WITH. ``more``: further CTEs that may use ``changed``.

    ``source`` is materialized. Inside an IN the planner might evaluate it again, and lock and change more rows than its
    LIMIT. The lock for appending is taken before the first outbox number is drawn, because the inserted rows come from a
    join with it.
    """
    return (
        f"source AS MATERIALIZED ({source}), appending AS MATERIALIZED ({SHARE_APPENDING}), changed AS (UPDATE tasks "
        f"SET {changes} FROM source WHERE {match} RETURNING tasks.*), told AS ({telling('changed')}){more} "
        f"SELECT {columns} FROM changed"
    )


def telling(rows: str) -> str:
    """Return the PostgreSQL statement that appends the events of ``rows``."""
    return _TELL.format(object="json_build_object", rows=f"{rows} CROSS JOIN appending")
