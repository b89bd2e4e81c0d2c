"""Pauses, settings, the audit trail and the deletion of old data.

Every function works inside the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from headway._sql import Database, Row, Tx
from headway.errors import InvalidInput
from headway.queue.task import Priority, check_actor, moment


def audit(tx: Tx, by: str, action: str, detail: Mapping[str, object]) -> None:
    """Write an audit trail entry (`headway audit`)."""
    check_actor(by)
    tx.execute(
        "INSERT INTO audit (at, actor, action, job, detail) VALUES (?, ?, ?, '', ?)",
        (tx.now(), by, action, json.dumps(detail, ensure_ascii=False)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Pauses


def pause(tx: Tx, queue: Priority, *, reason: str, by: str, until: datetime | None) -> None:
    """Pause a queue until it is resumed, or until ``until`` (a datetime with a time zone)."""
    check_actor(by, reason)
    if until is not None and getattr(until, "tzinfo", None) is None:
        raise InvalidInput("`until` must have a time zone.", hint="Use datetime.now(UTC) + timedelta(...)")
    end = None if until is None else _seconds(until)
    if end is not None and end <= tx.now():
        raise InvalidInput("`until` must be in the future.", hint="Leave it out to pause until the queue is resumed.")
    tx.execute(
        "UPDATE task_queues SET paused = 1, paused_by = ?, paused_at = ?, paused_until = ?, reason = ? WHERE name = ?",
        (by, tx.now(), end, reason, queue.value),
    )
    audit(
        tx, by, "queue.pause",
        {"queue": queue.value, "reason": reason, "until": None if until is None else until.isoformat(timespec="seconds")},
    )  # fmt: skip


def _seconds(until: datetime) -> float:
    """Convert to a timestamp. Near `datetime.max` the float rounds to a value that cannot be converted back."""
    try:
        moment(until.timestamp())
        return until.timestamp()
    except (ValueError, OverflowError):
        raise InvalidInput(
            "`until` is too far in the future.", hint="Leave it out to pause until the queue is resumed."
        ) from None


def resume(tx: Tx, queue: Priority, *, by: str, reason: str = "") -> bool:
    """Resume a queue; return whether it was paused."""
    check_actor(by, reason)
    changed = tx.execute(
        "UPDATE task_queues SET paused = 0, paused_by = NULL, paused_until = NULL, reason = '' "
        "WHERE name = ? AND paused = 1",
        (queue.value,),
    )
    if changed:
        audit(tx, by, "queue.resume", {"queue": queue.value, "reason": reason})
    return changed == 1


def paused_queues(tx: Tx, now: float) -> set[Priority]:
    """Return the queues that are paused at ``now``."""
    rows = tx.all(
        "SELECT name FROM task_queues WHERE paused = 1 AND (paused_until IS NULL OR paused_until > ?)", (now,)
    )
    return {Priority(name) for (name,) in rows}


# ---------------------------------------------------------------------------------------------------------------------
# Settings of the running queue: `headway.queue.settings` has their names and values

#: The limit of active tasks per user that the application has declared.
_PER_USER = "app.per_user"


def read_settings(of: Database | Tx) -> list[Row]:
    """Return (name, value, set by, set at) of what operators have set."""
    return of.all("SELECT name, value, set_by, set_at FROM task_settings WHERE name <> ?", (_PER_USER,))


def write_setting(tx: Tx, name: str, value: str, *, by: str) -> None:
    """Set one value; do nothing if it is set already."""
    tx.execute(
        "INSERT INTO task_settings (name, value, set_by, set_at) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "value = excluded.value, set_by = excluded.set_by, set_at = excluded.set_at "
        "WHERE task_settings.value <> excluded.value",
        (name, value, by, tx.now()),
    )


def delete_setting(tx: Tx, name: str) -> bool:
    """Remove a value; return whether it was set."""
    return tx.execute("DELETE FROM task_settings WHERE name = ?", (name,)) == 1


def declare_per_user(tx: Tx, per_user: int | None) -> None:
    """Store the application's limit, for tools that manage the queue without the application."""
    write_setting(tx, _PER_USER, "none" if per_user is None else str(per_user), by="application")


def declared_per_user(of: Database | Tx) -> str | None:
    """Return the declared limit as text; None if the application never declared one."""
    row = of.one("SELECT value FROM task_settings WHERE name = ?", (_PER_USER,))
    return None if row is None else str(row[0])


# ---------------------------------------------------------------------------------------------------------------------
# Deleting old data

# The subselect hides the limit from PostgreSQL's planner. Without statistics it would estimate fewer ended tasks than the limit
# and scan the whole table instead of the index (measured by `tests/ledger/test_query_plans.py`).
_DELETE_ENDED = """
DELETE FROM tasks WHERE no IN (
    SELECT no FROM tasks WHERE ended_at IS NOT NULL AND ended_at < ? AND status IN ('COMPLETED', 'FAILED', 'CANCELLED')
    ORDER BY ended_at LIMIT (SELECT ?){skip_locked}
)
"""


def delete_ended(tx: Tx, *, retention: float, limit: int) -> int:
    """Delete up to ``limit`` tasks that ended more than ``retention`` seconds ago; return how many.

    Tasks that are being retried right now are locked and skipped. Otherwise PostgreSQL would wait and then delete them,
    because it rechecks only whether the number is in the list found before.
    """
    statement = _DELETE_ENDED.format(skip_locked=tx.skip_locked)
    return tx.execute(statement, (tx.now() - retention, limit))


#: Age in minutes at which a minute is added to the totals. No transaction lasts that long; the last hour is read from rows.
MINUTES_OPEN = 120
_ADD_UP = """
UPDATE task_queues SET
    completed = completed + coalesce((SELECT sum(m.completed) FROM task_minutes m WHERE m.queue = task_queues.name
                                      AND m.minute > task_queues.counted_until AND m.minute <= ?), 0),
    failed = failed + coalesce((SELECT sum(m.failed) FROM task_minutes m WHERE m.queue = task_queues.name
                                AND m.minute > task_queues.counted_until AND m.minute <= ?), 0),
    counted_until = ?
WHERE counted_until < ?
"""


def add_up_minutes(tx: Tx) -> None:
    """Add past minutes to the totals of their queues, so that readers need not sum the whole history."""
    until = int(tx.now() // 60) - MINUTES_OPEN
    tx.execute(_ADD_UP, (until,) * 4)


def delete_counts(tx: Tx, *, retention: float) -> None:
    """Delete minute counters, causes and rate allowances that are older than ``retention`` seconds."""
    before = tx.now() - retention
    # At most a day of minutes at a time, so that the first deletion of a year is not one long statement.
    tx.execute(
        "DELETE FROM task_minutes WHERE minute < ? AND minute <= (SELECT min(minute) + 1440 FROM task_minutes) "
        "AND minute <= (SELECT min(counted_until) FROM task_queues)",
        (int(before // 60),),
    )
    tx.execute("DELETE FROM task_causes WHERE last_seen < ?", (before,))
    # An allowance that had time to refill equals the default of a missing row.
    tx.execute(
        "DELETE FROM task_rates WHERE at < CAST(? AS DOUBLE PRECISION) - coalesce((SELECT max(1.0 / rate) "
        "FROM task_limits WHERE rate IS NOT NULL), 0.0)",
        (before,),
    )
