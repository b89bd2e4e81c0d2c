"""Marks for charts: events that explain a change of a curve."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.telemetry import redact
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database, Row

#: Maximum number of runs and of audit entries that are read.
LIMIT = 200

Kind = Literal[
    "started", "resumed", "ended", "killed", "stopped", "paused", "continued", "scaled", "drained", "settings", "deploy"
]

#: Action in the audit trail -> (kind of the mark, its text).
_ACTIONS: dict[str, tuple[Kind, str]] = {
    "pause": ("paused", "paused"),
    "resume": ("continued", "resumed"),
    "stop": ("stopped", "asked to stop"),
    "scale": ("scaled", "scaled to {workers} workers"),
    "queue.pause": ("paused", "queue {queue} paused"),
    "queue.resume": ("continued", "queue {queue} resumed"),
    "queue.set": ("settings", "{setting} set to {value}"),
    "queue.unset": ("settings", "{setting} reset"),
    "worker.drain": ("drained", "worker {worker} drained"),
    "worker.stop": ("stopped", "worker {worker} stopped"),
}


class Mark(NamedTuple):
    """Something that happened at one moment."""

    at: Annotated[datetime, "when"]
    kind: Annotated[Kind, "what; deploy: workers of another version started"]
    text: Annotated[str, "what happened, in a few words, with the reason if one was given"]
    job: Annotated[str | None, "the job's id, if it is about one"]
    actor: Annotated[str | None, "who did it, if somebody did"]


class Marks(NamedTuple):
    """`/api/v1/marks`: starts, ends, kills, pauses, changed settings and deploys of a period."""

    marks: Annotated[tuple[Mark, ...], "oldest first"]

    def as_json(self) -> Json:
        return document(self)


def read_marks(database: Database, start: float, end: float | None = None, *, job: str | None = None) -> Marks:
    """Read the marks between two Unix times, of one job or of everything; ``end`` defaults to now."""
    from headway.ledger.store.queries import search
    from headway.queue.store.statistics import listed_workers

    with database.read() as tx:
        until = tx.now() if end is None else end
        runs = search.runs_between(tx, start, until, job, LIMIT)
        audited = search.audited_between(tx, start, until, tuple(_ACTIONS), job, LIMIT)
        workers = [] if job is not None else listed_workers(tx)
    found = [*_of_runs(runs), *map(_of_action, audited), *_of_workers(workers)]
    # Without ``end`` there is no bound: a time rounded to microseconds may be later than now.
    inside = [mark for mark in found if start <= mark.at.timestamp() and (end is None or mark.at.timestamp() <= end)]
    return Marks(tuple(sorted(inside, key=lambda mark: (mark.at, mark.kind, mark.text))))


def _of_runs(rows: Sequence[Row]) -> Iterator[Mark]:
    """Yield the start and the end of each run."""
    from headway.ledger.values import utc

    for job, no, host, _, started, ended, outcome in rows:
        kind: Kind = "started" if no == 1 else "resumed"
        yield Mark(utc(started), kind, f"run {no} {kind} on {host}", job, None)
        if outcome is None or ended is None:
            continue
        over: Kind = "killed" if outcome == "lost" else "stopped" if outcome == "stopped" else "ended"
        word = {"lost": "died", "stopped": "stopped by --max-failures"}.get(outcome, outcome)
        yield Mark(utc(ended), over, f"run {no} {word}", job, None)


def _of_action(row: Row) -> Mark:
    """Return the mark of an entry of the audit trail."""
    from headway.ledger.values import utc

    at, actor, action, job, detail = row
    kind, text = _ACTIONS[action]
    facts = {name: str(value) for name, value in json.loads(detail).items()}
    words = text.format_map({**dict.fromkeys(("workers", "queue", "setting", "value", "worker"), "?"), **facts})
    reason = f": {facts['reason']}" if facts.get("reason") else ""
    return Mark(utc(at), kind, redact(words + reason), job or None, redact(actor))


def _of_workers(rows: Sequence[Row]) -> Iterator[Mark]:
    """Yield a deploy wherever a worker starts with another version than the previous one."""
    from headway.ledger.values import utc

    before: str | None = None
    for version, started in sorted(((row[9], row[13]) for row in rows), key=lambda pair: float(pair[1])):
        if before is not None and version != before:
            yield Mark(utc(started), "deploy", f"workers of version {version} started", None, None)
        before = version
