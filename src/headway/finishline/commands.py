"""Commands of the finish line: one Lua script per call, answered exactly once also after lost replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

from headway import _redis
from headway.errors import InvalidInput, Refused, Unavailable
from headway.finishline.callers import Callers
from headway.finishline.progress import Answer, Outcome, corrupt
from headway.finishline.rebuild import Rebuilder, project_keys
from headway.finishline.server import StateServer
from headway.finishline.store.records import LIFE, Records, no_project
from headway.telemetry import Log, metrics

log = Log("finishline")

T = TypeVar("T")

#: Waiting events above which an alert is raised: no relay runs, or a sink stays away.
EVENTS_ALERT = 100_000
#: Attempts of one call while its project is lost or recreated again each time.
ATTEMPTS = 20

CHANGE = "finishline/change"
COUNT = "finishline/count"


class Recreated(Exception):
    """The project was deleted and created again between the call to SQL and the call to Redis."""


class Commands:
    """Sends scripts, rebuilds projects that Redis lost, and reports a completion to exactly one call.

    ``records`` and ``rebuilder`` are None without a database.
    """

    def __init__(self, server: StateServer, records: Records | None, rebuilder: Rebuilder | None) -> None:
        self._server, self._records, self._rebuilder = server, records, rebuilder
        self._callers = Callers()
        self._many_events = False

    def for_one_project(self, project_id: str, work: Callable[[], T]) -> T:
        """Run ``work``, which writes to SQL and then to Redis; again if the project was recreated in between.

        So both writes reach the same project, never the earlier one in SQL and its successor in Redis.
        """
        for _ in range(ATTEMPTS):
            with suppress(Recreated):
                return work()
        raise Unavailable(f"Project {project_id!r} was deleted and created again during each of {ATTEMPTS} attempts.")

    def send(self, operation: str, script: str, project_id: str, arguments: Sequence[str | int]) -> Answer:
        """Run one script under one identity: a repetition after a lost reply returns the same answer."""
        caller = self._callers.acquire()
        try:
            caller.calls += 1
            by = f"{caller.name}.{caller.calls}"
            call = partial(
                caller.run,
                self._server.client,
                _redis.script(script),
                keys_of(project_id),
                [LIFE, caller.name, caller.calls, *arguments],
            )
            restored, crossed = None, False
            for _ in range(ATTEMPTS):  # Redis may lose the project again right after it was rebuilt
                outcome, done, counted, *epoch = self._server.write(operation, project_id, call)
                if outcome == "BEHIND":
                    crossed = self._catch_up(operation, project_id) or crossed
                    continue
                if outcome != "NOT_FOUND" or self._rebuilder is None:
                    break
                restored = self.restore(operation, project_id, self._server.write, by)
                crossed = crossed or restored is Outcome.COMPLETED
                if restored is None:
                    break
        finally:
            self._callers.release(caller)
        if outcome == "REMADE":
            # If Redis has the older of the two projects, the record replaces it.
            self.restore(operation, project_id, self._server.write)
            raise Recreated
        if outcome == "BEHIND" or (outcome == "NOT_FOUND" and restored is not None):
            raise Unavailable(f"Redis lost project {project_id!r} again each time it was rebuilt.")
        _raise_for(operation, project_id, outcome, int(done))
        if crossed:
            outcome = (
                Outcome.COMPLETED
            )  # our item was the last one in the journal, and rebuilding completed the project
        elif outcome == Outcome.COMPLETED and not self.completed(project_id, by, *epoch):
            # Redis reported the completion to another call before, and lost that since.
            outcome = Outcome.UPDATED if script == CHANGE else Outcome.COUNTED if int(counted) else Outcome.DUPLICATE
        return Answer(Outcome.UPDATED if outcome == "NO_TOTAL" else Outcome(outcome), int(done), int(counted))

    def _catch_up(self, operation: str, project_id: str) -> bool:
        """Send total and status of the record to Redis. Return whether that completed the project.

        Redis is behind SQL between the two writes of a change, and after it came back with an older state.
        """
        assert self._records is not None
        row = self._records.find(project_id)
        if row is None:
            raise no_project(project_id)
        if row.completed_at is not None:
            return self.restore(operation, project_id, self._server.write) is Outcome.COMPLETED
        return self.send(operation, CHANGE, project_id, row.as_change()).completed

    def restore(
        self, operation: str, project_id: str, how: Callable[..., Any], by: str | None = None
    ) -> Outcome | None:
        """Put the project back into Redis by ``how``: `StateServer.read` or `write`. None if SQL does not have it."""
        assert self._rebuilder is not None
        outcome: Outcome | None = how(operation, project_id, partial(self._rebuilder.restore, project_id))
        if outcome is Outcome.COMPLETED and not self.completed(project_id, by):
            return Outcome.COUNTED  # it is DONE, and another call was told so
        return outcome

    def completed(self, project_id: str, by: str | None = None, epoch: str | None = None) -> bool:
        """Record a completion in SQL and check the backlog of events. Return whether the call ``by`` completed it.

        Errors are logged only: the project is complete, and the checkpointer or the relay records it later.
        """
        first = True
        try:
            if self._rebuilder is not None:
                first = by is None or self._rebuilder.claim_completion(project_id, epoch, by)
                self._rebuilder.completed(project_id)
            waiting = int(self._server.client.xlen(_redis.EVENTS()))
            metrics.gauge("headway_events_waiting", waiting)
            many, before = waiting >= EVENTS_ALERT, self._many_events
            self._many_events = many
            if many and not before:
                self._server.alert(
                    f"{waiting:,} events wait in Redis at {_redis.shown_address(self._server.url)}: no relay delivers them",
                    operation="events", count=waiting,
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # the caller must learn of the completion whatever happens here
            log.warning("the completion will be recorded later", project_id=project_id, error=str(error))
        return first


def _raise_for(operation: str, project_id: str, outcome: str, done: int) -> None:
    """Raise the exception for an error outcome."""
    if outcome == "NOT_FOUND":
        raise no_project(project_id)
    if outcome == "CORRUPT":
        raise corrupt(project_id)
    if outcome == "JOURNALED":
        raise Refused(
            f"Project {project_id!r} has a journal. A count that is not in the journal would be lost with Redis.",
            hint="Open the finish line with the same database and journal=True.",
        )
    if outcome == "RECORDED":
        raise Refused(
            f"Project {project_id!r} has its total and status in a database. A change in Redis only would be lost.",
            hint="Open the finish line with the same database.",
        )
    if outcome == "NO_TOTAL" and operation == "finish_crawl":
        raise InvalidInput(
            f"{done:,} items of project {project_id!r} are counted and its total is 0, so it cannot complete.",
            hint=f"Set the number of items: finish_crawl({project_id!r}, total=...), or set_total.",
        )


@lru_cache(maxsize=4096)
def keys_of(project_id: str) -> list[str]:
    """Return the keys of a project's scripts (see `project_keys`), cached."""
    return project_keys(project_id)
