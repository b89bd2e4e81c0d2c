"""`NotificationWatcher`: reports what keyspace notifications of RQ's registries announce.

It subscribes, catches up, then listens. What happened before and during the subscription is found by reading the
registries; what happens later is announced. Any error of the connection ends the watcher. A supervisor restarts the
process, which catches up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.errors import InvalidInput
from headway.events import Event
from headway.telemetry import Log
from headway.watcher.executions import OutcomeTracker, StartedView
from headway.watcher.link import RegistryConnection, Route, preflight
from headway.watcher.ports import GuardProto, RedisProto, WatcherPorts
from headway.watcher.publisher import EventForm, Publisher
from headway.watcher.registry import RegistryView
from headway.watcher.reports import ADDITIONS, channel, clean_text, pattern, split_member
from headway.watcher.store.contract import ProcessedStore
from headway.watcher.verdicts import QueueContext, judge_canceled, judge_failed

log = Log("watcher")

#: Maximum wait for a message, in seconds. A stop is noticed within this time.
WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class WatcherSettings:
    """What to watch, and where and how to publish."""

    redis_url: str
    queues: Sequence[str]
    channel: str
    stuck_job_timeout_s: float
    form: EventForm = field(default_factory=EventForm)
    stream: str = ""
    stream_length: int = 100_000
    #: Entries of a registry, and jobs, per read.
    page_size: int = 200
    #: Seconds between two reads that nothing announced. With the pings an idle watcher sends up to 3 commands a minute.
    sweep_s: float = 600.0
    ping_s: float = 30.0
    #: Seconds after the end of an execution's lease before its worker is reported lost.
    lost_grace_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.queues or not all(self.queues):
            raise InvalidInput("There is no queue to watch.", hint="Name it: RQ__QUEUE=digits")
        if not self.channel:
            raise InvalidInput("There is no channel to publish to.", hint="Name it: DIGITS_EVENTS_CHANNEL=events")
        for name in ("stuck_job_timeout_s", "page_size", "sweep_s", "ping_s", "stream_length"):
            if not 0 < getattr(self, name) < 1e9:
                raise InvalidInput(f"{name} must be above 0 (got {getattr(self, name)}).")
        if not 2 <= self.page_size <= 10_000:
            raise InvalidInput(f"page_size must be between 2 and 10,000 (got {self.page_size}).")
        if not 0 <= self.lost_grace_s < 1e9:
            raise InvalidInput(f"lost_grace_s must be 0 or more (got {self.lost_grace_s}).")
        for text in (*self.queues, self.channel, self.stream, self.form.failed, self.form.outcome):
            if clean_text(text) != text:
                raise InvalidInput(
                    f"{clean_text(text)!r} is not a valid name of a queue, channel, stream or event.",
                    hint="Use valid Unicode without NUL, at most 1,000 characters.",
                )


#: Opens the store of one queue, named ``queue@db``.
OpenStore = Callable[[str], ProcessedStore]


class RedisClock:
    """Redis's clock, extrapolated by the local one between two reads: a read takes a command."""

    def __init__(self, redis: RedisProto, clock: Callable[[], float]) -> None:
        self._redis = redis
        self._clock = clock
        self._offset = 0.0

    def now(self) -> float:
        """Return the time, in seconds since 1970."""
        return self._clock() + self._offset

    def sync(self) -> None:
        """Read Redis's clock."""
        self._offset = self._redis.time() - self._clock()


