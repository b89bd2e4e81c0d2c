"""Changes of alerts by users: acknowledge, mute, unmute. Each is one transaction with its audit entry."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway._sql import Database, Tx
from headway.alerts.rules import BY_NAME, RULES
from headway.alerts.store import alerts
from headway.alerts.store.alerts import Alert, Mute
from headway.errors import InvalidInput, NotFound
from headway.ledger.store.audit import audit

#: Longest mute in seconds. The settings turn a rule off permanently.
MOST_MUTED = 366 * 86_400.0
NAME_LIMIT = 500


def acknowledge(database: Database, no: int, *, by: str, reason: str = "") -> Alert:
    """Mark an open alert as being handled by ``by``. A repeated call keeps the first user."""
    who = _name(by)

    def work(tx: Tx) -> Alert:
        alert = alerts.lock_alert(tx, no) if 0 < no < 2**63 else None
        if alert is None:
            raise NotFound(f"There is no alert {no}.", hint="List them: headway alerts")
        if alert.closed_at is not None:
            raise InvalidInput(f"Alert {no} is already closed.", hint="List the open ones: headway alerts")
        if alert.acknowledged_by is not None:
            return alert
        now = tx.now()
        alerts.set_acknowledged(tx, no, who, now)
        facts = {"alert": no, "rule": alert.rule, "subject": alert.subject}
        _audit(tx, now, who, "alert.acknowledge", facts, reason)
        return alert._replace(acknowledged_by=who, acknowledged_at=now)

    return database.run(work, operation="alerts.acknowledge")


def mute(database: Database, rule: str, *, seconds: float, by: str, subject: str = "", reason: str = "") -> Mute:
    """Publish no alerts of a rule, or of one subject of it, for ``seconds``. Replaces an earlier mute."""
    known, who = _rule(rule), _name(by)
    if not (math.isfinite(seconds) and 0 < seconds <= MOST_MUTED):
        raise InvalidInput(
            f"A mute must last more than 0 s and at most {MOST_MUTED / 86_400:.0f} days (got {seconds!s:.40} s).",
            hint=f'Turn a rule off permanently: alert_{known} = "off" in headway.toml',
        )  # fmt: skip
    about = _name(subject, "The subject") if subject else ""

    def work(tx: Tx) -> Mute:
        now = tx.now()
        made = Mute(known, about, now + seconds, who, now)
        alerts.put_mute(tx, made)
        _audit(tx, now, who, "alert.mute", {"rule": known, "subject": about, "until": alerts.iso(made.until)}, reason)
        return made

    return database.run(work, operation="alerts.mute")


def unmute(database: Database, rule: str, *, by: str, subject: str = "", reason: str = "") -> bool:
    """End a mute. Return whether there was one. The next evaluation publishes the alerts that are still open."""
    known, who = _rule(rule), _name(by)

    def work(tx: Tx) -> bool:
        now = tx.now()
        if not alerts.delete_mute(tx, known, subject, now):
            return False
        _audit(tx, now, who, "alert.unmute", {"rule": known, "subject": subject}, reason)
        return True

    return database.run(work, operation="alerts.unmute")


def _rule(name: str) -> str:
    if name not in BY_NAME:
        raise NotFound(f"There is no rule {name!s:.80}.", hint=f"Use one of: {', '.join(rule.name for rule in RULES)}")
    return name


def _name(text: str, what: str = "The user") -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} contains a lone surrogate.") from error
    if not text.strip() or len(text) > NAME_LIMIT or "\0" in text:
        raise InvalidInput(f"{what} must have 1 to {NAME_LIMIT} characters without NUL.")
    return text


def _audit(tx: Tx, now: float, by: str, action: str, detail: Mapping[str, object], reason: str) -> None:
    audit(tx, now, by, action, "", {**detail, "reason": reason} if reason else detail)
