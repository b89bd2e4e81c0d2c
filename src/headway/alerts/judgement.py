"""Opens and closes alerts by the readings of a round.

All decisions depend only on rows and readings, inside the caller's transaction. A repetition of the transaction, also by
another evaluator, decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from headway._sql import Tx
from headway.alerts.readings import shown
from headway.alerts.rules import Reading, Rules
from headway.alerts.store import alerts
from headway.alerts.store.alerts import Alert
from headway.core.text import duration
from headway.telemetry import Log

log = Log("alerts")

#: Seconds without a reading after which a timer restarts, because the value in between is unknown.
GAP = 60.0
#: Maximum alerts that one round opens. The others follow in the next round.
OPENINGS = 100

_Key = tuple[str, str]  # rule, subject


class Change(NamedTuple):
    """An alert that a round opened or closed."""

    change: Literal["opened", "closed"]
    alert: Alert
    muted: bool


class Judgement:
    """The decisions of one round, in its transaction."""

    def __init__(self, tx: Tx, rules: Rules, now: float) -> None:
        self._tx, self._rules, self._now = tx, rules, now
        self._open: dict[_Key, Alert] = {(alert.rule, alert.subject): alert for alert in alerts.open_alerts(tx)}
        self._muted = alerts.mutes(tx, now)
        self._timers: dict[_Key, tuple[float, float]] = {
            (rule, subject): (since, seen_at) for rule, subject, since, seen_at in alerts.timers(tx)
        }
        self._running: dict[_Key, float] = {}  # the timers that continue, with their start
        self._openings = 0
        self._left = 0  # alerts deferred to the next round
        self._changes: list[Change] = []

    def write(self, seen: Mapping[str, Sequence[Reading]], away: float) -> list[Change]:
        """Write the round's changes, and return them.

        ``seen`` has the readings by rule. Alerts of a missing rule are left unchanged. ``away`` is the time in seconds that
        the database was unreachable before this round.
        """
        self._publish_unmuted()
        self._was_away(away)
        current: list[tuple[Alert, Reading]] = []
        notes: list[alerts.Note] = []
        for rule, found in seen.items():
            left = self._left
            readings = {one.subject: one for one in found}
            current += [
                (self._open[rule, one.subject], one) for one in found if one.above and (rule, one.subject) in self._open
            ]
            for alert in [alert for (name, _), alert in self._open.items() if name == rule]:
                self._perhaps_close(alert, readings.get(alert.subject))
            for one in self._news(found) if rule == "new_cause" else found:
                if one.above and (rule, one.subject) not in self._open:
                    self._perhaps_open(one)
            if rule == "new_cause" and self._left > left:  # the deferred ones are read again
                alerts.hold_mark(self._tx, rule, self._now - (self._rules.limits.get(rule) or 0.0))
            else:
                notes.append(self._note(rule, found))
        alerts.update_values(self._tx, current)
        alerts.write_rules(self._tx, notes)
        self._write_timers(seen)
        if self._left:
            log.warning("too many alerts for one round; the others open in the next", count=self._left)
        return self._changes

    def _news(self, found: Sequence[Reading]) -> list[Reading]:
        """Return the causes that have had no alert. Each cause has at most one."""
        known = alerts.had(self._tx, "new_cause", [one.subject for one in found])
        return [one for one in found if one.subject not in known]

    def _perhaps_open(self, one: Reading) -> None:
        since = self._since((one.rule, one.subject))
        if not one.at_once and self._now - since < self._rules.open_after:
            self._running[one.rule, one.subject] = since
        elif self._openings >= OPENINGS:
            self._left += 1
            self._running[one.rule, one.subject] = since
        else:
            self._openings += 1
            self._opened(one, self._now)

    def _perhaps_close(self, alert: Alert, one: Reading | None) -> None:
        """Close an alert if its value has been low, or missing, for long enough."""
        key = (alert.rule, alert.subject)
        if alert.rule == "new_cause":  # closes after a fixed time
            if self._now - alert.opened_at >= (self._rules.limits.get("new_cause") or 0.0):
                self._closed(alert)
        elif one is None or one.above is False:
            since = self._since(key)
            if self._now - since < self._rules.close_after:
                self._running[key] = since
            else:
                self._closed(alert)

    def _since(self, key: _Key) -> float:
        """Return the start of a timer: now, unless it has run without a gap."""
        since, seen_at = self._timers.get(key, (self._now, self._now))
        return since if since <= seen_at <= self._now <= seen_at + GAP else self._now

    def _opened(self, one: Reading, at: float) -> Alert:
        alert = alerts.open_alert(self._tx, one, self._rules.limits.get(one.rule) or 0.0, at)
        muted = alerts.is_muted(self._muted, one.rule, one.subject)
        if not muted:
            alerts.publish_opening(self._tx, alert, at)
            alert = alert._replace(published=True)
        self._changes.append(Change("opened", alert, muted))
        return alert

    def _closed(self, alert: Alert) -> None:
        alerts.close_alert(self._tx, alert, self._now)
        self._open.pop((alert.rule, alert.subject), None)
        self._changes.append(Change("closed", alert._replace(closed_at=self._now), not alert.published))

    def _publish_unmuted(self) -> None:
        """Publish open alerts whose mute has ended."""
        for key, alert in self._open.items():
            if not alert.published and not alerts.is_muted(self._muted, *key):
                alerts.publish_opening(self._tx, alert, self._now)
                self._open[key] = opened = alert._replace(published=True)
                self._changes.append(Change("opened", opened, muted=False))

    def _was_away(self, seconds: float) -> None:
        """Record an alert for the time in which the database was unreachable.

        If another evaluator wrote meanwhile, only this process was cut off. So the time counts from the last round at the
        earliest.
        """
        limit = self._rules.limits.get("store_away")
        if limit is None or seconds < limit:
            return
        last = alerts.last_evaluation(self._tx)
        if last is not None and last <= self._now:
            seconds = min(seconds, self._now - last)
        if seconds >= limit:
            text = shown(f"The database was unreachable for {duration(seconds)}. No rules were evaluated meanwhile.")
            one = Reading("store_away", "database", seconds, text, above=True)
            self._closed(self._opened(one, self._now - seconds))

    def _note(self, rule: str, found: Sequence[Reading]) -> alerts.Note:
        worst = max(found, key=lambda one: one.value, default=None)
        value, subject = (None, None) if worst is None else (worst.value, worst.subject)
        return rule, self._rules.limits.get(rule), value, subject, self._now

    def _write_timers(self, seen: Mapping[str, object]) -> None:
        over = [key for key in self._timers if key[0] in seen and key not in self._running]
        alerts.write_timers(self._tx, [(*key, since, self._now) for key, since in self._running.items()], over)
