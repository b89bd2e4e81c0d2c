"""The ledger: all jobs of one database."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import Any, Self

from headway import events
from headway._sql import Database, Tx, connect
from headway.core.ids import check_id
from headway.core.retry import ITEM, RetryPolicy
from headway.errors import InvalidInput, JobHeld, NotFound
from headway.ledger import job_lease
from headway.ledger.fleet import store as fleets
from headway.ledger.job import Job
from headway.ledger.job_lease import Hold
from headway.ledger.store import audit as audit_trail
from headway.ledger.store import items, jobs
from headway.ledger.store.audit import audit, current_user
from headway.ledger.store.contract import item_store
from headway.ledger.store.recorder import Recorder
from headway.ledger.store.report import all_jobs
from headway.ledger.values import JobInfo
from headway.telemetry import Log

log = Log("ledger")


class Ledger:
    """The jobs of a database. `Job` has everything about a single job."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(cls, url: str, *, create: bool = True, stop: threading.Event | None = None) -> Ledger:
        """Open the database at ``url``. Without ``create``, a missing database raises `NotFound`."""
        return cls(connect(url, create=create, stop=stop))

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def job(self, id: str) -> Job:
        """Return the job with this id, or raise `NotFound`."""
        no = jobs.number_of(self.database, check_id(id, "a job id"))
        if no is None:
            raise NotFound(f"There is no job {id!r} in {self.database.name}.", hint="List them: headway jobs")
        return Job(self.database, no, id)

    def create(
        self,
        id: str,
        *,
        function: str = "",
        source: str = "",
        keyed_by: str | None = None,
        max_retries: int = 2,
        policy: RetryPolicy = ITEM,
    ) -> Job:
        """Return the job with this id, creating it if needed. An existing job is left unchanged.

        ``policy`` sets how long failed items wait. ``max_retries`` sets how often they are retried.
        """
        check_id(id, "a job id")
        if type(max_retries) is not int or not 0 <= max_retries <= 1_000_000:
            raise InvalidInput(f"max_retries must be a whole number from 0 to 1,000,000 (got {max_retries!r:.60}).")

        def work(tx: Tx) -> int:
            return jobs.create(
                tx, id, function=function, source=source, keyed_by=keyed_by, max_retries=max_retries, policy=policy
            )

        return Job(self.database, self.database.run(work, operation="create"), id)

    def jobs(self, *, archived: bool = False) -> list[JobInfo]:
        """Return all jobs, most recently updated first."""
        return all_jobs(self.database, archived=archived)

    def describe(
        self, job: Job, *, function: str, source: str, command: str, keyed_by: str | None, max_retries: int
    ) -> None:
        """Store how the job is run, for display and for comparison with the next command."""

        def work(tx: Tx) -> None:
            job.open(tx)
            jobs.describe(
                tx,
                job.no,
                function=function,
                source=source,
                command=command,
                keyed_by=keyed_by,
                max_retries=max_retries,
            )

        self.database.run(work, operation="describe")

    # ---- job lease ---------------------------------------------------------------------------------------------------

    def hold(
        self,
        job: Job,
        settings: dict[str, Any],
        *,
        policy: RetryPolicy | None = None,
        lease: float = job_lease.LEASE,
    ) -> Hold:
        """Acquire the job, so that this process is the only one that runs it.

        ``policy``, if given, becomes the job's retry policy. It is stored with the job, for a process that takes over.
        """
        return job_lease.acquire(self.database, job.no, settings, policy=policy, lease=lease)

    def renew(self, hold: Hold, running: Collection[int] = ()) -> None:
        """Renew a hold and the notes on its running items."""
        job_lease.renew(self.database, hold, running)

    def release(self, hold: Hold, outcome: str) -> None:
        """End the run with ``outcome`` and release the job."""
        job_lease.release(self.database, hold, outcome)

    # ---- archiving and deleting ------------------------------------------------------------------------------------

    def archive(self, id: str, *, actor: str | None = None) -> str | None:
        """Archive a job under another id, so that its id can be used again.

        Returns the new id, or None if there was no such job. Nothing is deleted; `purge` does that later. A suspended
        former holder is fenced: its reports are refused when it wakes up, so two processes never work on the same items
        without knowing.
        """

        def work(tx: Tx) -> str | JobHeld | None:
            no = jobs.number_of(tx, id)
            if no is None:
                return None
            if (held := job_lease.refusal(tx, no, id)) is not None:
                return held
            now = tx.now()
            aside = jobs.archive(tx, no, id, now)
            audit(tx, now, actor or current_user(), "reset", id, {"archived_as": aside})
            return aside

        aside = self.database.run(work, operation="archive")
        if isinstance(aside, JobHeld):
            raise aside
        return aside

    def forget(self, id: str, *, actor: str | None = None, reason: str = "") -> int:
        """Delete a job with all its records, and return how many items it had. Audited."""
        total = self._delete(self.job(id).no, id, "forget", actor, reason=reason)
        assert total is not None
        return total

    def purge(self, *, older_than: float, actor: str | None = None) -> list[str]:
        """Delete finished and archived jobs unchanged for ``older_than`` seconds, and delivered events of that age."""
        limit = self.database.now() - older_than
        gone = []
        for no, id in jobs.old(self.database, limit):
            try:
                if self._delete(no, id, "purge", actor, unless_changed_since=limit) is not None:
                    gone.append(id)
            except (JobHeld, NotFound) as error:  # another process resumed or deleted it meanwhile
                log.info("a job was not purged", job=id, error=str(error))
        self.database.run(lambda tx: events.purge(tx, limit), operation="purge")
        return gone

    def _delete(
        self,
        no: int,
        id: str,
        action: str,
        actor: str | None,
        *,
        reason: str = "",
        unless_changed_since: float | None = None,
    ) -> int | None:
        """Delete a job and return its number of items.

        Returns None, without a change, if it is no longer old.
        """

        def begin(tx: Tx) -> int | JobHeld | None:
            if (held := job_lease.refusal(tx, no, id)) is not None:
                return held
            limit = unless_changed_since
            if limit is not None and not jobs.is_old(tx, no, limit):
                return None
            row = Recorder(tx, no, archived_too=True).row
            item_store(tx.engine).retire_number(tx, no)
            jobs.archive(tx, no, id, row.now)  # if we are killed below, the id is free and `purge` does the rest
            # A slot records under its block alone. A job with blocks belongs to a fleet and was refused above, unless
            # the database was edited from outside. Then this statement waits for a slot that is recording, and later
            # records find no block.
            fleets.delete_blocks(tx, no)
            facts: dict[str, object] = {"total": row.total, "done": row.done}
            if reason:
                facts["reason"] = reason
            audit(tx, row.now, actor or current_user(), action, id, facts)
            return row.total

        total = self.database.run(begin, operation=action)
        if isinstance(total, JobHeld):
            raise total
        if total is None:
            return None

        while self.database.run(lambda tx: items.delete_chunk(tx, no), operation=action):
            pass
        self.database.run(lambda tx: jobs.delete(tx, no), operation=action)
        return total

    def note(self, action: str, job: str, detail: dict[str, object], *, actor: str | None = None) -> None:
        """Add an entry to the audit trail."""
        self.database.run(
            lambda tx: audit(tx, tx.now(), actor or current_user(), action, job, detail), operation="audit"
        )

    def audit_trail(self, job: str | None = None) -> Iterator[tuple[float, str, str, str, str]]:
        """Yield (time, actor, action, job, detail as JSON), oldest first."""
        yield from audit_trail.entries(self.database, job)
