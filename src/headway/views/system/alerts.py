"""Alerts: what needs somebody now, what did before, and what each rule sees."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.alerts.records import Alert, Mute

#: Closed alerts that are shown where nobody says how many.
HISTORY = 50
#: A rule that was not judged for so many seconds is unknown: four rounds, and the time to replace an evaluator.
STALE_SECONDS = 75.0


class AlertView(NamedTuple):
    """One alert, from its opening on."""

    no: Annotated[int, "its number"]
    rule: Annotated[str, "which rule it is of"]
    subject: Annotated[str, "the worker, queue, job, cause, sink or store it is about"]
    severity: Annotated[Literal["critical", "warning"], "how urgent it is"]
    text: Annotated[str, "one sentence for people"]
    value: Annotated[float, "the value when it was above its limit last"]
    peak: Annotated[float, "the highest value"]
    limit: Annotated[float, "the value from which on it is an alert"]
    opened_at: Annotated[datetime, "when it opened"]
    closed_at: Annotated[datetime | None, "when it closed; null while it is open"]
    muted: Annotated[bool, "whether nobody is told of it just now"]
    acknowledged_by: Annotated[str | None, "who knows of it"]
    acknowledged_at: Annotated[datetime | None, "since when"]


class RuleView(NamedTuple):
    """One rule, and what it saw when it was judged last."""

    name: Annotated[str, "its name"]
    help: Annotated[str, "what it is about"]
    severity: Annotated[Literal["critical", "warning"], "how urgent its alerts are"]
    unit: Annotated[Literal["s", "tasks", "share"], "what its values are"]
    state: Annotated[Literal["ok", "open", "unknown", "off"], "unknown: it could not be judged lately"]
    limit: Annotated[float | None, "from which value on; null if it is off or was never judged"]
    value: Annotated[float | None, "the highest value; null if there is none"]
    subject: Annotated[str | None, "whose value it is"]
    checked_at: Annotated[datetime | None, "when it was judged last"]
    open: Annotated[int, "its open alerts"]
    muted_until: Annotated[datetime | None, "until when nobody is told of any of them"]
    muted_by: Annotated[str | None, "who muted it"]


class MuteView(NamedTuple):
    """A rule, or one subject of it, that nobody is told of."""

    rule: Annotated[str, "the rule"]
    subject: Annotated[str, "the subject; empty: every one"]
    until: Annotated[datetime, "until when"]
    by: Annotated[str, "who muted it"]
    at: Annotated[datetime, "when"]


class Alerts(NamedTuple):
    """`headway alerts`: what needs somebody, what did before, and what each rule sees."""

    at: Annotated[datetime, "when this was read, by the database's clock"]
    checked_at: Annotated[datetime | None, "when the rules were judged last; null: never"]
    stale: Annotated[bool, "whether that is so long ago that nothing below is news"]
    evaluator: Annotated[str | None, "the process that judges them"]
    alerts: Annotated[tuple[AlertView, ...], "open alerts, the most urgent first"]
    history: Annotated[tuple[AlertView, ...], "closed alerts, the latest first"]
    rules: Annotated[tuple[RuleView, ...], "every rule, the most urgent first"]
    mutes: Annotated[tuple[MuteView, ...], "what is muted"]

    def as_json(self) -> Json:
        return document(self)


def read_alerts(database: Database, *, history: int = HISTORY) -> Alerts:
    """Everything about alerts, of one moment."""
    from headway._lease import has_ended, read_owner
    from headway.alerts import records
    from headway.alerts.evaluator import LEASE_NAME
    from headway.alerts.rules import RULES

    with database.read() as tx:
        now = tx.now()
        open_, closed = records.open_alerts(tx), records.closed_alerts(tx, history)
        notes, mutes = records.notes(tx), records.mutes(tx, now)
        lease = tx.one("SELECT holder, lease_until FROM leases WHERE name = ?", (LEASE_NAME,))
    holder = None if lease is None or has_ended(lease[0], lease[1], now) else read_owner(lease[0])
    order = {rule.name: place for place, rule in enumerate(RULES)}
    open_.sort(key=lambda alert: (order.get(alert.rule, len(order)), alert.opened_at, alert.no))
    checked_at = max((note[4] for note in notes.values()), default=None)
    rules = []
    for rule in RULES:
        _, limit, value, subject, judged_at = notes.get(rule.name, (rule.name, None, None, None, None))
        mine = sum(alert.rule == rule.name for alert in open_)
        mute = next((mute for mute in mutes if (mute.rule, mute.subject) == (rule.name, "")), None)
        state: Literal["ok", "open", "unknown", "off"] = "open" if mine else "ok"
        if judged_at is None or now - judged_at > STALE_SECONDS:
            state = "unknown"
        elif limit is None:
            state = "off"
        rules.append(
            RuleView(
                rule.name, rule.help, rule.severity, rule.unit, state, limit, value, subject, _utc(judged_at), mine,
                None if mute is None else _utc(mute.until), None if mute is None else mute.by,
            )
        )  # fmt: skip
    return Alerts(
        at=_time(now),
        checked_at=_utc(checked_at),
        stale=checked_at is None or now - checked_at > STALE_SECONDS,
        evaluator=None if holder is None else str(holder.owner),
        alerts=tuple(alert_view(alert, mutes) for alert in open_),
        history=tuple(alert_view(alert, []) for alert in closed),
        rules=tuple(rules),
        mutes=tuple(MuteView(one.rule, one.subject, _time(one.until), one.by, _time(one.at)) for one in mutes),
    )


def alert_view(alert: Alert, mutes: list[Mute]) -> AlertView:
    from headway.alerts.records import is_muted

    return AlertView(
        alert.no, alert.rule, alert.subject, alert.severity, alert.text, alert.value, alert.peak, alert.threshold,
        _time(alert.opened_at), _utc(alert.closed_at), is_muted(mutes, alert.rule, alert.subject),
        alert.acknowledged_by, _utc(alert.acknowledged_at),
    )  # fmt: skip


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _utc(at: float | None) -> datetime | None:
    return None if at is None else _time(at)
