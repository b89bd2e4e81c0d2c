"""`NotificationWatcher`: listens to RQ's registries by keyspace notifications and reports what they show.

Subscribe, then catch up, then listen: what happened before and while it subscribed is found by looking, what happens
later is announced. The link is never mended here. Whatever goes wrong with it (cut, resubscribed by itself, silent)
raises; a supervisor starts the process again, and starting is what catches up.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway._redis.keys import PROBE
from headway.errors import ConfigError, InvalidInput, Unavailable
from headway.events import Event
from headway.telemetry import Log
from headway.watcher.executions import Follower, StartedView
from headway.watcher.logic import ADDITIONS, channel, clean_text, notifies, pattern, split_member
from headway.watcher.ports import GuardProto, Message, PubSubProto, RedisProto, WatcherPorts
from headway.watcher.publisher import EventForm, Publisher
from headway.watcher.registry import QueueContext, RegistryView, judge_canceled, judge_failed
from headway.watcher.store import ProcessedStore

log = Log("watcher")

SETTING = "notify-keyspace-events"

#: Seconds within which the server must confirm a subscription or answer a ping.
REPLY_S = 5.0

#: Seconds a probe's own event may take.
PROBE_S = 2.0

#: Seconds after which a signal to stop is noticed at the latest.
WAIT_S = 0.5

#: Messages taken before the registries are looked at, so that a flood of them cannot keep us from looking.
BATCH = 1_000


@dataclass(frozen=True, slots=True)
class WatcherSettings:
    """What to watch and how to tell it."""

    redis_url: str
    queues: Sequence[str]
    channel: str
    stuck_job_timeout_s: float
    form: EventForm = field(default_factory=EventForm)
    stream: str = ""
    stream_length: int = 100_000
    #: Entries read from a registry, and jobs looked up, at a time.
    page_size: int = 200
    #: The look that nothing asked for; with the pings it keeps an idle watcher within 3 commands a minute.
    sweep_s: float = 600.0
    ping_s: float = 30.0
    #: Added to an execution's lease before its worker is called lost.
    lost_grace_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.queues or not all(self.queues):
            raise InvalidInput("There is no queue to watch.", hint="Name it: RQ__QUEUE=digits")
        if not self.channel:
            raise InvalidInput("There is no channel to publish to.", hint="Name it: DIGITS_EVENTS_CHANNEL=events")
        numbers = {
            "stuck_job_timeout_s": self.stuck_job_timeout_s,
            "page_size": self.page_size,
            "sweep_s": self.sweep_s,
            "ping_s": self.ping_s,
            "stream_length": self.stream_length,
        }
        for name, number in numbers.items():
            if not 0 < number < 1e9:
                raise InvalidInput(f"{name} is {number}; it has to be above 0.")
        if not 2 <= self.page_size <= 10_000:
            raise InvalidInput(f"page_size is {self.page_size}; a window has 2 to 10,000 entries.")
        if not 0 <= self.lost_grace_s < 1e9:
            raise InvalidInput(f"lost_grace_s is {self.lost_grace_s}; it has to be 0 or more.")
        for text in (*self.queues, self.channel, self.stream, self.form.failed, self.form.outcome):
            if clean_text(text) != text:
                raise InvalidInput(
                    f"{clean_text(text)!r} names a queue, a channel, a stream or an event, and is no valid text."
                )


#: Gives the store of one queue, named ``queue@db``.
OpenStore = Callable[[str], ProcessedStore]


class QueueWatch:
    """The three registries of one queue and the executions whose outcome is awaited."""

    def __init__(
        self, context: QueueContext, failed: RegistryView, canceled: RegistryView, started: StartedView
    ) -> None:
        self.context = context
        self.failed = failed
        self.canceled = canceled
        self.started = started
        self._follower = Follower(context, failed, started)
        self._ended: set[str] = set()

    def catch_up(self) -> None:
        for view in (self.failed, self.canceled):
            view.diff()  # the oldest first, as long as scores tell
            view.walk(prune=True)
        self.started.diff()
        self.started.forget()
        self._follower.resolve(list(self.context.follows))
        self.started.check()

    def look(self) -> None:
        """At what was announced, unless that is under way."""
        for view in (self.failed, self.canceled):
            if view.pending and not view.looking:
                view.diff()

    def ended(self, job_id: str) -> None:
        """An execution of this job ended; if it is one we follow, its outcome can be had now."""
        self._ended |= {member for member in self.context.follows if split_member(member)[0] == job_id}

    @property
    def due(self) -> float | None:
        """When there is something to do, by Redis's clock; 0 for at once."""
        if self.failed.pending or self.canceled.pending or self._ended:
            return 0.0
        times = [self.started.due, self.failed.walk_at, self.canceled.walk_at]
        return min((moment for moment in times if moment is not None), default=None)

    def work(self) -> None:
        now = self.context.now()
        self.look()
        for view in (self.failed, self.canceled):
            if view.walk_at is not None and view.walk_at <= now:
                view.walk()
        if self.started.read_at is not None and self.started.read_at <= now:
            self._ended |= self.started.diff()
        self.started.check()
        ended, self._ended = self._ended, set()
        self._follower.resolve(sorted(ended))

    def sweep(self, *, touched: bool, unheard: bool) -> bool:
        """Look although nothing was announced; whether that found something."""
        before = self.failed.reported + self.canceled.reported
        self.failed.sweep(touched=touched, unheard=unheard)
        self.canceled.sweep(touched=touched, unheard=unheard)
        if touched:
            self.started.diff()
            self.started.forget()
        self._follower.resolve(list(self.context.follows))
        return self.failed.reported + self.canceled.reported > before


