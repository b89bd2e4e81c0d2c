"""Requests to a run from another process: pause, resume, stop, or change the number of workers.

A request is a row that the run reads several times a second, so there is no socket to secure. It applies only to the
current run; the next one starts with its own settings. Requests are idempotent.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from headway._lease import has_ended, shorten
from headway._sql import Database, Tx
from headway.errors import InvalidInput, NotFound, Refused
from headway.ledger.store.recorder import audit

#: A larger number is assumed to be a typing error.
MOST_WORKERS = 10_000

_CONTROL = "SELECT version, paused, stopping, workers, actor FROM controls WHERE job = ? AND run = ?"


class Control(NamedTuple):
    """The current requests to a run."""

    #: Grows with every request.
    version: int = 0
    paused: bool = False
    #: 1: finish the current items. 2: abandon them.
    stopping: int = 0
    #: How many items to run at once. None: as at the start.
    workers: int | None = None
    #: The user or program that made the last request.
    actor: str = ""


def read(database: Database, job: int, run: int) -> Control:
    """Return the current requests to a run."""
    row = database.one(_CONTROL, (job, run))
    return Control() if row is None else _control(row)


def read_in(tx: Tx, job: int, run: int) -> Control:
    """Return the current requests to a run, within a transaction."""
    row = tx.one(_CONTROL, (job, run))
    return Control() if row is None else _control(row)


def ask(
    database: Database,
    job: int,
    action: str,
    *,
    actor: str,
    paused: bool | None = None,
    stopping: int | None = None,
    workers: int | None = None,
    reason: str = "",
) -> Control:
    """Change the requests to the current run, and audit the change. Raises `Refused` if there is no run."""
    if workers is not None and not (type(workers) is int and 1 <= workers <= MOST_WORKERS):
        raise InvalidInput(f"{workers!r} is no number of workers.", hint=f"Use 1 to {MOST_WORKERS:,}.")

    def work(tx: Tx) -> Control:
        run = _running(tx, job)
        row = tx.one(_CONTROL, (job, run))
        now = Control() if row is None else _control(row)
        asked = Control(
            now.version + 1,
            now.paused if paused is None else paused,
            max(now.stopping, stopping or 0),
            workers or now.workers,
            actor[:200],
        )
        if asked._replace(version=now.version, actor=now.actor) == now:
            return now  # no change
        tx.execute(
            "INSERT INTO controls (job, run, version, paused, stopping, workers, actor, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (job) DO UPDATE SET run = excluded.run, version = excluded.version, paused = excluded.paused, "
            "stopping = excluded.stopping, workers = excluded.workers, actor = excluded.actor, at = excluded.at",
            (job, run, asked.version, int(asked.paused), asked.stopping, asked.workers, asked.actor, tx.now()),
        )
        detail: dict[str, object] = {"run": run}
        if workers is not None:
            detail["workers"] = workers
        if reason:
            detail["reason"] = reason
        (id,) = tx.one("SELECT id FROM jobs WHERE no = ?", (job,)) or ("",)
        audit(tx, tx.now(), actor, action, id, detail)
        return asked

    return database.run(work, operation=action)


def _running(tx: Tx, job: int) -> int:
    """Return the number of the current run. Raises `Refused` if no run reads requests."""
    locked = " FOR UPDATE" if tx.engine == "postgresql" else ""  # the run cannot end between this check and the request
    row = tx.one(f"SELECT id, holder, lease_until, command FROM jobs WHERE no = ?{locked}", (job,))
    if row is None:
        raise NotFound("The job was forgotten.")
    id, holder, lease_until, command = row
    run = tx.one("SELECT no, settings FROM runs WHERE job = ? ORDER BY no DESC LIMIT 1", (job,))
    if run is None or holder is None or has_ended(holder, lease_until, tx.now()):
        raise Refused(f"Job {id} is not running.", hint=f"Continue it:  {command}" if command else None)
    # After the clock was set back, a holder that died on another machine would seem alive for that much longer.
    shorten(tx, "jobs", "no = ?", (job,))
    settings: dict[str, Any] = json.loads(run[1])
    if settings.get("mode") == "loop":
        raise Refused(f"Job {id} is worked on by a program's own loop, which nobody can control from elsewhere.")
    return int(run[0])


def _control(row: tuple[Any, ...]) -> Control:
    version, paused, stopping, workers, actor = row
    return Control(version, bool(paused), stopping, workers, actor)
