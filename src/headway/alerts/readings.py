"""The current values of the rules, read from counters and never from items.

`fetch` reads one consistent snapshot, in a few statements whose cost does not grow with items or finished tasks. The rules
are functions of that snapshot: a malformed row disables the rule that reads it, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil

from headway._lease import has_ended, read_owner
from headway._sql import Database, Row, Tx
from headway.alerts.lost_workers import departures
from headway.alerts.rules import Reading, Rules
from headway.core.text import cut, duration, plural, printable
from headway.queue.store.workers import WaitingKind, online_of, unserved_by, waiting_kinds
from headway.telemetry import Log, redact

log = Log("alerts")

QUEUES = ("urgent", "high", "normal", "low")
#: Seconds by which the commit of a cause may follow its ``first_seen``.
CAUSE_MARGIN = 300.0
TEXT_LIMIT = 500


@dataclass(slots=True)
class Rows:
    """The snapshot of `fetch`, at ``now`` by the database's clock."""

    now: float
    workers: list[Row]
    waiting: list[Row]
    kinds: list[WaitingKind]
    paused: list[Row]
    task_runs: list[Row]
    jobs: list[Row]
    causes: list[Row]
    sinks: list[Row]
    #: Readings by rule that do not come from the database. A missing rule has no known value.
    others: dict[str, list[Reading]] = field(default_factory=dict)


