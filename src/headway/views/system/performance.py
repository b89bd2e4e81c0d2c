"""How fast and how well functions and handlers work: counts from the minutes, times from the newest rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.views.jobs.map import Bin, durations
from headway.views.jobs.series import RANGES
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database, Tx

#: Ended items and tasks whose times are looked at, newest first.
SAMPLE = 5000
#: A function with fewer among them is looked at by itself: so many items, spread evenly over its newest job.
FEW, SPREAD = 200, 1000
#: People who wait are not counted in a queue with more waiting tasks than this: it would take too long.
COUNTED = 100_000


class Times(NamedTuple):
    """Half, 19 of 20 and 99 of 100 took no longer, in seconds."""

    p50: Annotated[float, "half"]
    p95: Annotated[float, "19 of 20"]
    p99: Annotated[float, "99 of 100"]


class Performance(NamedTuple):
    """One function of jobs, or one kind of task."""

    name: Annotated[str, "function or kind"]
    what: Annotated[Literal["items", "tasks"], "items of jobs, or tasks of the queue"]
    done: Annotated[int, "that succeeded"]
    failed: Annotated[int, "attempts that did not"]
    success: Annotated[float | None, "share of all attempts that succeeded, 0 to 100"]
    mean: Annotated[float | None, "seconds an attempt took, over all of them"]
    run: Annotated[Times | None, "how long an attempt took; of the newest ones"]
    wait: Annotated[Times | None, "how long a task waited; of the newest ones"]
    looked_at: Annotated[int, "how many times are behind `run`"]
    took: Annotated[tuple[Bin, ...], "those attempts by how long they took"]


class Performances(NamedTuple):
    """`/api/v1/performance`: how fast and how well functions and handlers worked in a stretch of time."""

    range: Annotated[Literal["1h", "24h", "7d"], "the stretch, up to now"]
    performance: Annotated[tuple[Performance, ...], "functions and kinds, the busiest first"]
    queues: Annotated[dict[str, QueueTimes], "by queue, of those from which a task ended"]

    def as_json(self) -> Json:
        return document(self)


def read_performances(database: Database, range: Literal["1h", "24h", "7d"] = "24h") -> Performances:
    return Performances(range, read_performance(database, range), read_queue_times(database, range))


def read_performance(database: Database, range: str = "24h") -> tuple[Performance, ...]:
    """The busiest first."""
    length, _ = RANGES[range]
    with database.read() as tx:
        now = tx.now()
        first = int(now // 60) - length + 1
        since = first * 60.0
        items = tx.all(
            "SELECT function, sum(done), sum(failed), sum(seconds) FROM ("
            "SELECT j.function, m.done, m.failed, m.seconds FROM minutes m JOIN jobs j ON j.no = m.job "
            "WHERE j.updated_at >= ? AND m.minute >= ? UNION ALL "
            "SELECT function, minute_done, minute_failed, minute_seconds FROM jobs WHERE updated_at >= ? AND minute >= ?"
            ") both_tables GROUP BY function",
            (since, first, since, first),
        )
        tasks = tx.all(
            "SELECT kind, sum(completed), sum(failures), sum(run_seconds) FROM task_minutes WHERE minute >= ? GROUP BY kind",
            (first,),
        )
        ran = tx.all(
            "SELECT j.function, n.seconds FROM (SELECT job, seconds FROM progress WHERE updated_at >= ? "
            "ORDER BY updated_at DESC LIMIT ?) n JOIN jobs j ON j.no = n.job WHERE n.seconds IS NOT NULL",
            (since, SAMPLE),
        )
        ended = tx.all(
            "SELECT kind, started_at - run_at, ended_at - started_at FROM tasks WHERE ended_at IS NOT NULL AND ended_at >= ? "
            "AND started_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?",
            (since, SAMPLE),
        )
        alone = {name: _spread(tx, name, since) for name, *_ in items if sum(1 for one, _ in ran if one == name) < FEW}
    found = []
    for name, done, failed, seconds in items:
        run = alone.get(name) or [took for function, took in ran if function == name]
        found.append(_performance(name, "items", done, failed, seconds, run, []))
    for kind, done, failed, seconds in tasks:
        run = [took for other, _, took in ended if other == kind]
        found.append(
            _performance(kind, "tasks", done, failed, seconds, run, [wait for other, wait, _ in ended if other == kind])
        )
    found = [one for one in found if one.done or one.failed]
    return tuple(sorted(found, key=lambda one: -(one.done + one.failed)))


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


def _spread(tx: Tx, function: str, since: float) -> list[float]:
    """Times of a function's newest job, of items that lie evenly over it."""
    from headway.ledger.store.index_range import rows_at

    row = tx.one(
        "SELECT no, total FROM jobs WHERE function = ? AND updated_at >= ? ORDER BY updated_at DESC LIMIT 1",
        (function, since),
    )
    if row is None or not row[1]:
        return []
    no, total = row
    chosen = range(0, total, max(1, total // SPREAD))
    return [seconds for (seconds,) in rows_at(tx, "seconds", no, chosen) if seconds is not None]


class QueueTimes(NamedTuple):
    """How long tasks of a queue waited and ran, of the newest that ended."""

    wait: Annotated[Times | None, "from when they might run to when they did"]
    run: Annotated[Times | None, "the last run of each"]
    took: Annotated[tuple[Bin, ...], "their runs by how long they took"]
    looked_at: Annotated[int, "how many tasks are behind it"]


def read_queue_times(database: Database, range: str = "24h") -> dict[str, QueueTimes]:
    """By queue; a queue of which none ended is not there."""
    with database.read() as tx:
        rows = tx.all(
            "SELECT queue, started_at - run_at, ended_at - started_at FROM tasks WHERE ended_at IS NOT NULL AND ended_at >= ? "
            "AND started_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?",
            (tx.now() - RANGES[range][0] * 60, SAMPLE),
        )
    found = {}
    for queue in {str(row[0]) for row in rows}:
        waits = [wait for name, wait, _ in rows if name == queue]
        runs = [run for name, _, run in rows if name == queue]
        found[queue] = QueueTimes(_times(waits), _times(runs), durations(runs), len(runs))
    return found


def read_waiting(database: Database, waiting: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """Who waits in each queue (the partition, else the user), those with most tasks first; nothing when very many wait."""
    if not 0 < waiting <= COUNTED:
        return {}
    found: dict[str, list[tuple[str, int]]] = {}
    for queue, party, count in database.all(
        "SELECT queue, party, count(*) FROM tasks WHERE status = 'QUEUED' GROUP BY queue, party ORDER BY count(*) DESC, party"
    ):
        found.setdefault(queue, []).append((party, int(count)))
    return {queue: tuple(parties) for queue, parties in found.items()}


def _times(values: Sequence[float]) -> Times | None:
    ordered = sorted(max(0.0, value) for value in values)  # the clock may have been set back in between
    if not ordered:
        return None
    return Times(*(ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.95, 0.99)))