class QueueWatch:
    """The three registries of one queue, and the executions whose outcome is awaited."""

    def __init__(
        self, context: QueueContext, failed: RegistryView, canceled: RegistryView, started: StartedView
    ) -> None:
        self.context = context
        self.failed = failed
        self.canceled = canceled
        self.started = started
        self._outcomes = OutcomeTracker(context, failed, started)
        self._ended: set[str] = set()

    def catch_up(self) -> None:
        """Read everything once, after the start."""
        for view in (self.failed, self.canceled):
            view.diff()  # in order of the scores, oldest first
            view.walk(prune=True)
        self.started.diff()
        self.started.forget()
        self._outcomes.resolve(list(self.context.follows))
        self.started.check()

    def read_announced(self) -> None:
        """Read the registries that announced an addition, unless a read is running."""
        for view in (self.failed, self.canceled):
            if view.pending and not view.reading:
                view.diff()

    def ended(self, job_id: str) -> None:
        """Note that an execution of this job ended. If its outcome is awaited, it can be resolved now."""
        self._ended |= {member for member in self.context.follows if split_member(member)[0] == job_id}

    @property
    def due(self) -> float | None:
        """The time by Redis's clock at which there is work to do; 0 for at once, None for never."""
        if self.failed.pending or self.canceled.pending or self._ended:
            return 0.0
        times = [self.started.due, self.failed.walk_at, self.canceled.walk_at]
        return min((moment for moment in times if moment is not None), default=None)

    def work(self) -> None:
        """Do what is due."""
        now = self.context.now()
        self.read_announced()
        for view in (self.failed, self.canceled):
            if view.walk_at is not None and view.walk_at <= now:
                view.walk()
        if self.started.read_at is not None and self.started.read_at <= now:
            self._ended |= self.started.diff()
        self.started.check()
        ended, self._ended = self._ended, set()
        self._outcomes.resolve(sorted(ended))

    def sweep(self, *, touched: bool, unheard: bool) -> bool:
        """Read the registries although nothing was announced. Return whether that reported something."""
        before = self.failed.reported + self.canceled.reported
        self.failed.sweep(touched=touched, unheard=unheard)
        self.canceled.sweep(touched=touched, unheard=unheard)
        if touched:
            self.started.diff()
            self.started.forget()
        self._outcomes.resolve(list(self.context.follows))
        return self.failed.reported + self.canceled.reported > before


class _Stopped(Exception):
    """Ends a long read because the watcher was asked to stop."""


