"""The tables of alerts, mutes, rules and timers. Every function works inside the caller's transaction.

Opening and closing an alert each append an event in the same transaction. Its id contains the database's uuid and the
alert's number, so a repetition appends the same event.

An alert of a muted rule opens and closes without events. If it is still open at the end of the mute, it is published then.
An alert that was not published when it opened is not published when it closes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from headway._lease import has_ended, read_owner
from headway._sql import Row, Tx, marks
from headway.alerts.rules import BY_NAME, Reading, Severity
from headway.events import Event, append

_COLUMNS = (
    "no, rule, subject, severity, text, value, peak, threshold, opened_at, closed_at, published, "
    "acknowledged_by, acknowledged_at"
)


#: The last evaluation of a rule: its name, limit, highest value, the subject of that value, time.
Note = tuple[str, float | None, float | None, str | None, float]

#: (rule, subject, since, seen_at): since when a value is beyond a limit, and when that was last seen.
Timer = tuple[str, str, float, float]


class Alert(NamedTuple):
    """One alert, from its opening on. Times are Unix times by the database's clock."""

    no: int
    rule: str
    subject: str
    severity: Severity
    text: str
    value: float
    peak: float
    threshold: float
    opened_at: float
    closed_at: float | None
    published: bool
    acknowledged_by: str | None
    acknowledged_at: float | None


class Mute(NamedTuple):
    """A rule, or one subject of it, whose alerts are not published until a time."""

    rule: str
    subject: str
    until: float
    by: str
    at: float


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def open_alerts(tx: Tx) -> list[Alert]:
    """Return the open alerts, oldest first."""
    return [_alert(row) for row in tx.all(f"SELECT {_COLUMNS} FROM alerts WHERE closed_at IS NULL ORDER BY no")]


def closed_alerts(tx: Tx, limit: int) -> list[Alert]:
    """Return closed alerts, latest first."""
    sql = f"SELECT {_COLUMNS} FROM alerts WHERE closed_at IS NOT NULL ORDER BY closed_at DESC, no DESC LIMIT ?"
    return [_alert(row) for row in tx.all(sql, (limit,))]


def mutes(tx: Tx, now: float) -> list[Mute]:
    """Return the mutes in force."""
    return [
        Mute(*row)
        for row in tx.all("SELECT rule, subject, until, by, at FROM alert_mutes WHERE until > ? ORDER BY rule, subject", (now,))
    ]  # fmt: skip


def notes(tx: Tx) -> dict[str, Note]:
    """Return the last evaluation of each rule, by its name."""
    rows = tx.all("SELECT name, threshold, value, subject, checked_at FROM alert_rules")
    return {row[0]: row for row in rows}


def holder_of(tx: Tx, lease: str) -> str | None:
    """Return the process that holds a lease, or None."""
    row = tx.one("SELECT holder, lease_until FROM leases WHERE name = ?", (lease,))
    found = None if row is None or has_ended(row[0], row[1], tx.now()) else read_owner(row[0])
    return None if found is None else str(found.owner)


def had(tx: Tx, rule: str, subjects: Sequence[str]) -> set[str]:
    """Return those of ``subjects`` for which the rule has an alert, open or closed."""
    found: set[str] = set()
    for start in range(0, len(subjects), 500):
        part = subjects[start : start + 500]
        rows = tx.all(f"SELECT subject FROM alerts WHERE rule = ? AND subject IN ({marks(len(part))})", (rule, *part))
        found.update(subject for (subject,) in rows)
    return found


def is_muted(muted: Sequence[Mute], rule: str, subject: str) -> bool:
    """Return whether a mute covers the subject of a rule."""
    return any(mute.rule == rule and mute.subject in ("", subject) for mute in muted)


# ---------------------------------------------------------------------------------------------------------------------
# Changes by the evaluator, under its lease


def open_alert(tx: Tx, reading: Reading, threshold: float, opened_at: float) -> Alert:
    """Insert an alert. `publish_opening` appends its event."""
    severity = BY_NAME[reading.rule].severity
    row = tx.one(
        "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING no",
        (reading.rule, reading.subject, severity, reading.text, reading.value, reading.value, threshold, opened_at),
    )
    assert row is not None
    return Alert(row[0], reading.rule, reading.subject, severity, reading.text, reading.value, reading.value, threshold,
                 opened_at, None, published=False, acknowledged_by=None, acknowledged_at=None)  # fmt: skip


def publish_opening(tx: Tx, alert: Alert, now: float) -> None:
    """Append the event of an opened alert."""
    tx.execute("UPDATE alerts SET published = 1 WHERE no = ?", (alert.no,))
    append(tx, _event(tx, alert, type="alert.opened", now=now, more={}))


def close_alert(tx: Tx, alert: Alert, now: float) -> None:
    """Close an alert, and append its event if its opening was published."""
    now = max(now, alert.opened_at)  # the clock may have been set back
    tx.execute("UPDATE alerts SET closed_at = ? WHERE no = ?", (now, alert.no))
    if alert.published:
        more: dict[str, str | float] = {"closed_at": iso(now), "seconds": round(now - alert.opened_at, 3)}
        append(tx, _event(tx, alert, type="alert.closed", now=now, more=more))


