"""Create and delete one project in SQL and in Redis."""

from __future__ import annotations

from functools import partial

from headway import _redis
from headway._lease import Lease, held_as
from headway.errors import Unavailable
from headway.finishline.commands import Commands
from headway.finishline.progress import Outcome, Progress
from headway.finishline.rebuild import Rebuilder, not_ours, project_keys, read_progress
from headway.finishline.server import StateServer
from headway.finishline.store.records import Records, Row
from headway.telemetry import Log

log = Log("finishline")


class Creation:
    """One call to create a project with a record. It may be retried: the first attempt decides what is created.

    SQL is written first. Both writes hold the lease of the project, so a deletion comes before or after, never in between.
    """

    def __init__(self, server: StateServer, records: Records, rebuilder: Rebuilder, commands: Commands) -> None:
        self._server, self._records, self._rebuilder, self._commands = server, records, rebuilder, commands
        self._made: tuple[Row, bool] | None = None
        self._sent = False

    def run(self, project_id: str, *, total: int, journaled: bool) -> Progress:
        """Create the project. While Redis is away, record it in SQL only."""

        def record(*, live: bool) -> tuple[Row, bool]:
            if self._made is None:
                self._made = self._records.create(project_id, total=total, journaled=journaled, live=live)
            return self._made

        def install() -> Outcome:
            with self._rebuilder.lease(project_id) as lease:
                assert lease is not None  # it waited
                if self._made is None and self._records.find(project_id) is None:
                    self._refuse_foreign(project_id)
                row, new = record(live=True)
                self._sent = True
                return self._rebuilder.install(row, lease, first=new)

        def work() -> None:
            if self._rebuilder.under_a_lease(project_id, install) is Outcome.COMPLETED:
                self._commands.completed(project_id)

        try:
            self._server.read("create", project_id, work)
            found = self._server.read("create", project_id, partial(read_progress, self._server, project_id))
            return found or record(live=True)[0].progress()
        except Unavailable:
            row, new = record(live=False)  # raises again if SQL is the unreachable one
            if new and not self._sent:  # otherwise Redis may have it, and counts there can be lost
                self._records.not_live(row)
            log.warning(
                "the project is recorded; Redis gets it when it is back", operation="create", project_id=project_id
            )
            return row.progress()

    def _refuse_foreign(self, project_id: str) -> None:
        """Raise `Refused` if Redis has the project without a record, or with a record in another database."""
        pipeline = self._server.client.pipeline(transaction=False)  # a full server refuses MULTI
        pipeline.exists(_redis.PROJECT(project_id=project_id))
        pipeline.hget(_redis.PROJECT_META(project_id=project_id), "record")
        there, record = pipeline.execute()
        if there and record != self._records.database():
            raise not_ours(project_id)


class Deletion:
    """One call to delete a project. It may be retried: it deletes what its first attempt found.

    After a lost reply another call may have created the next project of the same name.
    """

    def __init__(self, server: StateServer, records: Records | None, project_id: str) -> None:
        self._client, self._records, self._project_id = server.client, records, project_id
        self._found: tuple[str | None, str | None] | None = None  # epochs in SQL and in Redis

    def run(self, lease: Lease | None = None) -> bool | None:
        """Delete the project. Return whether it existed; None if the lease is lost.

        SQL is first: a project that only Redis has is replaced when the next one of its name is created.
        """
        if self._found is None:
            row = self._records.find(self._project_id) if self._records is not None else None
            self._found = (row.epoch if row is not None else None, self._live_epoch())
        recorded, live = self._found
        if live is None:
            live = recorded  # another process may have rebuilt it after our lease expired
        if recorded is not None and self._records is not None:
            self._records.delete(self._project_id, recorded)
        if live is not None:
            keys = [*project_keys(self._project_id)[:4], _redis.PROJECT_REBUILD(project_id=self._project_id)]
            held = "" if lease is None else held_as(lease)
            if _redis.script("finishline/remove")(self._client, keys, [held, live]) == "STALE":
                return None
        return recorded is not None or live is not None

    def run_under(self, rebuilder: Rebuilder) -> bool:
        """Delete the project under its lease."""
        existed = None
        while existed is None:
            with rebuilder.lease(self._project_id) as lease:
                assert lease is not None  # it waited
                existed = self.run(lease)
        return existed

    def _live_epoch(self) -> str | None:
        """Return the epoch of the project in Redis: empty if it has none, None if there is no project."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.exists(_redis.PROJECT(project_id=self._project_id))
        pipeline.hget(_redis.PROJECT_META(project_id=self._project_id), "epoch")
        there, epoch = pipeline.execute(raise_on_error=False)
        if isinstance(there, Exception):
            raise there
        return None if not there else epoch if isinstance(epoch, str) else ""
