"""Executions under way: which run too long, whose worker is gone, and what became of those that were reported of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from headway.telemetry import Log
from headway.watcher.logic import Report, clean_text, loss, outcome, overrun, sequel, split_member, stuck_after
from headway.watcher.registry import KEEP_S, QueueContext, RegistryView
from headway.watcher.store import Follow, Seen

log = Log("watcher")

#: A started registry is read at most this often: heartbeats touch it all the time, and nothing in it is urgent.
SETTLE_S = 15.0

#: The same while an outcome is awaited: that an execution left may be it, if its own key does not say so.
FOLLOWING_S = 1.0


@dataclass(slots=True)
class Running:
    """One execution in the started registry; times by Redis's clock."""

    created_at: float
    #: Seconds it may take.
    limit: float
    #: Until when its worker vouches for it; every heartbeat moves it.
    lease: float
    #: What was reported of it: nothing, stuck, or lost.
    reported: str

    @property
    def due(self) -> float | None:
        """When there will be something to tell of it, as things stand."""
        if self.reported == "lost":
            return None
        return self.lease if self.reported == "stuck" else min(self.lease, self.created_at + self.limit)


class StartedView:
    """The started registry, kept as a map from ``job_id:execution_id``. It has one entry per busy worker."""

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
        """Something happened to the key; whatever it was, it means *look*."""
        settle = min(FOLLOWING_S, self._settle) if self._context.follows else self._settle
        moment = self._context.now() + settle
        self.read_at = moment if self.read_at is None else min(self.read_at, moment)

    @property
    def due(self) -> float | None:
        """When to look next: because of a hint, or because something may be stuck or lost by then."""
        times = [self.read_at, *(running.due for running in self.running.values())]
        return min((time for time in times if time is not None), default=None)

    def diff(self) -> set[str]:
        """Bring the map up to date; which executions left it. A new one comes with the time RQ noted for it, so that a
        restart of ours changes nothing."""
        self.read_at = None
        found: dict[str, float] = {}
        cursor = -1
        while cursor != 0:
            cursor, page = self._context.redis.zscan(self._key, max(cursor, 0), self._context.page_size)
            found.update(page)
            self._meet([member for member in dict(page) if member not in self.running])
            self._context.breathe()
        left = self.running.keys() - found.keys()
        for member in left:
            del self.running[member]
        for member, score in found.items():
            self.running[member].lease = score + self._lost_grace
        return left

    def lists(self, member: str) -> bool:
        """Whether it is in the registry at this moment."""
        return member in self.running and self._context.redis.zscore(self._key, member) is not None

    def check(self) -> None:
        """Report what is stuck or lost by now. Only then is an execution asked after on its own."""
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

    def _meet(self, members: Sequence[str]) -> None:
        """Executions seen for the first time by this process."""
        if not members:
            return
        reported = self._context.store.look("started", members)
        for member, execution in zip(members, self._context.redis.executions(members), strict=True):
            self.running[member] = Running(
                # Without its record (it expired with the lease) the best we know is that it runs now.
                created_at=execution.created_at if execution.exists else self._context.now(),
                limit=stuck_after(self._stuck_timeout, execution.timeout),
                lease=inf,
                reported=reported[member].seen if member in reported else "",
            )

    def forget(self) -> None:
        """Drop what was reported of executions that left the registry long ago, and keep what is still in it."""
        store, now = self._context.store, self._context.now()
        store.found("started", list(self.running), now)
        while stale := store.stale("started", now - KEEP_S, self._context.page_size):
            store.forget("started", stale)


class Follower:
    """Waits for the outcome of executions that were reported canceled, stuck or lost: they may end otherwise."""

    def __init__(self, context: QueueContext, failed: RegistryView, started: StartedView) -> None:
        self._context = context
        self._failed = failed
        self._started = started

    def resolve(self, members: Iterable[str]) -> None:
        """Report what became of each, unless that is not decided yet or the failed registry shows it."""
        for member in members:
            follow = self._context.follows.get(member)
            if follow is not None:
                self._resolve(follow)
                self._context.breathe()

    def _resolve(self, follow: Follow) -> None:
        job_id, execution_id = split_member(follow.member)
        # In this order: RQ removes the execution and records its outcome at once, so one that is gone has a record.
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
            self._failed.diff()  # it names the earlier event, so it has to come first
        elif kind != follow.kind:
            reports = [
                sequel(record, execution_id, kind, earlier=follow.kind, event=follow.event, now=self._context.now())
            ]
        self._context.publish("started", reports, [], unfollow=[follow.member])
