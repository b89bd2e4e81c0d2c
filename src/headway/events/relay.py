"""The relay: delivers waiting events from every outbox to every sink.

Each pair of an outbox and a sink is a `Route` with its own thread, so a sink that hangs or an outbox that is unreachable
delays no other. A route delivers in order and stops at the first event that the sink does not take; then it backs off, longer
each time. It records a delivery *after* it succeeded: a crash in between repeats the event with the same id, by which a
receiver recognises it. While a whole batch waits, it records deliveries in groups (`NOTE`), and a crash repeats one group.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

from headway._lease import Lease, renewing
from headway._sql import Database
from headway.core.lifecycle import ForkGuard
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, Held, InvalidInput, NotFound, ServerRefused, StaleClaim
from headway.events.envelope import Event
from headway.events.outbox import MANY, Backlog, EventRefused, Outbox
from headway.events.sinks import Sink, wants
from headway.events.store.sql import SqlOutbox
from headway.telemetry import Log, metrics, redact

log = Log("events")

#: Backoff after a sink failed or an outbox was unreachable.
BACKOFF = RetryPolicy(retries=0, base=1.0, cap=60.0, jitter=0.2)

#: Refusals of an event before it is put aside. A receiver may be misconfigured for a moment.
REFUSALS = 5

#: Events in a row that are put aside at their first `EventRefused`. A sink that refuses more is probably misconfigured, so
#: each further event gets `REFUSALS` tries.
ASIDE_IN_A_ROW = 10

#: Seconds within which refusals seen by several relays count as one.
APART = 5.0

#: Events read at a time.
BATCH = 100

#: Seconds between two records of deliveries while a whole batch waits. One write per event would be too slow to catch up.
NOTE = 0.05

#: Deliveries between two calls of `Outbox.tidy`.
TIDY_AFTER = 100

#: Seconds between two measurements of the backlog.
MEASURE = 30.0

#: Seconds that `Relay.close` waits for running deliveries, and again after it aborted them.
GRACE = 1.0


class BacklogMeter:
    """Publishes the backlog of a sink as metrics, and logs a critical message once above `MANY` events."""

    def __init__(self) -> None:
        self._measured = -math.inf
        self._alarmed = False

    def is_due(self, now: float) -> bool:
        """Return whether `MEASURE` seconds have passed since it last returned True."""
        due = now - self._measured >= MEASURE
        if due:
            self._measured = now
        return due

    def publish(self, outbox: str, backlogs: Sequence[Backlog]) -> None:
        """Publish what waits in ``outbox``."""
        for backlog in backlogs:
            labels = {"sink": backlog.sink, "outbox": outbox}
            metrics.gauge("headway_events_waiting", backlog.waiting, **labels)
            metrics.gauge("headway_events_oldest_seconds", backlog.oldest_seconds or 0.0, **labels)
            if backlog.waiting > MANY and not self._alarmed:
                log.critical(
                    "too many events wait for a sink; none is dropped, so the store grows",
                    sink=backlog.sink, count=backlog.waiting, seconds=backlog.oldest_seconds,
                )  # fmt: skip
            self._alarmed = backlog.waiting > MANY


class Route:
    """Delivery from one outbox to one sink. A lock keeps `tick` from running in two threads at once."""

    def __init__(self, outbox: Outbox, sink: Sink, *, rest: float, clock: Callable[[], float]) -> None:
        self.outbox, self.sink = outbox, sink
        self.wake = threading.Event()
        #: Rounds that found no waiting event; read by `Relay.drain`.
        self.idle_rounds = 0
        self._rest, self._clock = rest, clock
        self._turn = threading.Lock()
        self._subscribed = False
        self._failures = 0
        self._refusals: tuple[str, int] = ("", 0)
        self._not_before = 0.0
        self._aside_in_a_row = 0
        self._unnoted: list[str] = []  # delivered and not yet recorded in the outbox
        self._untidy = 0
        self._meter = BacklogMeter()

    def tick(self, limit: int = BATCH, stopping: Callable[[], bool] = lambda: False) -> float:
        """Deliver waiting events. Return the seconds until the next round. Raises when the outbox is unreachable."""
        with self._turn:
            wait = self._not_before - self._clock()
            return wait if wait > 0 else self._serve(limit, stopping)

    def subscribe(self) -> None:
        """Make the outbox keep events for the sink from now on."""
        with self._turn:
            self._subscribe()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Run rounds until ``stopping`` returns True."""
        failures = 0
        while not stopping():
            try:
                delay, failures = self.tick(stopping=stopping), 0
            except Exception as error:  # noqa: BLE001  # the events are safe in the outbox, so every error is retried
                failures += 1
                delay = BACKOFF.delay(failures)
                self._not_before = self._clock() + delay
                log.warning(
                    "waiting events cannot be read; the relay tries again",
                    sink=self.sink.name, attempt=failures, seconds=round(delay, 1), error=describe(error),
                )  # fmt: skip
            self.wake.wait(delay)
            self.wake.clear()

    def _serve(self, limit: int, stopping: Callable[[], bool]) -> float:
        self._subscribe()
        self._note()
        self._measure()
        if not self.outbox.waits(self.sink.name):
            return self._idle()
        try:
            lease = self.outbox.acquire(self.sink.name)
        except Held:
            return self._rest  # another relay serves this sink
        except NotFound:
            self._subscribed = False  # the sink was deleted from the outbox
            return self._rest
        try:
            # One delivery may outlast the lease: a CallableSink has no deadline.
            with renewing(lambda: self.outbox.renew(lease), lease.seconds):
                return self._deliver_all(lease, limit, stopping)
        except StaleClaim:
            return self._rest  # this process was paused for longer than the lease; another relay continues
        finally:
            with suppress(HeadwayError):  # the lease expires by itself
                self.outbox.release(lease)

    def _subscribe(self) -> None:
        if not self._subscribed:
            self.outbox.subscribe(self.sink.name, self.sink.job)
            self._subscribed = True

    def _deliver_all(self, lease: Lease, limit: int, stopping: Callable[[], bool]) -> float:
        waiting = self.outbox.waiting(self.sink.name, limit)
        if not waiting:
            return self._idle()
        renewed = noted = self._clock()
        moment = NOTE if len(waiting) >= BATCH else 0.0
        try:
            for handle, event in waiting:
                if stopping():
                    return self._rest
                if self._clock() - renewed > lease.seconds / 3:
                    self.outbox.renew(lease)  # StaleClaim if another relay has it
                    renewed = self._clock()
                delay = self._deliver(handle, event)
                if delay:
                    return delay
                if self._clock() - noted >= moment:
                    self._note()
                    noted = self._clock()
        finally:
            self._note()  # needs no lease: the sink has taken these events
        self._tidy()
        return 0.0 if len(waiting) >= limit else self._rest

    def _deliver(self, handle: str, event: Event) -> float:
        """Deliver one event. Return the seconds to back off; 0 when the event is settled."""
        if not wants(self.sink, event):
            self._unnoted.append(handle)
            return 0.0
        began = self._clock()
        try:
            self.sink.deliver(event)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C; in another thread only the sink itself can have raised it
            return self._not_taken(handle, event, error)
        self._failures = self._aside_in_a_row = 0
        self._unnoted.append(handle)
        metrics.count("headway_events", sink=self.sink.name)
        metrics.observe("headway_event_seconds", self._clock() - began, sink=self.sink.name)
        return 0.0

    def _not_taken(self, handle: str, event: Event, error: BaseException) -> float:
        name = self.sink.name
        metrics.count("headway_event_failures", sink=name)
        if isinstance(error, ServerRefused):
            at_once = isinstance(error, EventRefused) and self._aside_in_a_row < ASIDE_IN_A_ROW
            times = 1 if at_once else self._count_refusal(handle)
            if at_once or times >= REFUSALS:
                self.outbox.put_aside(name, handle, describe(error))
                self._failures = 0
                self._aside_in_a_row += 1
                metrics.count("headway_events_refused", sink=name)
                log.error(
                    "a sink refuses an event for good; the event is put aside (see headway relay --poison list)",
                    sink=name, eventID=event.id, job=event.job, attempt=times, error=describe(error),
                )  # fmt: skip
                return 0.0
        self._failures += 1
        delay = BACKOFF.delay(self._failures)
        self._not_before = self._clock() + delay
        log.warning(
            "a sink did not take an event; the relay tries again",
            sink=name, eventID=event.id, attempt=self._failures, seconds=round(delay, 1), error=describe(error),
        )  # fmt: skip
        return delay

    def _count_refusal(self, handle: str) -> int:
        """Count this refusal and return how often the sink refused the event, over all relays."""
        seen = self._refusals[1] if self._refusals[0] == handle else 0
        try:
            times = self.outbox.count_refusal(self.sink.name, handle, seen=seen, apart=APART)
        except HeadwayError:
            times = seen + 1  # the store is unreachable or full: count only this relay's tries
        self._refusals = (handle, times)
        return times

    def _note(self) -> None:
        """Record deliveries in the outbox. If it is unreachable, they are recorded in a later round, before any delivery."""
        if self._unnoted:
            self.outbox.delivered(self.sink.name, self._unnoted)
            self._untidy += len(self._unnoted)
            self._unnoted = []

    def _idle(self) -> float:
        self.idle_rounds += 1
        self._tidy()
        return self._rest

    def _tidy(self) -> None:
        if self._untidy >= TIDY_AFTER:
            self._untidy = 0
            self.outbox.tidy(self.sink.name)

    def _measure(self) -> None:
        if not self._meter.is_due(self._clock()):
            return
        known = self.outbox.backlog(self.sink.name)
        if not known:
            # The store was wiped or restored, or the sink was deleted: without a subscription no event would wait for it.
            self._subscribed = False
        self._meter.publish(self.outbox.name, known)


