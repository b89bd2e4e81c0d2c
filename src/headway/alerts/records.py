"""The rows of alerts: one for each from its opening to its closing, with its two events in the same transactions.

An event's id is made of the database's uuid and the alert's number, so it is the same whoever tells it and however often.
An alert of a muted rule opens and closes like any other, and no event says so; if it is still open when the mute ends, it
is told then. What was never told as opened is never told as closed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from headway._sql import Database, Row, Tx, marks
from headway.alerts.rules import BY_NAME, RULES, Reading, Severity
from headway.errors import InvalidInput, NotFound
from headway.events import Event, append

#: The longest mute, seconds: a rule that nobody wants any more is switched off in the settings.
MOST_MUTED = 366 * 86_400.0
NAME_LIMIT = 500

_COLUMNS = (
    "no, rule, subject, severity, text, value, peak, threshold, opened_at, closed_at, published, "
    "acknowledged_by, acknowledged_at"
)


#: Of a rule: its name, its limit, the highest value, whose it is, when that was.
Note = tuple[str, float | None, float | None, str | None, float]


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
    """A rule, or one subject of it, that nobody wants to hear of until then."""

    rule: str
    subject: str
    until: float
    by: str
    at: float


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def open_alerts(tx: Tx) -> list[Alert]:
    return [_alert(row) for row in tx.all(f"SELECT {_COLUMNS} FROM alerts WHERE closed_at IS NULL ORDER BY no")]


def closed_alerts(tx: Tx, limit: int) -> list[Alert]:
    """The latest first."""
    sql = f"SELECT {_COLUMNS} FROM alerts WHERE closed_at IS NOT NULL ORDER BY closed_at DESC, no DESC LIMIT ?"
    return [_alert(row) for row in tx.all(sql, (limit,))]


def mutes(tx: Tx, now: float) -> list[Mute]:
    return [
        Mute(*row)
        for row in tx.all("SELECT rule, subject, until, by, at FROM alert_mutes WHERE until > ? ORDER BY rule, subject", (now,))
    ]  # fmt: skip


def notes(tx: Tx) -> dict[str, Note]:
    """What each rule saw when it was judged last, by its name."""
    rows = tx.all("SELECT name, threshold, value, subject, checked_at FROM alert_rules")
    return {row[0]: row for row in rows}


def had(tx: Tx, rule: str, subjects: Sequence[str]) -> set[str]:
    """Those of ``subjects`` that the rule has an alert of, open or closed."""
    found: set[str] = set()
    for start in range(0, len(subjects), 500):
        part = subjects[start : start + 500]
        rows = tx.all(f"SELECT subject FROM alerts WHERE rule = ? AND subject IN ({marks(len(part))})", (rule, *part))
        found.update(subject for (subject,) in rows)
    return found


def is_muted(muted: Sequence[Mute], rule: str, subject: str) -> bool:
    return any(mute.rule == rule and mute.subject in ("", subject) for mute in muted)


# ---------------------------------------------------------------------------------------------------------------------
# Changing, under the evaluator's lease


def open_alert(tx: Tx, reading: Reading, threshold: float, opened_at: float) -> Alert:
    severity = BY_NAME[reading.rule].severity
    row = tx.one(
        "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING no",
        (reading.rule, reading.subject, severity, reading.text, reading.value, reading.value, threshold, opened_at),
    )
    assert row is not None
    return Alert(row[0], reading.rule, reading.subject, severity, reading.text, reading.value, reading.value, threshold,
                 opened_at, None, published=False, acknowledged_by=None, acknowledged_at=None)  # fmt: skip


def tell_opened(tx: Tx, alert: Alert, now: float) -> None:
    tx.execute("UPDATE alerts SET published = 1 WHERE no = ?", (alert.no,))
    event = _event(
        tx,
        alert,
        type="alert.opened",
        now=now,
        more={},
    )
    append(tx, event)


def close_alert(tx: Tx, alert: Alert, now: float) -> None:
    now = max(now, alert.opened_at)  # a clock that was set back ends nothing before it began
    tx.execute("UPDATE alerts SET closed_at = ? WHERE no = ?", (now, alert.no))
    if alert.published:
        more: dict[str, str | float] = {"closed_at": _iso(now), "seconds": round(now - alert.opened_at, 3)}
        event = _event(
            tx,
            alert,
            type="alert.closed",
            now=now,
            more=more,
        )
        append(tx, event)


def update_values(tx: Tx, changes: Sequence[tuple[Alert, Reading]]) -> None:
    if changes:
        tx.executemany(
            "UPDATE alerts SET text = ?, value = ?, peak = CASE WHEN peak < ? THEN ? ELSE peak END WHERE no = ?",
            [(one.text, one.value, one.value, one.value, alert.no) for alert, one in changes],
        )


def write_rules(tx: Tx, notes: Sequence[Note]) -> None:
    """What each rule saw that was judged."""
    tx.insert(
        "INSERT INTO alert_rules (name, threshold, value, subject, checked_at) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET threshold = excluded.threshold, value = excluded.value, "
        "subject = excluded.subject, checked_at = excluded.checked_at",
        notes,
    )


def hold_mark(tx: Tx, rule: str, since: float) -> None:
    """The rule has not seen everything: the next look begins where this one did, ``since`` if it was the first."""
    tx.execute(
        "INSERT INTO alert_rules (name, checked_at) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
        (rule, since),
    )


def purge(tx: Tx, before: float) -> int:
    """Delete alerts that were closed before then; how many."""
    tx.execute("DELETE FROM alert_mutes WHERE until < ?", (before,))
    return tx.execute("DELETE FROM alerts WHERE closed_at < ?", (before,))


# ---------------------------------------------------------------------------------------------------------------------
# Changing, by a person


def acknowledge(database: Database, no: int, *, by: str, reason: str = "") -> Alert:
    """Somebody knows of it and sees to it. Acknowledged again, it stays with who was first."""
    who = _name(by)

    def work(tx: Tx) -> Alert:
        row = (
            tx.one(f"SELECT {_COLUMNS} FROM alerts WHERE no = ?{_LOCKED[tx.engine]}", (no,)) if 0 < no < 2**63 else None
        )
        if row is None:
            raise NotFound(f"There is no alert {no}.", hint="See them all: headway alerts")
        alert = _alert(row)
        if alert.closed_at is not None:
            raise InvalidInput(f"Alert {no} is closed already.", hint="See what is open: headway alerts")
        if alert.acknowledged_by is not None:
            return alert
        now = tx.now()
        tx.execute("UPDATE alerts SET acknowledged_by = ?, acknowledged_at = ? WHERE no = ?", (who, now, no))
        facts = {"alert": no, "rule": alert.rule, "subject": alert.subject}
        _audit(tx, now, who, "alert.acknowledge", facts, reason)
        return alert._replace(acknowledged_by=who, acknowledged_at=now)

    return database.run(work, operation="alerts.acknowledge")


def mute(database: Database, rule: str, *, seconds: float, by: str, subject: str = "", reason: str = "") -> Mute:
    """Tell nothing of a rule, or of one subject of it, for so long. Said again, the newer word counts."""
    known, who = _rule(rule), _name(by)
    if not (math.isfinite(seconds) and 0 < seconds <= MOST_MUTED):
        raise InvalidInput(
            f"A mute lasts for more than 0 s and at most {MOST_MUTED / 86_400:.0f} days, not {seconds!s:.40} s.",
            hint=f'Switch a rule off for good: alert_{known} = "off" in headway.toml',
        )  # fmt: skip
    about = _name(subject, "The subject") if subject else ""

    def work(tx: Tx) -> Mute:
        now = tx.now()
        made = Mute(known, about, now + seconds, who, now)
        tx.execute(
            "INSERT INTO alert_mutes (rule, subject, until, by, at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (rule, subject) "
            "DO UPDATE SET until = excluded.until, by = excluded.by, at = excluded.at",
            made,
        )
        _audit(tx, now, who, "alert.mute", {"rule": known, "subject": about, "until": _iso(made.until)}, reason)
        return made

    return database.run(work, operation="alerts.mute")


def unmute(database: Database, rule: str, *, by: str, subject: str = "", reason: str = "") -> bool:
    """Whether it had been muted. What opened meanwhile and is still open is told by the next evaluation."""
    known, who = _rule(rule), _name(by)

    def work(tx: Tx) -> bool:
        now = tx.now()
        stood = tx.one("SELECT until FROM alert_mutes WHERE rule = ? AND subject = ?", (known, subject))
        if stood is None or stood[0] <= now:
            return False
        tx.execute("DELETE FROM alert_mutes WHERE rule = ? AND subject = ?", (known, subject))
        _audit(tx, now, who, "alert.unmute", {"rule": known, "subject": subject}, reason)
        return True

    return database.run(work, operation="alerts.unmute")


# ---------------------------------------------------------------------------------------------------------------------


def _alert(row: Row) -> Alert:
    alert = Alert(*row)
    return alert._replace(published=bool(alert.published))


def _rule(name: str) -> str:
    if name not in BY_NAME:
        raise NotFound(f"There is no rule {name!s:.80}.", hint=f"There are: {', '.join(rule.name for rule in RULES)}")
    return name


def _name(text: str, what: str = "Who does it") -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} is no valid text.") from error
    if not text.strip() or len(text) > NAME_LIMIT or "\0" in text:
        raise InvalidInput(f"{what} is to be said in 1 to {NAME_LIMIT} characters.")
    return text


def _audit(tx: Tx, now: float, by: str, action: str, detail: Mapping[str, object], reason: str) -> None:
    if reason:
        detail = {**detail, "reason": reason}
    tx.execute(
        "INSERT INTO audit (at, actor, action, job, detail) VALUES (?, ?, ?, '', ?)",
        (now, by, action, json.dumps(detail, ensure_ascii=False)),
    )


def _event(tx: Tx, alert: Alert, *, type: str, now: float, more: Mapping[str, str | float]) -> Event:
    row = tx.one("SELECT value FROM meta WHERE name = 'database'")
    assert row is not None
    return Event(
        # With the moment: a database restored from a copy gives its numbers again.
        id=f"{row[0]}-{type}-{alert.no}-{round(alert.opened_at * 1000)}",
        type=type,
        at=datetime.fromtimestamp(now, UTC),
        source="headway.alerts",
        job=f"alerts/{alert.rule}",  # no job can have this id: no sink of one job hears it
        version=1 if type == "alert.opened" else 2,
        data={
            "alert": alert.no, "rule": alert.rule, "subject": alert.subject, "severity": alert.severity,
            "text": alert.text, "value": alert.value, "limit": alert.threshold, "opened_at": _iso(alert.opened_at),
            **more,
        },
    )  # fmt: skip


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
