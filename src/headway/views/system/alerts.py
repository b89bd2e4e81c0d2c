"""Alerts: open and closed ones, the rules and their last readings, and mutes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.alerts.store.alerts import Alert, Mute

#: Default number of closed alerts.
HISTORY = 50
#: Seconds after which a reading is too old: four rounds, and the time to replace an evaluator.
STALE_SECONDS = 75.0
#: What people read instead of a rule's name, on every page and on the command line.
LABELS = {
    "store_away": "Store unreachable",
    "stalled_job": "Job stalled",
    "failure_spike": "Failure spike",
    "worker_lost": "Worker lost",
    "no_handler": "No handler",
    "delay": "Queue delay",
    "backlog": "Backlog",
    "new_cause": "New error",
    "store_slow": "Store slow",
    "redis_memory": "Redis memory",
    "event_lag": "Event lag",
}


class AlertView(NamedTuple):
    """One alert, from its opening on."""

    no: Annotated[int, "its number"]
    rule: Annotated[str, "its rule"]
    subject: Annotated[str, "the worker, queue, job, cause, sink or store"]
    severity: Annotated[Literal["critical", "warning"], "how urgent it is"]
    text: Annotated[str, "one sentence for people"]
    value: Annotated[float, "the last value above the limit"]
    peak: Annotated[float, "the highest value"]
    limit: Annotated[float, "the value at which the alert opens"]
    opened_at: Annotated[datetime, "when it opened"]
    closed_at: Annotated[datetime | None, "when it closed; null while it is open"]
    muted: Annotated[bool, "whether notifications are muted now"]
    acknowledged_by: Annotated[str | None, "who acknowledged it"]
    acknowledged_at: Annotated[datetime | None, "when"]
    label: Annotated[str, "name of the rule for people"] = ""


class RuleView(NamedTuple):
    """A rule and its last reading."""

    name: Annotated[str, "its name"]
    help: Annotated[str, "what it watches"]
    severity: Annotated[Literal["critical", "warning"], "how urgent its alerts are"]
    unit: Annotated[Literal["s", "tasks", "share"], "unit of its values"]
    state: Annotated[Literal["ok", "open", "unknown", "off"], "unknown: not evaluated lately"]
    limit: Annotated[float | None, "the value at which it opens; null if it is off or was never evaluated"]
    value: Annotated[float | None, "the highest current value"]
    subject: Annotated[str | None, "the subject with that value"]
    checked_at: Annotated[datetime | None, "when it was last evaluated"]
    open: Annotated[int, "its open alerts"]
    muted_until: Annotated[datetime | None, "until when its notifications are muted"]
    muted_by: Annotated[str | None, "who muted it"]
    label: Annotated[str, "its name for people"] = ""


class MuteView(NamedTuple):
    """A mute of a rule, or of one of its subjects."""

    rule: Annotated[str, "the rule"]
    subject: Annotated[str, "the subject; empty: all"]
    until: Annotated[datetime, "until when"]
    by: Annotated[str, "who muted it"]
    at: Annotated[datetime, "when"]


class Alerts(NamedTuple):
    """`headway alerts`: open and closed alerts, rules and mutes."""

    at: Annotated[datetime, "when this was read (database clock)"]
    checked_at: Annotated[datetime | None, "when the rules were last evaluated; null: never"]
    stale: Annotated[bool, "whether that is too long ago to trust the rest"]
    evaluator: Annotated[str | None, "the process that evaluates them"]
    alerts: Annotated[tuple[AlertView, ...], "open alerts, most urgent first"]
    history: Annotated[tuple[AlertView, ...], "closed alerts, latest first"]
    rules: Annotated[tuple[RuleView, ...], "every rule, most urgent first"]
    mutes: Annotated[tuple[MuteView, ...], "the mutes"]

    def as_json(self) -> Json:
        return document(self)


def read_alerts(database: Database, *, history: int = HISTORY) -> Alerts:
    """Read all alerts, rules and mutes in one snapshot."""
    from headway.alerts.evaluator import LEASE_NAME
    from headway.alerts.rules import RULES
    from headway.alerts.store import alerts

    with database.read() as tx:
        now = tx.now()
        open_, closed = alerts.open_alerts(tx), alerts.closed_alerts(tx, history)
        notes, mutes = alerts.notes(tx), alerts.mutes(tx, now)
        holder = alerts.holder_of(tx, LEASE_NAME)
    order = {rule.name: position for position, rule in enumerate(RULES)}
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
                None if mute is None else _utc(mute.until), None if mute is None else mute.by, LABELS[rule.name],
            )
        )  # fmt: skip
    return Alerts(
        at=_time(now),
        checked_at=_utc(checked_at),
        stale=checked_at is None or now - checked_at > STALE_SECONDS,
        evaluator=holder,
        alerts=tuple(alert_view(alert, mutes) for alert in open_),
        history=tuple(alert_view(alert, []) for alert in closed),
        rules=tuple(rules),
        mutes=tuple(MuteView(one.rule, one.subject, _time(one.until), one.by, _time(one.at)) for one in mutes),
    )


def alert_view(alert: Alert, mutes: list[Mute]) -> AlertView:
    """Return the view of an alert."""
    from headway.alerts.store.alerts import is_muted

    return AlertView(
        alert.no, alert.rule, alert.subject, alert.severity, alert.text, alert.value, alert.peak, alert.threshold,
        _time(alert.opened_at), _utc(alert.closed_at), is_muted(mutes, alert.rule, alert.subject),
        alert.acknowledged_by, _utc(alert.acknowledged_at), LABELS.get(alert.rule, alert.rule),
    )  # fmt: skip


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _utc(at: float | None) -> datetime | None:
    return None if at is None else _time(at)
