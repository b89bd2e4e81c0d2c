"""Find workers that died and that no other worker replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headway._lease import read_owner
from headway._sql import Row


@dataclass(frozen=True, slots=True)
class Departure:
    """A worker that died, while no operator had asked it to end."""

    name: str
    task: str | None
    #: Seconds since its last heartbeat.
    silent: float
    is_replaced: bool


@dataclass(frozen=True, slots=True)
class _Worker:
    name: str
    host: str
    queues: str
    task: str | None
    started_at: float
    silent: float
    #: When it ended, or its last heartbeat if it is lost. None while it is online.
    left_at: float | None
    is_lost: bool


def departures(rows: Iterable[Row], now: float, limit: float) -> Iterator[Departure]:
    """Yield the lost workers. A worker is lost after ``limit`` seconds without a heartbeat, or if its process is gone.

    A start replaces one worker that had left before, if both serve the same queues and

    - both are on one host: a supervisor or an operator started it again. A worker that ended properly is replaced too, so a
      restart does not count as the replacement of a worker that died beside it;
    - or no worker was online on the new one's host at that time: the lost worker moved, as a container does. An additional
      worker of another machine that was online all the time replaces nothing.

    A replacement that has ended meanwhile still counts: at a restart the rules are judged before the new workers start.
    """
    workers = [_worker(row, now, limit) for row in rows]
    by_host: dict[tuple[str, str], list[_Worker]] = {}
    for worker in workers:
        by_host.setdefault((worker.queues, worker.host), []).append(worker)
    free = {worker.name for worker in workers}  # starts that have replaced no worker yet
    # The worker that left last chooses first: it has the fewest to choose from.
    left = sorted((worker for worker in workers if worker.left_at is not None), key=lambda one: (one.left_at, one.name))
    for worker in reversed(left):
        found = _first(by_host[worker.queues, worker.host], worker, free)
        if found is None and worker.is_lost:
            found = next(
                (
                    moved
                    for (queues, host), others in by_host.items()
                    if queues == worker.queues and host != worker.host and not _was_online(others, worker.left_at)
                    if (moved := _first(others, worker, free)) is not None
                ),
                None,
            )
        if found is not None:
            free.remove(found)
        if worker.is_lost:
            yield Departure(worker.name, worker.task, max(0.0, worker.silent), found is not None)


def _worker(row: Row, now: float, limit: float) -> _Worker:
    name, owner, queues, state, wanted, task, started_at, seen_at, ended_at, _ = row
    known = read_owner(owner)
    silent = now - seen_at
    is_gone = state == "lost" or (ended_at is None and ((known is not None and known.owner.is_dead) or silent >= limit))
    return _Worker(
        name, "" if known is None else known.owner.host, queues, task, started_at, silent,
        left_at=seen_at if is_gone else ended_at,
        is_lost=is_gone and wanted is None and state != "draining",
    )  # fmt: skip


def _first(workers: Iterable[_Worker], gone: _Worker, free: set[str]) -> str | None:
    """Return the first free start after a worker had left."""
    assert gone.left_at is not None
    return next(
        (one.name for one in workers if one.started_at >= gone.left_at and one.name in free and one is not gone), None
    )


def _was_online(workers: Iterable[_Worker], at: float | None) -> bool:
    assert at is not None
    return any(one.started_at < at and (one.left_at is None or one.left_at > at) for one in workers)
