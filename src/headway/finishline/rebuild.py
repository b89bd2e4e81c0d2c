"""Put projects into Redis as the SQL record has them: at creation, and after Redis lost them.

Rebuilding and deleting hold a lease of the project, so they never overlap. The scripts check the lease again in the step that
changes the project, so a process that was paused past its lease changes nothing. The lease of a process that was killed on
this machine is free at once. On another machine it expires after 30 s, and only callers of that one project wait for it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from headway import _redis
from headway._lease import Lease, Owner, RedisLeases, held_as
from headway.core.retry import pause
from headway.errors import Held, Refused, StaleClaim, Unavailable
from headway.finishline.progress import Outcome, Progress, Status, from_hash
from headway.finishline.server import StateServer
from headway.finishline.store.records import LIFE, Records, Row
from headway.telemetry import Log, metrics

log = Log("finishline")

#: Seconds that the lease of a project lasts.
LEASE_SECONDS = 30.0
#: Seconds until staged identities expire; each staged page starts them again.
STAGE_SECONDS = 600
#: Attempts to install a project whose lease is lost each time.
LOST_LEASES = 50

T = TypeVar("T")


def project_keys(project_id: str) -> list[str]:
    """Return the keys of every script of the finish line, in their order."""
    families = (_redis.PROJECT, _redis.PROJECT_META, _redis.PROJECT_BITS, _redis.PROJECT_SEEN)
    return [*(family(project_id=project_id) for family in families), _redis.EVENTS()]


def read_progress(server: StateServer, project_id: str) -> Progress | None:
    """Read a project from Redis. None if Redis does not have it; `StoreCorrupt` if its hash is damaged."""
    fields: Any = server.client.hgetall(_redis.PROJECT(project_id=project_id))
    return from_hash(project_id, fields)


class Rebuilder:
    """Puts projects into Redis, and puts them back after a loss."""

    def __init__(self, server: StateServer, records: Records) -> None:
        self._server = server
        self._records = records
        self._leases = RedisLeases(server.client)

    def restore(self, project_id: str, *, wait: bool = True) -> Outcome | None:
        """Install a project that Redis lost or has in an older state. None if SQL does not have it either.

        With ``wait=False`` it returns EXISTS while another process has the lease.
        """
        if self._records.find(project_id) is None:
            return None

        def install() -> Outcome | None:
            with self.lease(project_id, wait=wait, enough=lambda: self._is_there(project_id)) as lease:
                if lease is None:
                    return Outcome.EXISTS
                row = self._records.find(project_id)  # again: it may have been deleted while we waited
                return None if row is None else self.install(row, lease)

        return self.under_a_lease(project_id, install)

    def under_a_lease(self, project_id: str, work: Callable[[], T]) -> T:
        """Run ``work``; again if it lost its lease, because Redis was wiped or this process was paused.

        Raises `Unavailable` after `LOST_LEASES` attempts.
        """
        for _ in range(LOST_LEASES):
            with suppress(StaleClaim):
                return work()
            pause(0.02, self._server.halt)
        raise Unavailable(f"Redis lost the lease of project {project_id!r} {LOST_LEASES} times in a row.")

    def install(self, row: Row, lease: Lease, *, first: bool = False) -> Outcome:
        """Put a project into Redis as SQL has it. ``first``: Redis never had it.

        Returns EXISTS if Redis has it, COMPLETED if this completed it (the journal had its last item and the event was not
        delivered) and CREATED otherwise. Raises `StaleClaim` if the lease is lost, and `Refused` if Redis has a project of
        this name that SQL does not know.
        """
        lossy = not first and not row.journaled and row.live_at is not None and row.completed_at is None
        seen = row.checkpoint_at or row.live_at
        done, errors = row.done, row.errors
        # First without identities: the script needs none if Redis has the project, and a long journal takes seconds to read.
        # Otherwise it answers AGAIN and changes nothing.
        staging = row.journaled and row.done == 0
        outcome = "AGAIN"
        while outcome == "AGAIN":  # identities are needed, or the staged ones were lost
            token = uuid.uuid4().hex[:12]
            staged = [
                _redis.STAGED_BITS(project_id=row.id, token=token),
                _redis.STAGED_SEEN(project_id=row.id, token=token),
            ]
            if staging:
                done, errors = self._stage(row, staged, lease)
            outcome, _, _ = _redis.script("finishline/install")(
                self._server.client,
                [*project_keys(row.id), *staged, str(lease.key)],
                [
                    LIFE, "-", 0, status_to_restore(row), row.total, done, errors, row.epoch, row.version,
                    "crawled" if row.crawled else "", "journal" if row.journaled else "",
                    self._known_end(row), f"{seen:.3f}" if lossy and seen else "",
                    held_as(lease), self._records.database(),
                ],
            )  # fmt: skip
            staging = row.journaled
        if outcome == "STALE":
            raise StaleClaim("Another process is rebuilding the project.")
        if outcome == "UNRECORDED":
            raise not_ours(row.id)
        if outcome == Outcome.EXISTS:
            return Outcome.EXISTS
        if row.live_at is None:
            self._records.live(row)
        if not first:
            _log_restored(row, done, seen if lossy else None)
        if outcome == Outcome.COMPLETED and row.completed_at is None:
            return Outcome.COMPLETED
        return Outcome.CREATED

    @contextmanager
    def lease(
        self, project_id: str, *, wait: bool = True, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[Lease | None]:
        """Hold the lease of a project. Yields None if it is taken and ``wait`` is False or ``enough()`` is True."""
        key, owner = _redis.PROJECT_REBUILD(project_id=project_id), Owner.current()
        deadline = time.monotonic() + 2 * LEASE_SECONDS
        lease: Lease | None = None
        while lease is None:
            try:
                lease = self._leases.acquire(key, owner, LEASE_SECONDS)
            except Held as error:
                if not wait or enough():
                    break
                if time.monotonic() > deadline:
                    raise Unavailable(f"Project {project_id!r} is being rebuilt: {error}.") from error
                pause(0.02, self._server.halt)
        try:
            yield lease
        finally:
            if lease is not None:
                with suppress(*_redis.failures()):  # otherwise it expires by itself
                    self._leases.release(lease)

    def claim_completion(self, project_id: str, epoch: str | None, by: str) -> bool:
        """Return whether ``by`` is the call that may answer COMPLETED. The first one that asks is."""
        if epoch is None:
            row = self._records.find(project_id)
            epoch = None if row is None else row.epoch
        return epoch is None or self._records.claim_completion(project_id, epoch, by)

    def completed(self, project_id: str) -> None:
        """Record in SQL that a project is DONE, with the counts of Redis. On failure the checkpointer does it later."""
        row = self._records.find(project_id)
        state = read_progress(self._server, project_id)
        if row is not None and state is not None and state.status is Status.DONE:
            self._records.completed(project_id, row.epoch, state)

    def _known_end(self, row: Row) -> str:
        if row.completed_at is None:
            return ""
        return "delivered" if self._records.is_over(row) else "completed"

    def _is_there(self, project_id: str) -> bool:
        return bool(self._server.client.exists(_redis.PROJECT(project_id=project_id)))

    def _stage(self, row: Row, staged: list[str], lease: Lease) -> tuple[int, int]:
        done = errors = 0
        dense = max(32_768, 512 * row.done, 8 * row.total)  # the rule of project.lua
        renewed = time.monotonic()
        for page in self._records.counts(row):
            if time.monotonic() - renewed > LEASE_SECONDS / 6:
                self._leases.renew(lease)
                renewed = time.monotonic()
            _redis.script("finishline/stage")(
                self._server.client, staged, [STAGE_SECONDS, dense, *(item for item, _ in page)]
            )
            done += len(page)
            errors += sum(failed for _, failed in page)
        return done, errors


def not_ours(project_id: str) -> Refused:
    return Refused(
        f"Project {project_id!r} is in Redis and not in this database: it was created without one, or with another.",
        hint="Let it finish with the settings it was created with, or delete it there. Then create it again.",
    )


def status_to_restore(row: Row) -> Status:
    """Return the status to install. A completed project becomes PROCESSING and completes again in Redis.

    So its event is announced again, unless every sink took it: the stream may be lost too.
    """
    return Status.PROCESSING if row.completed_at is not None else row.status


def _log_restored(row: Row, done: int, checkpoint: float | None) -> None:
    metrics.count("headway_projects_restored", exact=str(checkpoint is None).lower())
    facts: dict[str, str | int] = {"operation": "restore", "project_id": row.id, "done": done, "total": row.total}
    if checkpoint is None:
        log.info("a project was rebuilt", **facts)
    else:
        age = round(time.time() - checkpoint, 1)
        log.warning(
            "a project was rebuilt from its last checkpoint: later counts are missing, and items counted before it "
            "count again if they are reported again", seconds=age, **facts,
        )  # fmt: skip
