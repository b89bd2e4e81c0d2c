"""The ledger: all jobs of one database."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from typing import Any, Self

from headway import events
from headway._sql import Database, Tx, connect
from headway.core.ids import check_id
from headway.core.retry import ITEM, RetryPolicy
from headway.errors import InvalidInput, JobHeld, NotFound
from headway.ledger import job_lease
from headway.ledger.job import CHUNK, Job
from headway.ledger.job_lease import Hold
from headway.ledger.store.index_range import last_of
from headway.ledger.store.recorder import Recorder, audit, current_user
from headway.ledger.store.report import all_jobs
from headway.ledger.values import MAX_INDEX, OF_ITEMS, JobInfo
from headway.telemetry import Log

log = Log("ledger")

_NEXT_NUMBER = (
    "max((SELECT coalesce(max(no), 0) FROM jobs), "
    "(SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM meta WHERE name = 'last_forgotten')) + 1"
)
_REMEMBER_NUMBER = (
    "INSERT INTO meta (name, value) VALUES ('last_forgotten', ?) ON CONFLICT (name) DO UPDATE SET "
    "value = max(CAST(value AS INTEGER), CAST(excluded.value AS INTEGER))"
)

#: The jobs that `Ledger.purge` deletes. Checked again in the deleting transaction, because jobs change meanwhile.
_OLD = "(finished_at IS NOT NULL OR archived = 1) AND updated_at < ?"


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
        row = self.database.one("SELECT no FROM jobs WHERE id = ?", (check_id(id, "a job id"),))
        if row is None:
            raise NotFound(f"There is no job {id!r} in {self.database.name}.", hint="List them: headway jobs")
        return Job(self.database, row[0], id)

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
            raise InvalidInput(f"{max_retries!r} is no number of retries.", hint="Use a whole number from 0.")

        # Job numbers are never reused: a process still working on a deleted job must not write to another one.
        # PostgreSQL's sequence ensures this. SQLite would assign the largest existing number plus one.
        number, next_number = ("no, ", f"{_NEXT_NUMBER}, ") if self.database.engine == "sqlite" else ("", "")

        def work(tx: Tx) -> int:
            now = tx.now()
            tx.execute(
                f"INSERT INTO jobs ({number}id, origin, function, source, keyed_by, max_retries, created_at, updated_at, "
                f"retry_base, retry_factor, retry_cap, retry_jitter) SELECT {next_number}?, value, ?, ?, ?, ?, ?, ?, ?, ?, "
                "?, ? FROM meta WHERE name = 'database' ON CONFLICT (id) DO NOTHING",
                (id, function, source, keyed_by, max_retries, now, now,
                 policy.base, policy.factor, policy.cap, policy.jitter),
            )  # fmt: skip
            row = tx.one("SELECT no FROM jobs WHERE id = ?", (id,))
            assert row is not None
            return int(row[0])

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
            tx.execute(
                "UPDATE jobs SET function = ?, source = ?, command = ?, keyed_by = ?, max_retries = ? WHERE no = ?",
                (function, source, command, keyed_by, max_retries, job.no),
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
        """Archive a job under another id, so that its id can be used again. Return the new id, or None if there was no
        such job.

        Nothing is deleted; `purge` does that later. A suspended former holder is fenced: its reports are refused when
        it wakes up, so two processes never work on the same items without knowing.
        """

        def work(tx: Tx) -> str | JobHeld | None:
            row = tx.one("SELECT no FROM jobs WHERE id = ?", (id,))
            if row is None:
                return None
            if (held := job_lease.refusal(tx, row[0], id)) is not None:
                return held
            now = tx.now()
            aside = _put_aside(tx, row[0], id, now)
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
        old = self.database.all(f"SELECT no, id FROM jobs WHERE {_OLD} ORDER BY no", (limit,))
        gone = []
        for no, id in old:
            try:
                if self._delete(no, id, "purge", actor, unless_changed_since=limit) is not None:
                    gone.append(id)
            except (
                JobHeld,
                NotFound,
            ) as error:  # another process resumed or deleted it meanwhile
                log.info("a job is left as it is", job=id, error=str(error))
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
        """Delete a job and return its number of items. Returns None, without a change, if it is no longer old."""

        def begin(tx: Tx) -> int | JobHeld | None:
            if (held := job_lease.refusal(tx, no, id)) is not None:
                return held
            limit = unless_changed_since
            if limit is not None and tx.one(f"SELECT 1 FROM jobs WHERE no = ? AND {_OLD}", (no, limit)) is None:
                return None
            recorder = Recorder(tx, no, archived_too=True)
            if tx.engine == "sqlite":
                tx.execute(_REMEMBER_NUMBER, (str(no),))
            _put_aside(tx, no, id, recorder.now)  # if we are killed below, the id is free and `purge` does the rest
            # A slot records under its block alone. A job with blocks belongs to a fleet and was refused above, unless
            # the database was edited from outside. Then this statement waits for a slot that is recording, and later
            # records find no block.
            tx.execute("DELETE FROM blocks WHERE job = ?", (no,))
            facts: dict[str, object] = {"total": recorder.total, "done": recorder.done}
            if reason:
                facts["reason"] = reason
            audit(tx, recorder.now, actor or current_user(), action, id, facts)
            return int(recorder.total)

        total = self.database.run(begin, operation=action)
        if isinstance(total, JobHeld):
            raise total
        if total is None:
            return None

        def step(tx: Tx) -> bool:
            last = last_of(tx, "input_products", no, -1, CHUNK)
            for table in OF_ITEMS:
                tx.execute(f"DELETE FROM {table} WHERE job = ? AND idx <= ?", (no, MAX_INDEX if last is None else last))
            return last is not None

        while self.database.run(step, operation=action):
            pass  # in chunks, so that the write-ahead log stays small
        self.database.run(lambda tx: tx.execute("DELETE FROM jobs WHERE no = ?", (no,)), operation=action)
        return total

    def note(self, action: str, job: str, detail: dict[str, object], *, actor: str | None = None) -> None:
        """Add an entry to the audit trail."""
        self.database.run(
            lambda tx: audit(tx, tx.now(), actor or current_user(), action, job, detail), operation="audit"
        )

    def audit_trail(self, job: str | None = None) -> Iterator[tuple[float, str, str, str, str]]:
        """Yield (time, actor, action, job, detail as JSON), oldest first."""
        where, parameters = ("WHERE job = ?", (job,)) if job else ("", ())
        yield from self.database.all(
            f"SELECT at, actor, action, job, detail FROM audit {where} ORDER BY seq", parameters
        )


def _put_aside(tx: Tx, no: int, id: str, now: float) -> str:
    """Archive the job under a new id, and return it. A new token fences the former holder."""
    aside = f"{id[:100]}.{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%S}.{no}"
    job_lease.end_lost_runs(tx, no, now)
    tx.execute(
        "UPDATE jobs SET id = ?, archived = 1, updated_at = ?, token = token + 1, holder = NULL, lease_until = NULL "
        "WHERE no = ?",
        (aside, now, no),
    )
    return aside