class Relay:
    """Delivers from every outbox to every sink.

    `run` blocks until a stop event is set, `start` and `close` run it in the background, `drain` delivers what waits now and
    `tick` does one round in this thread. A relay cannot be used in a forked child.
    """

    def __init__(
        self,
        outboxes: Outbox | Sequence[Outbox],
        sinks: Sequence[Sink],
        *,
        rest: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [sink.name for sink in sinks]
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(
                    f"Two sinks have the name {name!r}.",
                    hint="Give each sink a name of its own.",
                )
        self.sinks = list(sinks)
        self.outboxes = list(outboxes) if isinstance(outboxes, Sequence) else [outboxes]
        self._routes = [Route(outbox, sink, rest=rest, clock=clock) for outbox in self.outboxes for sink in sinks]
        self._guard = ForkGuard("The relay")
        self._lock = threading.Lock()
        self._halt = threading.Event()
        self._stop: threading.Event | None = None
        self._started = False
        self._threads: list[threading.Thread] = []

    @property
    def running(self) -> bool:
        """Whether the threads of this relay run in this process."""
        return not self._guard.crossed and any(thread.is_alive() for thread in self._threads)

    def tick(self, *, limit: int = BATCH) -> float:
        """Do one round per route, one after another. An unreachable outbox raises after the other routes had theirs."""
        self._guard.check()
        delays, trouble = [], None
        for route in self._routes:
            try:
                delays.append(route.tick(limit))
            except HeadwayError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble
        return min(delays, default=1.0)

    def run(self, stop: threading.Event) -> None:
        """Deliver until ``stop`` is set."""
        self.start(stop)
        try:
            stop.wait()
        finally:
            self.close()

    def start(self, stop: threading.Event | None = None) -> Self:
        """Deliver in background threads until `close`, or until ``stop`` is set."""
        self._guard.check()
        with self._lock:
            if self._started:
                raise HeadwayError("The relay is running already.")
            self._started = True
            self._halt.clear()
            self._stop = stop
            self._threads = [
                threading.Thread(target=route.run, args=(self._stopping,), name=f"headway-relay-{number}", daemon=True)
                for number, route in enumerate(self._routes)
            ]
            for thread in self._threads:
                thread.start()
        return self

    def subscribe(self) -> None:
        """Make every outbox keep events for the sinks from now on.

        Without it a new sink subscribes in its first round, and misses events appended earlier that happened more than
        `HISTORY` seconds ago.
        """
        self._guard.check()
        for route in self._routes:
            route.subscribe()

    def drain(self, seconds: float) -> bool:
        """Deliver all waiting events, for at most ``seconds``. Return whether none is left."""
        self._guard.check()
        if not self._started:
            with self.start():
                return self.drain(seconds)
        deadline = time.monotonic() + seconds
        # A round that runs now may have read the outbox before this call, so wait for the end of the next one.
        wanted = {route: route.idle_rounds + 2 for route in self._routes}
        while left := [route for route, rounds in wanted.items() if route.idle_rounds < rounds]:
            if time.monotonic() >= deadline or self._stopping():
                return False
            for route in left:
                route.wake.set()
            self._halt.wait(min(0.02, max(0.0, deadline - time.monotonic())))
        return True

    def drain_here(self, seconds: float, stop: threading.Event | None = None) -> bool:
        """Drain in this thread, for sinks that call functions of the program. Calls are never aborted."""
        pause, deadline = stop or threading.Event(), time.monotonic() + seconds
        while True:
            delay = self.tick()
            if not any(route.outbox.waits(route.sink.name) for route in self._routes):
                return True
            left = deadline - time.monotonic()
            if left <= 0 or pause.wait(min(delay, left)):
                return False

    def close(self, grace: float = GRACE) -> bool:
        """Stop the threads. Return whether all have ended.

        Running deliveries get ``grace`` seconds, then they are aborted and get as long again. A function of the program that
        still runs afterwards is left alone; its daemon thread ends with the process.
        """
        if self._guard.crossed:
            return True  # the threads belong to the parent process
        with self._lock:
            threads, self._threads, self._started = self._threads, [], False
            self._halt.set()
            for route in self._routes:
                route.wake.set()
        _join(threads, grace)
        alive = [thread for thread in threads if thread.is_alive()]
        if alive:
            for sink in self.sinks:
                sink.close()
            _join(alive, grace)
        hanging = sum(thread.is_alive() for thread in alive)
        if hanging:
            log.warning("the relay stopped during deliveries; those events are delivered again later", count=hanging)
        return not hanging

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stopping(self) -> bool:
        return self._halt.is_set() or (self._stop is not None and self._stop.is_set())


@contextmanager
def start(
    *,
    database: Database | None = None,
    redis: Outbox | None = None,
    sinks: Sequence[Sink],
    stop: threading.Event | None = None,
    rest: float = 1.0,
) -> Iterator[Relay]:
    """Run a relay in the background until the block ends or ``stop`` is set.

    It delivers to ``sinks`` from the database and from the outbox ``redis``. Start it after the process has forked.
    """
    outboxes: list[Outbox] = [] if database is None else [SqlOutbox(database)]
    if redis is not None:
        outboxes.append(redis)
    with Relay(outboxes, sinks, rest=rest).start(stop) as relay:
        yield relay


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def describe(error: BaseException) -> str:
    """Return the redacted message of an error, or its type if it has none. A sink may raise anything."""
    try:
        return redact(str(error)) or type(error).__name__
    except Exception:  # noqa: BLE001  # __str__ may raise anything
        return type(error).__name__
