"""Putting a project into Redis as the SQL record has it: when it is created, and after Redis lost it.

It is done under a lease of the project, and so is deleting: a deletion that comes first is seen, one that comes later waits.
The scripts look at the lease once more in the step that changes something, so that somebody who was paused past its end
changes nothing. The lease of a process that was killed on this machine is taken over at once; of another machine's it ends
after 30 s, and only callers of that one project wait for it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from headway import _redis
from headway._lease import Lease, Owner, RedisLeases, held_as
from headway.core.retry import pause
from headway.errors import Held, Refused, StaleClaim, Unavailable
from headway.finishline.progress import Outcome, Status, from_hash
from headway.finishline.server import StateServer
from headway.finishline.store.records import LIFE, Records, Row
from headway.telemetry import Log, metrics

log = Log("finishline")

#: Seconds after which somebody else may go on with a rebuild.
LEASE_SECONDS = 30.0
#: Seconds that staged identities live. Each page that is staged begins them anew.
STAGE_SECONDS = 600
#: Attempts to put a project in place whose lease was lost before `install` could use it.
LOST_LEASES = 50

T = TypeVar("T")


def project_keys(project_id: str) -> list[str]:
    """The keys every script of the finish line gets, in their order."""
    families = (_redis.PROJECT, _redis.PROJECT_META, _redis.PROJECT_BITS, _redis.PROJECT_SEEN)
    return [*(family(project_id=project_id) for family in families), _redis.EVENTS()]


class Deletion:
    """One call to delete a project, however often it is tried. What its first try found is what it deletes: somebody who saw
    the project gone may have created the next of its name before an answer that was lost is asked for again."""

    def __init__(self, server: StateServer, records: Records | None, project_id: str) -> None:
        self._client, self._records, self._project_id = server.client, records, project_id
        self._found: tuple[str | None, str | None] | None = None  # epochs, in SQL and in Redis

    def work(self, lease: Lease | None = None) -> bool | None:
        """Whether there was one; None when the lease is not ours any more. SQL first: what Redis has alone is replaced by the
        next of its name."""
        if self._found is None:
            row = self._records.find(self._project_id) if self._records is not None else None
            self._found = (row.epoch if row is not None else None, self._live())
        recorded, live = self._found
        if live is None:
            live = recorded  # somebody may have rebuilt it since, if we were paused past the end of the lease
        if recorded is not None and self._records is not None:
            self._records.delete(self._project_id, recorded)
        if live is not None:
            keys = [*project_keys(self._project_id)[:4], _redis.PROJECT_REBUILD(project_id=self._project_id)]
            held = "" if lease is None else held_as(lease)
            if _redis.script("finishline/remove")(self._client, keys, [held, live]) == "STALE":
                return None
        return recorded is not None or live is not None

    def _live(self) -> str | None:
        """The epoch of the project in Redis; empty when it has none, None when there is no project."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.exists(_redis.PROJECT(project_id=self._project_id))
        pipeline.hget(_redis.PROJECT_META(project_id=self._project_id), "epoch")
        there, epoch = pipeline.execute(raise_on_error=False)
        if isinstance(there, Exception):
            raise there
        return None if not there else epoch if isinstance(epoch, str) else ""