class _Stopped(Exception):
    """Somebody asked to stop while there was much to do."""


class NotificationWatcher:
    """Watches queues of one Redis database. `open`, then `tick` again and again; `run` does both until told to stop."""

    def __init__(
        self,
        settings: WatcherSettings,
        ports: WatcherPorts,
        open_store: OpenStore,
        append: Callable[[Sequence[Event]], None] = lambda _: None,
    ) -> None:
        """``append`` puts events into the outbox: see `Publisher`."""
        self._settings = settings
        self._append = append
        self._clock = ports.clock
        self._redis = ports.redis(settings.redis_url)
        self._rq = ports.rq()
        self._open_store = open_store
        self._link: PubSubProto | None = None
        self._queues: list[QueueWatch] = []
        self._routes: dict[str, Callable[[str], None]] = {}
        #: Patterns and channels asked for and not confirmed yet. A confirmation nobody waits for means the link was
        #: made anew.
        self._unconfirmed: Counter[str] = Counter()
        #: Jobs whose executions are listened to, and the queues that want to know.
        self._following: dict[str, list[QueueWatch]] = {}
        self._guard: GuardProto | None = None
        #: Something was announced since the last sweep.
        self._heard = False
        self._stop = threading.Event()
        self._offset = 0.0
        self._heard_at = 0.0
        self._pinged_at: float | None = None
        self._swept_at = 0.0

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set. Any error ends it and is raised: there is no second try here."""
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
        self._sync()
        preflight(self._redis, self._clock)
        publisher = Publisher(
            self._redis,
            self._settings.form,
            self._settings.channel,
            stream=self._settings.stream,
            stream_length=self._settings.stream_length,
            append=self._append,
        )
        self._queues = [self._watch(queue, publisher) for queue in dict.fromkeys(self._settings.queues)]
        self._link = self._redis.pubsub()
        patterns = [pattern(self._redis.db, key) for key in self._keys()]
        self._unconfirmed.update(patterns)
        self._link.psubscribe(*patterns)
        self._await_confirmation()
        self._guard = self._redis.guard(self._keys())
        for queue in self._queues:
            queue.catch_up()
        self._follow()
        self._swept_at = self._clock()
        log.info("watching", queue=", ".join(queue.context.queue for queue in self._queues))

    def tick(self) -> None:
        """Wait for a message, or until something is due, half a second at most; then do what there is to do."""
        self._receive(self._rest())
        for queue in self._queues:
            queue.work()
        if self._clock() - self._swept_at >= self._settings.sweep_s:
            self._sweep()
        self._follow()
        self._watchdog()

    def _breathe(self) -> None:
        """Between two windows of anything long: take what was announced and look at it, so that a job that leaves its
        registry soon is not missed meanwhile; see that the link lives; end when that is asked for."""
        if self._stop.is_set():
            raise _Stopped
        self._receive(0.0)
        for queue in self._queues:
            queue.look()
        self._watchdog()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._redis.close()

    @property
    def started(self) -> Mapping[str, StartedView]:
        """By queue, what is known to run."""
        return {queue.context.queue: queue.started for queue in self._queues}

    # ---- time ------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Redis's clock, kept by ours between two looks at it: reading it costs a command."""
        return self._clock() + self._offset

    def _sync(self) -> None:
        self._offset = self._redis.time() - self._clock()

    def _rest(self) -> float:
        dues = [queue.due for queue in self._queues]
        waits = [max(0.0, due - self._now()) for due in dues if due is not None]
        return min([WAIT_S, *waits])

    # ---- the link --------------------------------------------------------------------------------------------------

    def _receive(self, timeout: float) -> None:
        for _ in range(BATCH):
            message = self._linked.get_message(timeout)
            if message is None:
                return
            self._take(message)
            timeout = 0.0

    def _take(self, message: Message) -> None:
        self._heard_at, self._pinged_at = self._clock(), None
        if message.kind == "event":
            self._heard = True
            route = self._routes.get(message.channel)
            if route is not None:
                route(message.name)
        elif message.kind == "subscribed":
            if not self._unconfirmed[message.channel]:
                raise Unavailable(
                    "The link to Redis was cut and mended behind our back: events may be lost.",
                    hint="The supervisor starts the watcher again, which catches up.",
                )
            self._unconfirmed[message.channel] -= 1

    def _await_confirmation(self) -> None:
        deadline = self._clock() + REPLY_S
        while self._unconfirmed.total():
            left = deadline - self._clock()
            if left <= 0:
                raise Unavailable("Redis did not confirm the subscription.")
            message = self._linked.get_message(left)
            if message is not None:
                self._take(message)

    def _watchdog(self) -> None:
        """A link can be dead without saying so: nothing arrives, nothing fails. Only a pong tells it from quiet."""
        now = self._clock()
        if self._pinged_at is not None and now - self._pinged_at > REPLY_S:
            self._receive(0.0)  # we may have been busy for that long ourselves
        if self._pinged_at is not None:
            if now - self._pinged_at > REPLY_S:
                raise Unavailable(
                    f"The link to Redis is dead: no answer to a ping within {REPLY_S:g} s.",
                    hint="The supervisor starts the watcher again, which catches up.",
                )
        elif now - self._heard_at >= self._settings.ping_s:
            self._linked.ping()
            self._pinged_at = now

    @property
    def _linked(self) -> PubSubProto:
        assert self._link is not None, "open() comes first"
        return self._link

    # ---- the queues ------------------------------------------------------------------------------------------------

    def _watch(self, queue: str, publisher: Publisher) -> QueueWatch:
        db = self._redis.db
        store = self._open_store(f"{queue}@{db}")
        context = QueueContext(
            queue=queue,
            redis=self._redis,
            store=store,
            publisher=publisher,
            now=self._now,
            breathe=self._breathe,
            page_size=self._settings.page_size,
            baseline=store.baseline(self._now()),
            payload=bool(self._settings.form.payload_fields),
            # One noted by an earlier release, without a time, is awaited from now on.
            follows={one.member: replace(one, since=one.since or self._now()) for one in store.follows()},
        )
        keys = self._rq.registries(queue)
        failed = RegistryView("failed", keys.failed, context, judge_failed)
        canceled = RegistryView("canceled", keys.canceled, context, judge_canceled)
        started = StartedView(
            keys.started,
            context,
            stuck_timeout=self._settings.stuck_job_timeout_s,
            lost_grace=self._settings.lost_grace_s,
            sync=self._sync,
        )
        self._routes[channel(db, keys.failed)] = failed.hint
        self._routes[channel(db, keys.canceled)] = canceled.hint
        self._routes[channel(db, keys.started)] = started.hint
        return QueueWatch(context, failed, canceled, started)

    def _keys(self) -> list[str]:
        keys = [self._rq.registries(queue.context.queue) for queue in self._queues]
        return [key for one in keys for key in (one.failed, one.canceled, one.started)]

    def _sweep(self) -> None:
        """Look although nothing was announced, and see that it would have been: whoever switches notifications off
        blinds us without a word."""
        assert self._guard is not None, "open() comes first"
        self._swept_at, heard, self._heard = self._clock(), self._heard, False
        touched = not self._guard.untouched()
        found = [queue.sweep(touched=touched, unheard=touched and not heard) for queue in self._queues]
        if any(found):
            log.warning("found what was not announced")
        preflight(self._redis, self._clock)

    def _follow(self) -> None:
        """Listen to the ends of the executions whose outcome is awaited, and no longer to those that have one."""
        wanted: dict[str, list[QueueWatch]] = {}
        for queue in self._queues:
            for job_id in {split_member(member)[0] for member in queue.context.follows}:
                wanted.setdefault(job_id, []).append(queue)
        if wanted == self._following:
            return
        for job_id in sorted(self._following.keys() - wanted.keys()):
            name = channel(self._redis.db, self._rq.executions(job_id))
            del self._routes[name]
            self._linked.unsubscribe(name)
        for job_id, queues in sorted(wanted.items()):
            name, known = channel(self._redis.db, self._rq.executions(job_id)), self._following.get(job_id, [])
            if not known:
                self._unconfirmed[name] += 1
                self._linked.subscribe(name)
            for queue in queues:
                if queue not in known:
                    queue.ended(job_id)  # it may have ended just before we listened
            self._routes[name] = _ender(job_id, queues)
        self._following = wanted