def fetch(database: Database, rules: Rules, at: float | None) -> Rows:
    """Read the snapshot. ``at`` replaces the database's time."""
    with database.read() as tx:
        now = tx.now() if at is None else at
        window = int((now - rules.failure_window) // 60)
        return Rows(
            now=now,
            workers=tx.all(
                "SELECT name, owner, queues, state, wanted, task, started_at, seen_at, ended_at, kinds FROM task_workers"
            ),
            waiting=_waiting(tx, int(rules.limits.get("backlog") or 0) or 10_000),
            kinds=waiting_kinds(tx),
            paused=tx.all(
                "SELECT name FROM task_queues WHERE paused = 1 AND (paused_until IS NULL OR paused_until > ?)", (now,)
            ),
            task_runs=tx.all(
                "SELECT kind, sum(completed), sum(failures) FROM task_minutes WHERE minute > ? GROUP BY kind", (window,)
            ),
            jobs=_jobs(tx, window),
            causes=_new_causes(tx, rules, now),
            # The process of a job serves that job's own sinks.
            sinks=tx.all(
                "SELECT s.name, (SELECT o.at FROM outbox o WHERE o.seq > s.since AND NOT EXISTS "
                "(SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = o.seq) ORDER BY o.seq LIMIT 1) "
                "FROM sinks s WHERE s.job IS NULL"
            ),
        )


def _jobs(tx: Tx, window: int) -> list[Row]:
    """Return unfinished and recent jobs with their runs since the minute ``window``.

    Columns: id, finished_at, updated_at, holder, lease_until, done, failed, paused.
    """
    return tx.all(
        "SELECT j.id, j.finished_at, j.updated_at, j.holder, j.lease_until, "
        # The current minute of a job is in its own row.
        "coalesce(m.done, 0) + CASE WHEN j.minute > ? THEN j.minute_done ELSE 0 END, "
        "coalesce(m.failed, 0) + CASE WHEN j.minute > ? THEN j.minute_failed ELSE 0 END, "
        "EXISTS (SELECT 1 FROM controls c WHERE c.job = j.no AND c.paused = 1 "
        "AND c.run = (SELECT max(r.no) FROM runs r WHERE r.job = j.no)) "
        "FROM jobs j LEFT JOIN (SELECT job, sum(done) AS done, sum(failed) AS failed FROM minutes "
        "WHERE minute > ? AND job IN (SELECT no FROM jobs WHERE updated_at > ?) GROUP BY job) m ON m.job = j.no "
        "WHERE j.archived = 0 AND (j.finished_at IS NULL OR j.updated_at > ?)",
        (window, window, window, window * 60.0, window * 60.0),
    )


def _new_causes(tx: Tx, rules: Rules, now: float) -> list[Row]:
    """Return the causes of jobs and tasks since the last evaluation of ``new_cause``."""
    last = tx.one("SELECT checked_at FROM alert_rules WHERE name = 'new_cause'")
    since = now - (rules.limits.get("new_cause") or 0.0) if last is None else min(now, last[0])
    return tx.all(
        "SELECT 'job', j.id, j.function, c.type, c.message, c.frame FROM causes c JOIN jobs j ON j.no = c.job "
        "WHERE c.first_seen > ? UNION ALL "
        "SELECT 'task', kind, kind, type, message, frame FROM task_causes WHERE first_seen > ?",
        (since - CAUSE_MARGIN, since - CAUSE_MARGIN),
    )


def _waiting(tx: Tx, most: int) -> list[Row]:
    """Return (queue, waiting tasks, start of the oldest wait) of each queue.

    The first query stops at the limit of the rule. The exact number is counted only when an alert will name it.
    """
    rows = tx.all(
        " UNION ALL ".join(
            f"SELECT '{queue}', count(*), min(run_at) FROM (SELECT run_at FROM tasks WHERE status = 'QUEUED' "
            f"AND ready = 1 AND place = {place} ORDER BY place, turn, no LIMIT {most}) q{place}"
            for place, queue in enumerate(QUEUES)
        )
    )
    if all(count < most for _, count, _ in rows):
        return rows
    exact: dict[str, int] = dict(
        tx.all("SELECT queue, count(*) FROM tasks WHERE status = 'QUEUED' AND ready = 1 GROUP BY queue")
    )
    return [(queue, exact.get(queue, count), oldest) for queue, count, oldest in rows]


def judge(rows: Rows, rules: Rules) -> dict[str, list[Reading]]:
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


def _workers(rows: Rows, rules: Rules) -> Iterator[Reading]:
    limit = rules.limits["worker_lost"] or 0.0
    for lost in departures(rows.workers, rows.now, limit):
        text = f"Worker {lost.name} sent its last heartbeat {duration(lost.silent)} ago"
        text += f" while it ran task {lost.task}" if lost.task else ""
        text += "; another worker replaced it." if lost.is_replaced else "; no worker replaced it."
        # A supervisor replaces a worker within the limit, which needs no operator.
        yield Reading("worker_lost", lost.name, lost.silent, shown(text), above=not lost.is_replaced,
                      at_once=lost.silent >= limit)  # fmt: skip


def _backlog(rows: Rows, rules: Rules) -> Iterator[Reading]:
    for queue, count, _ in rows.waiting:
        waits = "waits" if count == 1 else "wait"
        yield reading(rules, "backlog", queue, count, f"{plural(count, 'task')} {waits} in the queue {queue}.")


def _delay(rows: Rows, rules: Rules) -> Iterator[Reading]:
    """Paused queues have no delay."""
    paused = {name for (name,) in rows.paused}
    for queue, _, oldest in rows.waiting:
        wait = 0.0 if oldest is None or queue in paused else max(0.0, rows.now - oldest)
        yield reading(
            rules, "delay", queue, wait, f"The oldest task of the queue {queue} has waited for {duration(wait)}."
        )


def _unserved(rows: Rows, rules: Rules) -> Iterator[Reading]:
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


def _failures(rows: Rows, rules: Rules) -> Iterator[Reading]:
    jobs = ((f"job {row[0]}", row[5], row[6]) for row in rows.jobs)
    tasks = ((f"task {kind}", done, failed) for kind, done, failed in rows.task_runs)
    minutes = ceil(rules.failure_window / 60)
    for subject, done, failed in (*jobs, *tasks):
        runs = int(done) + int(failed)
        if runs < rules.failure_runs:
            continue
        text = f"{int(failed):,} of {plural(runs, 'run')} of {subject} failed in the last {minutes} min."
        yield reading(rules, "failure_spike", subject, int(failed) / runs, text)


def _stalled(rows: Rows, rules: Rules) -> Iterator[Reading]:
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


def _causes(rows: Rows, _: Rules) -> Iterator[Reading]:
    """Identify a cause by its function and error, not by its job: it is not new in tomorrow's job."""
    seen = set()
    for scope, where, function, type, message, frame in rows.causes:
        identity = f"{scope}\0{function}\0{type}\0{message}\0{frame}"
        subject = sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        if subject not in seen:
            seen.add(subject)
            place = f" at {frame}" if frame else ""
            text = f"New in {scope} {where}: {type}: {message}{place}"
            yield Reading("new_cause", subject, 0.0, shown(text), above=True, at_once=True)


def _lag(rows: Rows, rules: Rules) -> Iterator[Reading]:
    for name, oldest in rows.sinks:
        sink, wait = redact(name), 0.0 if oldest is None else max(0.0, rows.now - oldest)
        text = f"The sink {sink} is behind: its oldest event has waited for {duration(wait)}."
        yield reading(rules, "event_lag", sink, wait, text)


_EVALUATIONS: dict[str, Callable[[Rows, Rules], Iterator[Reading]]] = {
    "worker_lost": _workers,
    "backlog": _backlog,
    "delay": _delay,
    "no_handler": _unserved,
    "failure_spike": _failures,
    "stalled_job": _stalled,
    "new_cause": _causes,
    "event_lag": _lag,
}
