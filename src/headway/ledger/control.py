"""Requests to a run from another process: pause, resume, stop, or change the number of workers.

A request is a row that the run reads several times a second, so there is no socket to secure. It applies only to the
current run; the next one starts with its own settings. Requests are idempotent.
"""

from __future__ import annotations

import json
from typing import Any

from headway._lease import SqlLeases, has_ended
from headway._sql import Database, Tx
from headway.errors import InvalidInput, Refused
from headway.ledger.store import jobs
from headway.ledger.store.audit import audit, current_user
from headway.ledger.values import Control

__all__ = ["MOST_WORKERS", "Control", "ControlledJob"]

#: A larger number is assumed to be a typing error.
MOST_WORKERS = 10_000

_LEASES = SqlLeases("jobs", "no")


class ControlledJob:
    """The requests to the current run of a job."""

    no: int
    _database: Database

    def pause(self, *, actor: str | None = None, reason: str = "") -> Control:
        """Ask the run to complete its current items and start no more. Raises `Refused` if there is no run.

        The run obeys within a second and shows the actor. The request is in the audit trail.
        """
        return self._request("pause", actor, reason, paused=True)

    def resume(self, *, actor: str | None = None, reason: str = "") -> Control:
        """Ask a paused run to continue."""
        return self._request("resume", actor, reason, paused=False)

    def stop(self, *, now: bool = False, actor: str | None = None, reason: str = "") -> Control:
        """Ask the run to end after its current items. With ``now``, it abandons them."""
        wanted = self._request("stop", actor, reason, stopping=2 if now else 1)
        self.on_stop()
        return wanted

    def on_stop(self) -> None:
        """End a fleet's run if none of its slots is working, because no process would end it."""
        from headway.ledger.fleet import fleet

        fleet.attend(self._database, self.no)

    def scale(self, workers: int, *, actor: str | None = None, reason: str = "") -> Control:
        """Ask the run to work on ``workers`` items at once."""
        if not (type(workers) is int and 1 <= workers <= MOST_WORKERS):
            raise InvalidInput(f"The number of workers must be from 1 to {MOST_WORKERS:,} (got {workers!r}).")
        return self._request("scale", actor, reason, workers=workers)

    def asked(self, run: int) -> Control:
        """Return the current control requests for a run."""
        return jobs.control(self._database, self.no, run)

    def _request(
        self,
        action: str,
        actor: str | None,
        reason: str,
        *,
        paused: bool | None = None,
        stopping: int = 0,
        workers: int | None = None,
    ) -> Control:
        """Change the requests to the current run, and audit the change. Raises `Refused` if there is no run."""
        by = actor or current_user()

        def work(tx: Tx) -> Control:
            id, run = _current_run(tx, self.no)
            before = jobs.control(tx, self.no, run)
            wanted = before._replace(
                paused=before.paused if paused is None else paused,
                stopping=max(before.stopping, stopping),
                workers=workers or before.workers,
            )
            if wanted == before:
                return before
            wanted = wanted._replace(version=before.version + 1, actor=by[:200])
            now = tx.now()
            jobs.put_control(tx, self.no, run, wanted, now)
            detail: dict[str, object] = {"run": run}
            if workers is not None:
                detail["workers"] = workers
            if reason:
                detail["reason"] = reason
            audit(tx, now, by, action, id, detail)
            return wanted

        return self._database.run(work, operation=action)


def _current_run(tx: Tx, job: int) -> tuple[str, int]:
    """Return the job's id and the number of its run, which cannot end before this transaction does.

    Raises `Refused` if no run reads requests.
    """
    id, holder, lease_until, command = jobs.lock_holder(tx, job)
    run = jobs.last_run(tx, job)
    if run is None or holder is None or has_ended(holder, lease_until, tx.now()):
        raise Refused(f"Job {id} is not running.", hint=f"Continue it:  {command}" if command else None)
    # After the clock was set back, a holder that died on another machine would seem alive for that much longer.
    _LEASES.shorten(tx, job)
    number, _, _, settings, _ = run
    known: dict[str, Any] = json.loads(settings)
    if known.get("mode") == "loop":
        raise Refused(f"Job {id} runs in a program's own loop, which does not read requests.")
    return id, int(number)
