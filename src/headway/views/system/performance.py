"""How fast and how well functions and handlers work: counts from the minutes, durations from the newest rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.views.jobs.durations import percentile
from headway.views.jobs.map import Bin, durations
from headway.views.jobs.series import RANGES
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database

#: Number of ended items and tasks whose durations are read, newest first.
SAMPLE = 5000
#: A function with fewer durations among them gets a sample of its own: this many items, spread over its newest job.
FEW, SPREAD = 200, 1000
#: Users are counted only while at most this many tasks wait.
COUNTED = 100_000


class Times(NamedTuple):
    """Percentiles of a duration in seconds."""

    p50: Annotated[float, "50 % took no longer"]
    p95: Annotated[float, "95 % took no longer"]
    p99: Annotated[float, "99 % took no longer"]


class Performance(NamedTuple):
    """A function of jobs, or a kind of task."""

    name: Annotated[str, "function or kind"]
    what: Annotated[Literal["items", "tasks"], "items of jobs, or tasks of the queue"]
    done: Annotated[int, "successful items or tasks"]
    failed: Annotated[int, "failed attempts"]
    success: Annotated[float | None, "share of all attempts that succeeded, 0 to 100"]
    mean: Annotated[float | None, "mean seconds per attempt"]
    run: Annotated[Times | None, "how long an attempt took; from the newest ones"]
    wait: Annotated[Times | None, "how long a task waited; from the newest ones"]
    looked_at: Annotated[int, "number of durations behind `run`"]
    took: Annotated[tuple[Bin, ...], "histogram of those durations"]


class QueueTimes(NamedTuple):
    """How long the newest ended tasks of a queue waited and ran."""

    wait: Annotated[Times | None, "from the earliest start to the start"]
    run: Annotated[Times | None, "the last attempt of each task"]
    took: Annotated[tuple[Bin, ...], "histogram of the attempts"]
    looked_at: Annotated[int, "number of tasks behind it"]


class Performances(NamedTuple):
    """`/api/v1/performance`: how fast and how well functions and handlers worked in a period."""

    range: Annotated[Literal["1h", "24h", "7d"], "the period, up to now"]
    performance: Annotated[tuple[Performance, ...], "functions and kinds, busiest first"]
    queues: Annotated[dict[str, QueueTimes], "by queue; only queues with ended tasks"]

    def as_json(self) -> Json:
        return document(self)


def read_performances(database: Database, range: Literal["1h", "24h", "7d"] = "24h") -> Performances:
    """Read the performance of functions, kinds and queues."""
    return Performances(range, read_performance(database, range), read_queue_times(database, range))


def read_performance(database: Database, range: str = "24h") -> tuple[Performance, ...]:
    """Read the performance of functions and kinds, busiest first."""
    from headway.ledger.store.queries import statistics as jobs
    from headway.queue.store import statistics as tasks

    length, _ = RANGES[range]
    with database.read() as tx:
        first = int(tx.now() // 60) - length + 1
        since = first * 60.0
        functions, kinds = jobs.work_by_function(tx, first), tasks.work_by_kind(tx, first)
        ran, ended = jobs.newest_durations(tx, since, SAMPLE), tasks.newest_durations(tx, since, SAMPLE)
        of: dict[str, list[float]] = {str(name): [] for name, *_ in functions}
        for function, took in ran:
            of.setdefault(function, []).append(took)
        for name, *_ in functions:
            if len(of[name]) < FEW:
                of[name] = jobs.durations_of_function(tx, name, since, SPREAD) or of[name]
    found = [
        _performance(name, "items", done, failed, seconds, of[name], []) for name, done, failed, seconds in functions
    ]
    for kind, done, failed, seconds in kinds:
        mine = [(wait, run) for _, other, wait, run in ended if other == kind]
        runs, waits = [run for _, run in mine], [wait for wait, _ in mine]
        found.append(_performance(kind, "tasks", done, failed, seconds, runs, waits))
    busy = [one for one in found if one.done or one.failed]
    return tuple(sorted(busy, key=lambda one: -(one.done + one.failed)))


def _performance(
    name: str,
    what: Literal["items", "tasks"],
    done: int,
    failed: int,
    seconds: float,
    run: Sequence[float],
    wait: Sequence[float],
) -> Performance:
    done, failed = int(done or 0), int(failed or 0)
    tried = done + failed
    mean = seconds / tried if seconds and tried else None
    success = 100 * done / tried if tried else None
    return Performance(name, what, done, failed, success, mean, _times(run), _times(wait), len(run), durations(run))


def read_queue_times(database: Database, range: str = "24h") -> dict[str, QueueTimes]:
    """Read how long tasks waited and ran, by queue. Queues without ended tasks are left out."""
    from headway.queue.store import statistics

    with database.read() as tx:
        rows = statistics.newest_durations(tx, tx.now() - RANGES[range][0] * 60, SAMPLE)
    found = {}
    for queue in {str(row[0]) for row in rows}:
        waits = [wait for name, _, wait, _ in rows if name == queue]
        runs = [run for name, _, _, run in rows if name == queue]
        found[queue] = QueueTimes(_times(waits), _times(runs), durations(runs), len(runs))
    return found


def read_waiting(database: Database, waiting: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """Read (party, tasks) of the waiting tasks by queue, most tasks first; nothing if more than `COUNTED` wait.

    The party is the partition key, otherwise the user.
    """
    from headway.queue.store import statistics

    if not 0 < waiting <= COUNTED:
        return {}
    found: dict[str, list[tuple[str, int]]] = {}
    with database.read() as tx:
        for queue, party, count in statistics.waiting_parties(tx):
            found.setdefault(queue, []).append((party, int(count)))
    return {queue: tuple(parties) for queue, parties in found.items()}


def _times(values: Sequence[float]) -> Times | None:
    ordered = sorted(max(0.0, value) for value in values)  # the clock may have been set back in between
    return Times(*(percentile(ordered, part) for part in (0.5, 0.95, 0.99))) if ordered else None