def _ender(job_id: str, queues: Sequence[QueueWatch]) -> Callable[[str], None]:
    def ended(command: str) -> None:
        if command not in ADDITIONS:
            for queue in queues:
                queue.ended(job_id)

    return ended


# ---------------------------------------------------------------------------------------------------------------------
# Before listening


def preflight(redis: RedisProto, clock: Callable[[], float] = time.monotonic) -> None:
    """Make sure the server announces what we listen to. It is never set here: that is the operator's decision."""
    flags = redis.config_get(SETTING)
    if flags is None:  # many managed servers deny CONFIG
        if not probe(redis, clock):
            raise _silent("A probe was not announced")
    elif not notifies(flags):
        raise _silent(f"{SETTING} is '{flags}'")


def probe(redis: RedisProto, clock: Callable[[], float]) -> bool:
    """Whether a change of a sorted set of our own is announced."""
    key = PROBE(token=uuid.uuid4().hex)
    link = redis.pubsub()
    try:
        link.subscribe(channel(redis.db, key))
        deadline = clock() + PROBE_S
        while (left := deadline - clock()) > 0:
            message = link.get_message(left)
            if message is not None and message.kind == "event":
                return True
            if message is not None and message.kind == "subscribed":
                redis.zadd(key, "probe", 1)
        return False
    finally:
        link.close()
        redis.unlink(key)


def _silent(why: str) -> ConfigError:
    return ConfigError(
        f"Redis does not announce changes of sorted sets: {why}.",
        hint=f"Set it on the server: CONFIG SET {SETTING} Kz (and in redis.conf, or it is lost at the next restart).",
    )
