"""The current values of the rules, computed from a `Snapshot`. A malformed row disables only the rule that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from math import ceil

from headway._lease import has_ended, read_owner
from headway.alerts.lost_workers import departures
from headway.alerts.rules import Reading, Rules
from headway.alerts.store.snapshot import Snapshot
from headway.core.text import cut, duration, plural, printable
from headway.queue.store.workers import online_of, unserved_by
from headway.telemetry import Log, redact

log = Log("alerts")

TEXT_LIMIT = 500


def judge(rows: Snapshot, rules: Rules) -> dict[str, list[Reading]]:
    """Return the readings by rule. A rule whose rows are malformed is missing, so that its alerts stay open."""
    found = dict(rows.others)
    for name, evaluate in _EVALUATIONS.items():
        if rules.limits.get(name) is None:
            found[name] = []  # disabled: its alerts close
            continue
        try:
            found[name] = list(evaluate(rows, rules))
        except Exception as error:  # noqa: BLE001 - the other rules are evaluated
            log.error("a rule could not be evaluated", key=name, error=f"{type(error).__name__}: {error}")  # noqa: TRY400
    return found


def reading(rules: Rules, rule: str, subject: str, value: float, text: str, *, at_once: bool = False) -> Reading:
    """Return a reading. Its text is redacted, which takes time, only if it opens an alert."""
    above = rules.judge(rule, value)
    return Reading(rule, subject, value, shown(text) if above else "", above, at_once)


def shown(text: str) -> str:
    """Return the text as one bounded line without secrets."""
    return cut(printable(redact(text)), TEXT_LIMIT)


def _workers(rows: Snapshot, rules: Rules) -> Iterator[Reading]:
    limit = rules.limits["worker_lost"] or 0.0
    for lost in departures(rows.workers, rows.now, limit):
        text = f"Worker {lost.name} sent its last heartbeat {duration(lost.silent)} ago"
        text += f" while it ran task {lost.task}" if lost.task else ""
        text += "; another worker replaced it." if lost.is_replaced else "; no worker replaced it."
        # A supervisor replaces a worker within the limit, which needs no operator.
        yield Reading("worker_lost", lost.name, lost.silent, shown(text), above=not lost.is_replaced,
                      at_once=lost.silent >= limit)  # fmt: skip


def _backlog(rows: Snapshot, rules: Rules) -> Iterator[Reading]:
    for queue, count, _ in rows.waiting:
        waits = "waits" if count == 1 else "wait"
        yield reading(rules, "backlog", queue, count, f"{plural(count, 'task')} {waits} in the queue {queue}.")


def _delay(rows: Snapshot, rules: Rules) -> Iterator[Reading]:
    """Paused queues have no delay."""
    paused = {name for (name,) in rows.paused}
    for queue, _, oldest in rows.waiting:
        wait = 0.0 if oldest is None or queue in paused else max(0.0, rows.now - oldest)
        yield reading(
            rules, "delay", queue, wait, f"The oldest task of the queue {queue} has waited for {duration(wait)}."
        )


def _unserved(rows: Snapshot, rules: Rules) -> Iterator[Reading]:
    """Kinds that the online workers do not run. While no worker is online, `worker_lost` and `delay` report it."""
    running = [
        (owner, queues, kinds, seen_at)
        for _, owner, queues, *_, seen_at, ended_at, kinds in rows.workers
        if ended_at is None
    ]
    online = online_of(running, rows.now)
    for queue, kind, count, since in unserved_by(online, rows.kinds) if online else ():
        text = f"{plural(count, 'task')} of kind {kind} in the queue {queue}: no online worker runs them."
        yield reading(rules, "no_handler", f"{queue} {kind}", max(0.0, rows.now - since), text, at_once=True)


def _failures(rows: Snapshot, rules: Rules) -> Iterator[Reading]:
    jobs = ((f"job {row[0]}", row[5], row[6]) for row in rows.jobs)
    tasks = ((f"task {kind}", done, failed) for kind, done, failed in rows.task_runs)
    minutes = ceil(rules.failure_window / 60)
    for subject, done, failed in (*jobs, *tasks):
        runs = int(done) + int(failed)
        if runs < rules.failure_runs:
            continue
        text = f"{int(failed):,} of {plural(runs, 'run')} of {subject} failed in the last {minutes} min."
        yield reading(rules, "failure_spike", subject, int(failed) / runs, text)


def _stalled(rows: Snapshot, rules: Rules) -> Iterator[Reading]:
    """Skip finished jobs and jobs without a holder, which were interrupted, stopped or never started."""
    for job, finished_at, updated_at, holder, until, *_, paused in rows.jobs:
        if finished_at is not None or holder is None or (paused and not has_ended(holder, until, rows.now)):
            continue
        silent = max(0.0, rows.now - updated_at)
        known = read_owner(holder)
        who = str(known.owner) if known else "a process"
        if has_ended(holder, until, rows.now):
            text = (
                f"Job {job}: {who} died while running it, and no run has continued it. Nothing is lost; run it again."
            )
            yield Reading("stalled_job", job, silent, shown(text), above=True)
        else:
            text = f"Job {job} has recorded nothing for {duration(silent)}, though {who} holds it."
            yield reading(rules, "stalled_job", job, silent, text, at_once=True)


def _causes(rows: Snapshot, _: Rules) -> Iterator[Reading]:
    """Identify a cause by its function and error, not by its job: it is not new in tomorrow's job."""
    seen = set()
    for scope, where, function, type, message, frame in rows.causes:
        identity = f"{scope}\0{function}\0{type}\0{message}\0{frame}"
        subject = sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        if subject not in seen:
            seen.add(subject)
            position = f" at {frame}" if frame else ""
            text = f"New in {scope} {where}: {type}: {message}{position}"
            yield Reading("new_cause", subject, 0.0, shown(text), above=True, at_once=True)


def _lag(rows: Snapshot, rules: Rules) -> Iterator[Reading]:
    for name, oldest in rows.sinks:
        sink, wait = redact(name), 0.0 if oldest is None else max(0.0, rows.now - oldest)
        text = f"The sink {sink} is behind: its oldest event has waited for {duration(wait)}."
        yield reading(rules, "event_lag", sink, wait, text)


_EVALUATIONS: dict[str, Callable[[Snapshot, Rules], Iterator[Reading]]] = {
    "worker_lost": _workers,
    "backlog": _backlog,
    "delay": _delay,
    "no_handler": _unserved,
    "failure_spike": _failures,
    "stalled_job": _stalled,
    "new_cause": _causes,
    "event_lag": _lag,
}