class Rebuilder:
    """Brings projects (back) into Redis, and out of it."""

    def __init__(self, server: StateServer, records: Records) -> None:
        self._server = server
        self._records = records
        self._leases = RedisLeases(server.client)

    def restore(self, project_id: str, *, wait: bool = True) -> Outcome | None:
        """Bring a project back that Redis does not have, or has in an older state; see `install`. None when SQL does not
        have it either. Without ``wait`` it is EXISTS when somebody else is at it."""
        if self._records.find(project_id) is None:
            return None

        def install() -> Outcome | None:
            with self.lease(project_id, wait=wait, enough=lambda: self._is_there(project_id)) as lease:
                if lease is None:
                    return Outcome.EXISTS
                row = self._records.find(project_id)  # again: a deletion may have come before us
                return None if row is None else self.install(row, lease)

        return self.under_a_lease(project_id, install)

    def under_a_lease(self, project_id: str, work: Callable[[], T]) -> T:
        """Run ``work`` again while it finds its lease gone: Redis was wiped, or this process paused past its end.

        `Unavailable` when Redis loses the lease every time.
        """
        for _ in range(LOST_LEASES):
            with suppress(StaleClaim):
                return work()
            pause(0.02, self._server.halt)
        raise Unavailable(f"Redis lost the lease of project {project_id!r} {LOST_LEASES} times in a row.")

    def install(self, row: Row, lease: Lease, *, first: bool = False) -> Outcome:
        """Put a project in place as SQL knows it, unless it EXISTS. ``first``: it never was there.

        COMPLETED when the journal held its last item and its event had not been delivered: CREATED otherwise. `StaleClaim`
        when the lease is not ours any more, `Refused` when a project that SQL does not know is in its place.
        """
        lossy = not first and not row.journaled and row.live_at is not None and row.completed_at is None
        seen = row.checkpoint_at or row.live_at
        done, errors = row.done, row.errors
        # The script is asked first without identities: for a project that is there it wants none, and a long journal takes
        # seconds to read. It puts no count in place without them.
        staging = row.journaled and row.done == 0
        outcome = "AGAIN"
        while outcome == "AGAIN":  # it wants them, or what was put aside was lost before it was in place
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
            raise StaleClaim("Another process rebuilds the project.")
        if outcome == "UNRECORDED":
            raise not_ours(row.id)
        if outcome == Outcome.EXISTS:
            return Outcome.EXISTS
        if row.live_at is None:
            self._records.live(row)
        if not first:
            _say_restored(row, done, seen if lossy else None)
        if outcome == Outcome.COMPLETED and row.completed_at is None:
            return Outcome.COMPLETED
        return Outcome.CREATED

    def remove(self, project_id: str, deletion: Deletion) -> bool:
        """Delete a project in SQL and in Redis; whether there was one."""
        there = None
        while there is None:
            with self.lease(project_id) as lease:
                assert lease is not None  # it was waited for
                there = deletion.work(lease)
        return there

    @contextmanager
    def lease(
        self, project_id: str, *, wait: bool = True, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[Lease | None]:
        """The right to put this project in place or to remove it. None when it is not to be waited for, or when what it is
        waited for is there (``enough``)."""
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
                with suppress(*_redis.failures()):  # a server that is away lets it end by itself
                    self._leases.release(lease)

    def claim_completion(self, project_id: str, epoch: str | None, by: str) -> bool:
        """Whether the call ``by`` is the one to be answered that it completed the project."""
        if epoch is None:
            row = self._records.find(project_id)
            epoch = None if row is None else row.epoch
        return epoch is None or self._records.claim_completion(project_id, epoch, by)

    def completed(self, project_id: str) -> None:
        """SQL learns that a project is DONE, with the counts Redis has. What completes one calls this; should it fail, the
        checkpointer's next round does it."""
        row = self._records.find(project_id)
        fields = self._server.client.hgetall(_redis.PROJECT(project_id=project_id))
        state = from_hash(project_id, fields)  # type: ignore[arg-type]  # this client is not an asynchronous one
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
        dense = max(32_768, 512 * row.done, 8 * row.total)  # as project.lua has it
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
        hint="Let it finish as it was begun (FinishLine(url) without a database), or delete it there; then create it again.",
    )


def status_to_restore(row: Row) -> Status:
    """The status to put into Redis. A completed project is decided again there, and announced again unless every
    sink took its event: the stream may be lost too."""
    return Status.PROCESSING if row.completed_at is not None else row.status


def _say_restored(row: Row, done: int, checkpoint: float | None) -> None:
    metrics.count("headway_projects_restored", exact=str(checkpoint is None).lower())
    facts: dict[str, str | int] = {"operation": "restore", "project_id": row.id, "done": done, "total": row.total}
    if checkpoint is None:
        log.info("a project was rebuilt", **facts)
    else:
        age = round(time.time() - checkpoint, 1)
        log.warning(
            "a project was rebuilt from its last checkpoint: what was counted after it is missing, and an item "
            "counted before it counts again when it is reported again", seconds=age, **facts,
        )  # fmt: skip