class NotificationWatcher:
    """Watches queues of one Redis database. Call `open`, then `tick` repeatedly; `run` does both until it is stopped."""

    def __init__(
        self,
        settings: WatcherSettings,
        ports: WatcherPorts,
        open_store: OpenStore,
        append: Callable[[Sequence[Event]], None] = lambda _: None,
    ) -> None:
        """``append`` writes events to the outbox: see `Publisher`."""
        self._settings = settings
        self._append = append
        self._clock = ports.clock
        self._redis = ports.redis(settings.redis_url)
        self._redis_clock = RedisClock(self._redis, ports.clock)
        self._rq = ports.rq()
        self._open_store = open_store
        self._opened_link: RegistryConnection | None = None
        self._queues: list[QueueWatch] = []
        #: The queues that await an execution of each job.
        self._following: dict[str, list[QueueWatch]] = {}
        self._guard: GuardProto | None = None
        self._stop = threading.Event()
        self._swept_at = 0.0

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set. Raises the first error: the caller restarts the process."""
        self._stop = stop
        try:
            self.open()
            while not stop.is_set():
                self.tick()
        except _Stopped:
            pass
        finally:
            self.close()

    def open(self) -> None:
        """Check the server, subscribe, and report what happened before."""
        self._redis_clock.sync()
        preflight(self._redis, self._clock)
        publisher = Publisher(
            self._redis,
            self._settings.form,
            self._settings.channel,
            stream=self._settings.stream,
            stream_length=self._settings.stream_length,
            append=self._append,
        )
        routes: dict[str, Route] = {}
        self._queues = [self._watch(queue, publisher, routes) for queue in dict.fromkeys(self._settings.queues)]
        link = RegistryConnection(self._redis.pubsub(), routes, clock=self._clock, ping_s=self._settings.ping_s)
        self._opened_link = link
        link.subscribe_patterns([pattern(self._redis.db, key) for key in self._keys()])
        self._guard = self._redis.guard(self._keys())
        for queue in self._queues:
            queue.catch_up()
        self._follow()
        self._swept_at = self._clock()
        log.info("watching", queue=", ".join(queue.context.queue for queue in self._queues))

    def tick(self) -> None:
        """Wait for a message or until something is due, at most half a second, then do what is due."""
        self._link.receive(self._wait_s())
        for queue in self._queues:
            queue.work()
        if self._clock() - self._swept_at >= self._settings.sweep_s:
            self._sweep()
        self._follow()
        self._link.check_alive()

    def _breathe(self) -> None:
        """Receive and read announcements between two pages of a long read. Raises `_Stopped` when stopped.

        So a job that leaves its registry soon is still seen, and a dead connection is detected.
        """
        if self._stop.is_set():
            raise _Stopped
        self._link.receive(0.0)
        for queue in self._queues:
            queue.read_announced()
        self._link.check_alive()

    def close(self) -> None:
        """Close the connections."""
        if self._opened_link is not None:
            self._opened_link.close()
            self._opened_link = None
        self._redis.close()

    @property
    def started(self) -> Mapping[str, StartedView]:
        """The running executions, by queue."""
        return {queue.context.queue: queue.started for queue in self._queues}

    @property
    def _link(self) -> RegistryConnection:
        assert self._opened_link is not None, "open() comes first"
        return self._opened_link

    def _wait_s(self) -> float:
        dues = [queue.due for queue in self._queues]
        waits = [max(0.0, due - self._redis_clock.now()) for due in dues if due is not None]
        return min([WAIT_S, *waits])

    def _watch(self, queue: str, publisher: Publisher, routes: dict[str, Route]) -> QueueWatch:
        db, now = self._redis.db, self._redis_clock.now
        store = self._open_store(f"{queue}@{db}")
        context = QueueContext(
            queue=queue,
            redis=self._redis,
            store=store,
            publisher=publisher,
            now=now,
            breathe=self._breathe,
            page_size=self._settings.page_size,
            baseline=store.baseline(now()),
            payload=bool(self._settings.form.payload_fields),
            # A row of an earlier release has no time: its outcome is awaited from now on.
            follows={one.member: replace(one, since=one.since or now()) for one in store.follows()},
        )
        keys = self._rq.registries(queue)
        failed = RegistryView("failed", keys.failed, context, judge_failed)
        canceled = RegistryView("canceled", keys.canceled, context, judge_canceled)
        started = StartedView(
            keys.started,
            context,
            stuck_timeout=self._settings.stuck_job_timeout_s,
            lost_grace=self._settings.lost_grace_s,
            sync=self._redis_clock.sync,
        )
        routes[channel(db, keys.failed)] = failed.hint
        routes[channel(db, keys.canceled)] = canceled.hint
        routes[channel(db, keys.started)] = started.hint
        return QueueWatch(context, failed, canceled, started)

    def _keys(self) -> list[str]:
        keys = [self._rq.registries(queue.context.queue) for queue in self._queues]
        return [key for one in keys for key in (one.failed, one.canceled, one.started)]

    def _sweep(self) -> None:
        """Read what was not announced, and check that Redis still announces: the setting may change at any time."""
        assert self._guard is not None, "open() comes first"
        self._swept_at, announced = self._clock(), self._link.take_announced()
        touched = not self._guard.untouched()
        found = [queue.sweep(touched=touched, unheard=touched and not announced) for queue in self._queues]
        if any(found):
            log.warning("a sweep found changes that were not announced")
        preflight(self._redis, self._clock)

    def _follow(self) -> None:
        """Subscribe to the executions of the jobs whose outcome is awaited, and unsubscribe from the others."""
        wanted: dict[str, list[QueueWatch]] = {}
        for queue in self._queues:
            for job_id in {split_member(member)[0] for member in queue.context.follows}:
                wanted.setdefault(job_id, []).append(queue)
        if wanted == self._following:
            return
        for job_id in sorted(self._following.keys() - wanted.keys()):
            self._link.unsubscribe(channel(self._redis.db, self._rq.executions(job_id)))
        for job_id, queues in sorted(wanted.items()):
            name, known = channel(self._redis.db, self._rq.executions(job_id)), self._following.get(job_id, [])
            if not known:
                self._link.subscribe(name)
            for queue in queues:
                if queue not in known:
                    queue.ended(job_id)  # it may have ended just before the subscription
            self._link.route(name, _ended_route(job_id, queues))
        self._following = wanted


def _ended_route(job_id: str, queues: Sequence[QueueWatch]) -> Route:
    """Return a route that marks the job's executions as ended when one was removed."""

    def ended(command: str) -> None:
        if command not in ADDITIONS:
            for queue in queues:
                queue.ended(job_id)

    return ended
