"""The list of workers: their heartbeats, the kinds of task they run, and requests of an operator to end.

Every function works inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headway._lease import Owner, read_owner, write_owner
from headway._sql import Row, Tx, marks
from headway._version import __version__
from headway.errors import InvalidInput, NotFound
from headway.queue.records import LOCKED, audit, check_actor
from headway.queue.values import PRIORITIES, Priority, check_text
from headway.telemetry import Log

log = Log("queue")

#: Seconds after which a worker that said nothing is taken for lost.
WORKER_SECONDS = 20.0
#: Tasks at the head of each queue that are examined for kinds that no worker runs.
HEAD = 1000
#: Workers that ended are shown for a day.
WORKER_KEPT = 86_400.0


@dataclass(frozen=True, slots=True)
class Sign:
    """A worker's sign of life: what it does, and what came of all it did."""

    name: str
    owner: Owner
    queues: Sequence[Priority]
    state: str
    task: str | None
    completed: int
    failed: int
    rss: int
    kinds: Sequence[str] | None = None  # the kinds of task it has handlers for


def say_alive(tx: Tx, sign: Sign) -> str | None:
    """Write it down; what an operator wants of the worker, if anything."""
    now = tx.now()
    row = tx.one(
        "INSERT INTO task_workers (name, owner, host, pid, queues, version, state, task, completed, failed, rss, "
        "kinds, started_at, seen_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "state = excluded.state, task = excluded.task, completed = excluded.completed, failed = excluded.failed, "
        "rss = excluded.rss, seen_at = excluded.seen_at, queues = excluded.queues, kinds = excluded.kinds, "
        "ended_at = NULL "
        "RETURNING wanted",
        (sign.name, write_owner(sign.owner), sign.owner.host, sign.owner.pid,
         ",".join(queue.value for queue in sign.queues), __version__, sign.state, sign.task, sign.completed, sign.failed,
         sign.rss or None, None if sign.kinds is None else ",".join(sign.kinds), now, now),
    )  # fmt: skip
    return row[0] if row else None


def leave(tx: Tx, name: str, *, completed: int, failed: int) -> None:
    """The worker has ended."""
    tx.execute(
        "UPDATE task_workers SET state = 'ended', task = NULL, ended_at = ?, completed = ?, failed = ? WHERE name = ?",
        (tx.now(), completed, failed, name),
    )


def end_worker(tx: Tx, name: str, how: Literal["drain", "stop"], *, by: str, reason: str = "") -> str:
    """Ask a worker to end, and write down who did; what it is asked now. It hears it with its next sign of life.

    Asked to stop it is not asked to drain any more. Raises `NotFound`, or `InvalidInput` when it has ended already.
    """
    check_actor(by, reason)
    check_text(name, "the name of a worker")
    row = tx.one(f"SELECT state, ended_at, wanted FROM task_workers WHERE name = ?{LOCKED[tx.engine]}", (name,))
    if row is None:
        raise NotFound(f"There is no worker {name}.", hint="List them: headway workers")
    state, ended_at, wanted = row
    if ended_at is not None:
        raise InvalidInput(f"Worker {name} is {state}: it cannot be asked for anything.", hint="See: headway workers")
    if wanted in ("stop", how):
        return str(wanted)
    tx.execute(
        "UPDATE task_workers SET wanted = ?, wanted_by = ?, wanted_at = ? WHERE name = ?", (how, by, tx.now(), name)
    )
    audit(tx, by, f"worker.{how}", {"worker": name, "reason": reason})
    return how


def is_gone(owner: str, seen_at: float, now: float) -> bool:
    """Whether a worker that did not say that it ended is lost all the same: its process is known to be dead, or nothing was
    heard of it for long."""
    found = read_owner(owner)
    return (found is not None and found.owner.is_dead) or now - seen_at > WORKER_SECONDS