def update_values(tx: Tx, changes: Sequence[tuple[Alert, Reading]]) -> None:
    """Store the current readings of open alerts."""
    if changes:
        tx.executemany(
            "UPDATE alerts SET text = ?, value = ?, peak = CASE WHEN peak < ? THEN ? ELSE peak END WHERE no = ?",
            [(one.text, one.value, one.value, one.value, alert.no) for alert, one in changes],
        )


def write_rules(tx: Tx, notes: Sequence[Note]) -> None:
    """Store the evaluation of each rule."""
    tx.insert(
        "INSERT INTO alert_rules (name, threshold, value, subject, checked_at) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET threshold = excluded.threshold, value = excluded.value, "
        "subject = excluded.subject, checked_at = excluded.checked_at",
        notes,
    )


def hold_mark(tx: Tx, rule: str, since: float) -> None:
    """Keep the time of a rule's last evaluation, because this one was incomplete. ``since`` is used if it was the first."""
    tx.execute(
        "INSERT INTO alert_rules (name, checked_at) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
        (rule, since),
    )


def purge(tx: Tx, before: float) -> int:
    """Delete alerts that were closed before ``before``. Return how many."""
    tx.execute("DELETE FROM alert_mutes WHERE until < ?", (before,))
    return tx.execute("DELETE FROM alerts WHERE closed_at < ?", (before,))


def timers(tx: Tx) -> list[Timer]:
    """Return the running timers."""
    return tx.all("SELECT rule, subject, since, seen_at FROM alert_timers")


def write_timers(tx: Tx, running: Sequence[Timer], over: Sequence[tuple[str, str]]) -> None:
    """Store the running timers, and delete those in ``over`` (rule, subject)."""
    if over:
        tx.executemany("DELETE FROM alert_timers WHERE rule = ? AND subject = ?", over)
    if running:
        tx.insert(
            "INSERT INTO alert_timers (rule, subject, since, seen_at) VALUES (?, ?, ?, ?) ON CONFLICT (rule, subject) "
            "DO UPDATE SET since = excluded.since, seen_at = excluded.seen_at",
            running,
        )


def last_evaluation(tx: Tx) -> float | None:
    """Return when any rule was last evaluated; None if none ever was."""
    row = tx.one("SELECT max(checked_at) FROM alert_rules")
    return None if row is None else row[0]


# ---------------------------------------------------------------------------------------------------------------------
# Changes by users: `headway.alerts.actions`


def lock_alert(tx: Tx, no: int) -> Alert | None:
    """Return an alert, locked until the transaction ends, or None."""
    row = tx.one(f"SELECT {_COLUMNS} FROM alerts WHERE no = ?{tx.for_update}", (no,))
    return None if row is None else _alert(row)


def set_acknowledged(tx: Tx, no: int, by: str, at: float) -> None:
    """Store who handles an alert."""
    tx.execute("UPDATE alerts SET acknowledged_by = ?, acknowledged_at = ? WHERE no = ?", (by, at, no))


def put_mute(tx: Tx, mute: Mute) -> None:
    """Insert or replace a mute."""
    tx.execute(
        "INSERT INTO alert_mutes (rule, subject, until, by, at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (rule, subject) "
        "DO UPDATE SET until = excluded.until, by = excluded.by, at = excluded.at",
        mute,
    )


def delete_mute(tx: Tx, rule: str, subject: str, now: float) -> bool:
    """Delete a mute. Return whether it was in force."""
    return tx.execute("DELETE FROM alert_mutes WHERE rule = ? AND subject = ? AND until > ?", (rule, subject, now)) > 0


# ---------------------------------------------------------------------------------------------------------------------


def _alert(row: Row) -> Alert:
    alert = Alert(*row)
    return alert._replace(published=bool(alert.published))


def _event(tx: Tx, alert: Alert, *, type: str, now: float, more: Mapping[str, str | float]) -> Event:
    row = tx.one("SELECT value FROM meta WHERE name = 'database'")
    assert row is not None
    return Event(
        # With the time: a database restored from a copy assigns its numbers again.
        id=f"{row[0]}-{type}-{alert.no}-{round(alert.opened_at * 1000)}",
        type=type,
        at=datetime.fromtimestamp(now, UTC),
        source="headway.alerts",
        job=f"alerts/{alert.rule}",  # not a valid job id, so no sink of one job receives it
        version=1 if type == "alert.opened" else 2,
        data={
            "alert": alert.no, "rule": alert.rule, "subject": alert.subject, "severity": alert.severity,
            "text": alert.text, "value": alert.value, "limit": alert.threshold, "opened_at": iso(alert.opened_at),
            **more,
        },
    )  # fmt: skip


def iso(at: float) -> str:
    """Format a Unix time as in the data of events."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
