"""`StartedView` finds stuck and lost executions. `OutcomeTracker` reports the outcome of executions reported earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from headway.telemetry import Log
from headway.watcher.registry import KEEP_S, RegistryView
from headway.watcher.reports import Report, clean_text, loss, outcome, overrun, sequel, split_member, stuck_after
from headway.watcher.store.contract import Follow, Seen
from headway.watcher.verdicts import QueueContext

log = Log("watcher")

#: Minimum seconds between two reads of a started registry. Heartbeats change it all the time, and nothing in it is urgent.
SETTLE_S = 15.0

#: The same while an outcome is awaited: an execution that left the registry may have it.
FOLLOWING_S = 1.0


@dataclass(slots=True)
class Running:
    """An execution in the started registry. Times are Redis's."""

    created_at: float
    #: Seconds it may run.
    limit: float
    #: When its lease expires. Every heartbeat extends it.
    lease: float
    #: What was reported about it: nothing, ``stuck`` or ``lost``.
    reported: str

    @property
    def due(self) -> float | None:
        """When it will be stuck or lost unless something changes, or None."""
        if self.reported == "lost":
            return None
        return self.lease if self.reported == "stuck" else min(self.lease, self.created_at + self.limit)


class StartedView:
    """A copy of the started registry, by ``job_id:execution_id``. It has one entry per busy worker."""

    def __init__(
        self, key: str, context: QueueContext, *, stuck_timeout: float, lost_grace: float, sync: Callable[[], None]
    ) -> None:
        self._key = key
        self._context = context
        self._stuck_timeout = stuck_timeout
        self._lost_grace = lost_grace
        self._sync = sync
        self._settle = min(SETTLE_S, stuck_timeout / 4)
        self.running: dict[str, Running] = {}
        self.read_at: float | None = None

    def hint(self, command: str) -> None:
        """Schedule a read of the registry after a command changed it."""
        settle = min(FOLLOWING_S, self._settle) if self._context.follows else self._settle
        moment = self._context.now() + settle
        self.read_at = moment if self.read_at is None else min(self.read_at, moment)

    @property
    def due(self) -> float | None:
        """When to read or check next, or None: after a hint, or when an execution may be stuck or lost."""
        times = [self.read_at, *(running.due for running in self.running.values())]
        return min((time for time in times if time is not None), default=None)

    def diff(self) -> set[str]:
        """Read the registry. Return the executions that left it.

        The start time of a new execution is RQ's, so a restart of the watcher changes nothing.
        """
        self.read_at = None
        found: dict[str, float] = {}
        cursor = -1
        while cursor != 0:
            cursor, page = self._context.redis.zscan(self._key, max(cursor, 0), self._context.page_size)
            found.update(page)
            self._add([member for member in dict(page) if member not in self.running])
            self._context.breathe()
        left = self.running.keys() - found.keys()
        for member in left:
            del self.running[member]
        for member, score in found.items():
            self.running[member].lease = score + self._lost_grace
        return left

    def lists(self, member: str) -> bool:
        """Return whether the execution is in the registry at this moment."""
        return member in self.running and self._context.redis.zscore(self._key, member) is not None

    def check(self) -> None:
        """Report executions that are stuck or lost by now. Only those are read one by one."""
        now = self._context.now()
        overdue = [member for member, running in self.running.items() if running.due is not None and running.due <= now]
        if overdue:
            self._sync()
            for member in overdue:
                self._check(member, self.running[member], self._context.now())

    def _check(self, member: str, running: Running, now: float) -> None:
        if running.lease <= now:
            score = self._context.redis.zscore(self._key, member)
            if score is None:
                del self.running[member]
                return
            running.lease = score + self._lost_grace
            if running.lease <= now:
                self._report(member, running, "lost")
                return
        if running.reported == "" and running.created_at + running.limit <= now:
            if self._context.redis.zrank(self._key, member) is None:
                del self.running[member]
            else:
                self._report(member, running, "stuck")

    def _report(self, member: str, running: Running, kind: Literal["stuck", "lost"]) -> None:
        job_id, execution_id = split_member(member)
        record, now = (
            self._context.redis.jobs([job_id], running=True, payload=self._context.payload)[0],
            self._context.now(),
        )
        if kind == "lost":
            report = loss(record, execution_id, running.created_at, now)
        else:
            report = overrun(record, execution_id, running.created_at, running.limit, now)
        earlier = self._context.follows.get(member)
        report = replace(report, follows=earlier.event) if earlier else report
        follow = self._context.follow(member, kind, report)
        self._context.publish("started", [report], [Seen(member, running.lease, kind, now)], [follow])
        running.reported = kind

    def _add(self, members: Sequence[str]) -> None:
        """Add executions that are new to this process."""
        if not members:
            return
        reported = self._context.store.look("started", members)
        for member, execution in zip(members, self._context.redis.executions(members), strict=True):
            self.running[member] = Running(
                # Its record may have expired with the lease. Then it is known only that it runs now.
                created_at=execution.created_at if execution.exists else self._context.now(),
                limit=stuck_after(self._stuck_timeout, execution.timeout),
                lease=inf,
                reported=reported[member].seen if member in reported else "",
            )

    def forget(self) -> None:
        """Forget the reports of executions that left the registry long ago."""
        store, now = self._context.store, self._context.now()
        store.found("started", list(self.running), now)
        while stale := store.stale("started", now - KEEP_S, self._context.page_size):
            store.forget("started", stale)


class OutcomeTracker:
    """Reports the outcome of executions that were reported canceled, stuck or lost: they may still end otherwise."""

    def __init__(self, context: QueueContext, failed: RegistryView, started: StartedView) -> None:
        self._context = context
        self._failed = failed
        self._started = started

    def resolve(self, members: Iterable[str]) -> None:
        """Report the outcome of each execution, unless it is still open or the failed registry reports it."""
        for member in members:
            follow = self._context.follows.get(member)
            if follow is not None:
                self._resolve(follow)
                self._context.breathe()

    def _resolve(self, follow: Follow) -> None:
        job_id, execution_id = split_member(follow.member)
        # In this order: RQ removes the execution and records its outcome in one transaction.
        exists = self._context.redis.executions([follow.member])[0].exists
        record = self._context.redis.jobs([job_id], running=True, payload=self._context.payload)[0]
        kind = outcome(
            record,
            execution_id,
            execution_exists=exists,
            listed=self._started.lists(follow.member),
            lost=follow.kind == "lost",
        )
        reports: list[Report] = []
        if kind == "open":
            return
        if kind == "abandoned":
            if self._context.now() - follow.since < KEEP_S:
                return
            log.info("the outcome of a lost execution is no longer awaited", job=clean_text(job_id))
        elif kind == "reported":
            self._failed.diff()  # before the row is deleted, because the report refers to its event
        elif kind != follow.kind:
            reports = [
                sequel(record, execution_id, kind, earlier=follow.kind, event=follow.event, now=self._context.now())
            ]
        self._context.publish("started", reports, [], unfollow=[follow.member])