def remove_worker(tx: Tx, name: str, *, by: str, reason: str = "") -> None:
    """Take a worker that was lost or has ended off the list, and write down who did. Should it live after all, its next sign
    of life puts it back. Raises `NotFound`, or `InvalidInput` for one that has not ended."""
    check_actor(by, reason)
    check_text(name, "the name of a worker")
    sql = f"SELECT state, owner, seen_at, ended_at FROM task_workers WHERE name = ?{LOCKED[tx.engine]}"
    row = tx.one(sql, (name,))
    if row is None:
        raise NotFound(f"There is no worker {name}.", hint="List them: headway workers")
    state, owner, seen_at, ended_at = row
    if ended_at is None:
        if not is_gone(owner, seen_at, tx.now()):
            raise InvalidInput(
                f"Worker {name} is {state}: it has not ended.", hint=f"Ask it to end: headway workers drain {name}"
            )
        state = "lost"  # nobody was there to write it down
    tx.execute("DELETE FROM task_workers WHERE name = ?", (name,))
    audit(tx, by, "worker.remove", {"worker": name, "state": state, "reason": reason})


def lost(tx: Tx, names: Sequence[str]) -> set[str]:
    """Those of these that are taken for lost."""
    if not names:
        return set()
    rows = tx.all(f"SELECT name FROM task_workers WHERE state = 'lost' AND name IN ({marks(len(names))})", names)
    return {name for (name,) in rows}


class WaitingKind(NamedTuple):
    """Waiting tasks of one kind in one queue."""

    queue: str
    kind: str
    tasks: int  # of the first `HEAD` tasks of the queue
    since: float  # when the first of them could have run


def waiting_kinds(tx: Tx) -> list[WaitingKind]:
    """Count waiting tasks by queue and kind, among the first `HEAD` tasks of each queue.

    Tasks that no worker runs stay at the head of their queue, so they are found there however long the queue is.
    """
    head = " UNION ALL ".join(
        f"SELECT * FROM (SELECT queue, kind, run_at FROM tasks WHERE status = 'QUEUED' AND ready = 1 "
        f"AND place = {queue.place} ORDER BY place, turn, no LIMIT {HEAD}) AS q{queue.place}"
        for queue in PRIORITIES
    )
    rows = tx.all(f"SELECT queue, kind, count(*), min(run_at) FROM ({head}) AS head GROUP BY queue, kind ORDER BY 1, 2")
    return [WaitingKind(queue, kind, int(count), float(since)) for queue, kind, count, since in rows]


class Online(NamedTuple):
    """What an online worker runs."""

    queues: set[str]
    kinds: set[str] | None  # None: a worker of an older version, which does not report its kinds


def online_workers(tx: Tx) -> list[Online]:
    rows = tx.all("SELECT owner, queues, kinds, seen_at FROM task_workers WHERE ended_at IS NULL")
    return online_of(rows, tx.now())


def online_of(rows: Sequence[Row], now: float) -> list[Online]:
    """Return the online workers. ``rows``: (owner, queues, kinds, seen_at) of the workers that have not ended."""
    return [
        Online(set(queues.split(",")), None if kinds is None else set(kinds.split(",")))
        for owner, queues, kinds, seen_at in rows
        if not is_gone(owner, seen_at, now)
    ]


def unserved(tx: Tx) -> list[WaitingKind]:
    """Return waiting tasks that no online worker runs: all of them while no worker is online."""
    return unserved_by(online_workers(tx), waiting_kinds(tx))


def unserved_by(online: Sequence[Online], waiting: Sequence[WaitingKind]) -> list[WaitingKind]:
    """Return those of the waiting tasks that none of the online workers runs."""
    return [
        each
        for each in waiting
        if not any(each.queue in queues and (kinds is None or each.kind in kinds) for queues, kinds in online)
    ]


def mark_lost(tx: Tx, *, begun_anew: bool = False) -> None:
    """Say of those who are gone that they are lost, and forget those who ended long ago. Where leases had to begin anew,
    or somebody was seen at a time to come, they get their time from now on."""
    now = tx.now()
    tx.execute(
        "UPDATE task_workers SET seen_at = ? WHERE ended_at IS NULL AND seen_at > ?",
        (now, 0.0 if begun_anew else now + WORKER_SECONDS),
    )
    for name, owner, seen_at in tx.all("SELECT name, owner, seen_at FROM task_workers WHERE ended_at IS NULL"):
        if is_gone(owner, seen_at, now):
            tx.execute(
                "UPDATE task_workers SET state = 'lost', ended_at = ? WHERE name = ? AND seen_at = ?",
                (now, name, seen_at),
            )
            log.warning("a worker is lost", worker=name)
    tx.execute("DELETE FROM task_workers WHERE ended_at < ?", (now - WORKER_KEPT,))
