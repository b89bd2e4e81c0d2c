"""The list of workers: their heartbeats, the kinds of task they run, and operator requests to exit.

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
from headway.queue.store.administration import audit
from headway.queue.task import PRIORITIES, Priority, check_actor, check_text
from headway.telemetry import Log

log = Log("queue")

#: Seconds without a heartbeat after which a worker is considered lost.
WORKER_SECONDS = 20.0
#: Tasks at the head of each queue that are examined for kinds that no worker runs.
HEAD = 1000
#: Seconds for which ended workers stay in the list.
WORKER_KEPT = 86_400.0


@dataclass(frozen=True, slots=True)
class Sign:
    """A worker's heartbeat: its state, its current task and its totals."""

    name: str
    owner: Owner
    queues: Sequence[Priority]
    state: str
    task: str | None
    completed: int
    failed: int
    rss: int
    kinds: Sequence[str] | None = None  # the kinds of task it has handlers for


def heartbeat(tx: Tx, sign: Sign) -> str | None:
    """Record a heartbeat; return what an operator asked of the worker ("drain" or "stop"), if anything."""
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


def leave(tx: Tx, name: str, *, completed: int, failed: int, lost: bool = False) -> None:
    """Record that the worker has ended. ``lost``: its supervisor died, so nothing replaces it."""
    now = tx.now()
    tx.execute(
        "UPDATE task_workers SET state = ?, task = NULL, seen_at = ?, ended_at = ?, completed = ?, failed = ? WHERE name = ?",
        ("lost" if lost else "ended", now, now, completed, failed, name),
    )


def end_worker(tx: Tx, name: str, how: Literal["drain", "stop"], *, by: str, reason: str = "") -> str:
    """Ask a worker to exit and return the request now in force. The worker receives it with its next heartbeat.

    A stop request is not replaced by a later drain request. Raises `NotFound` if there is no such worker, and
    `InvalidInput` if it has already ended.
    """
    check_actor(by, reason)
    check_text(name, "the name of a worker")
    row = tx.one(f"SELECT state, ended_at, wanted FROM task_workers WHERE name = ?{tx.for_update}", (name,))
    if row is None:
        raise NotFound(f"There is no worker {name}.", hint="List them: headway workers")
    state, ended_at, wanted = row
    if ended_at is not None:
        raise InvalidInput(f"Worker {name} is {state}: it no longer takes requests.", hint="See: headway workers")
    if wanted in ("stop", how):
        return str(wanted)
    tx.execute(
        "UPDATE task_workers SET wanted = ?, wanted_by = ?, wanted_at = ? WHERE name = ?", (how, by, tx.now(), name)
    )
    audit(tx, by, f"worker.{how}", {"worker": name, "reason": reason})
    return how


def is_gone(owner: str, seen_at: float, now: float) -> bool:
    """Return whether a worker that did not sign off is lost: its process is dead, or its heartbeat is overdue."""
    found = read_owner(owner)
    return (found is not None and found.owner.is_dead) or now - seen_at > WORKER_SECONDS


def remove_worker(tx: Tx, name: str, *, by: str, reason: str = "") -> None:
    """Remove a lost or ended worker from the list.

    If the worker is alive after all, its next heartbeat adds it again. Raises `NotFound` if there is no such worker, and
    `InvalidInput` if it has not ended.
    """
    check_actor(by, reason)
    check_text(name, "the name of a worker")
    sql = f"SELECT state, owner, seen_at, ended_at FROM task_workers WHERE name = ?{tx.for_update}"
    row = tx.one(sql, (name,))
    if row is None:
        raise NotFound(f"There is no worker {name}.", hint="List them: headway workers")
    state, owner, seen_at, ended_at = row
    if ended_at is None:
        if not is_gone(owner, seen_at, tx.now()):
            raise InvalidInput(
                f"Worker {name} is {state}: it has not ended.", hint=f"Ask it to end: headway workers drain {name}"
            )
        state = "lost"  # the sweeper has not marked it yet
    tx.execute("DELETE FROM task_workers WHERE name = ?", (name,))
    audit(tx, by, "worker.remove", {"worker": name, "state": state, "reason": reason})


def lost_among(tx: Tx, names: Sequence[str]) -> set[str]:
    """Return the names among ``names`` that are marked as lost."""
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
    """The queues and kinds that an online worker serves."""

    queues: set[str]
    kinds: set[str] | None  # None: a worker of an older version, which does not report its kinds


def online_workers(tx: Tx) -> list[Online]:
    """Return the workers that are online now."""
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
    """Return the waiting tasks that no online worker runs."""
    return [
        each
        for each in waiting
        if not any(each.queue in queues and (kinds is None or each.kind in kinds) for queues, kinds in online)
    ]


def mark_lost(tx: Tx, *, restarted: bool = False) -> None:
    """Mark workers without a heartbeat as lost and delete those that ended long ago.

    A heartbeat in the future counts as received now. With ``restarted`` (leases were restarted) this applies to all
    workers, so each gets the full time again.
    """
    now = tx.now()
    tx.execute(
        "UPDATE task_workers SET seen_at = ? WHERE ended_at IS NULL AND seen_at > ?",
        (now, 0.0 if restarted else now + WORKER_SECONDS),
    )
    for name, owner, seen_at in tx.all("SELECT name, owner, seen_at FROM task_workers WHERE ended_at IS NULL"):
        if is_gone(owner, seen_at, now):
            tx.execute(
                "UPDATE task_workers SET state = 'lost', ended_at = ? WHERE name = ? AND seen_at = ?",
                (now, name, seen_at),
            )
            log.warning("a worker is lost", worker=name)
    tx.execute("DELETE FROM task_workers WHERE ended_at < ?", (now - WORKER_KEPT,))
