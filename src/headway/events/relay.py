"""The relay: takes waiting events from every outbox to every sink.

Each pair of an outbox and a sink is a `Route` with a thread of its own, so that a sink that hangs, drips or is down, or
an outbox that is out of reach, keeps nobody else waiting. A route delivers in order, up to the first event that is not
taken; then it leaves its sink alone for a while, longer each time. It notes a delivery *after* it succeeded: a crash in
between repeats it with the same event id, by which a receiver recognises it. Where a whole batch waits, it notes the
deliveries of a moment together (`NOTE`), and a crash repeats those.
"""

from __future__ import annotations

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
from headway.events.outbox import MANY, EventRefused, Outbox
from headway.events.sinks import Sink, wants
from headway.events.sql import SqlOutbox
from headway.telemetry import Log, metrics, redact

log = Log("events")

#: How long a sink that failed, or an outbox out of reach, is left alone.
BACKOFF = RetryPolicy(retries=0, base=1.0, cap=60.0, jitter=0.2)

#: Tries of an event that its sink refuses for good before it is put aside: a receiver may be deployed wrongly for a moment.
REFUSALS = 5

#: Events that a sink may refuse in a row and have put aside at once. One that refuses more is deployed wrongly, it seems, and
#: each of the following gets its `REFUSALS` tries.
ASIDE_IN_A_ROW = 10

#: Seconds after which a refusal counts that another relay met: many relays refused at one moment are one try.
APART = 5.0

#: Events read at a time.
BATCH = 100

#: Seconds within which a delivery is noted where many wait: one write for many events, or the sink would never catch up.
NOTE = 0.05

#: Deliveries after which an outbox is asked to make the next looks cheap again.
TIDY_AFTER = 100

#: Seconds between two looks at how far a sink is behind.
MEASURE = 30.0

#: Seconds a stop waits for a delivery under way, and again for one that was told to end.
GRACE = 1.0


class Route:
    """One outbox to one sink. `tick` is one round; it is never run by two threads at once."""

    def __init__(self, outbox: Outbox, sink: Sink, *, rest: float, clock: Callable[[], float]) -> None:
        self.outbox, self.sink = outbox, sink
        self.wake = threading.Event()
        #: Rounds that found nothing waiting, for `Relay.drain`.
        self.idle_rounds = 0
        self._rest, self._clock = rest, clock
        self._turn = threading.Lock()
        self._subscribed = False
        self._failures = 0
        self._refusals: tuple[str, int] = ("", 0)
        self._not_before = 0.0
        self._aside_in_a_row = 0
        self._unnoted: list[str] = []  # delivered, and the outbox could not be told so yet
        self._untidy = 0
        self._measured = -MEASURE
        self._alarmed = False

    def tick(self, limit: int = BATCH, stopping: Callable[[], bool] = lambda: False) -> float:
        """Deliver what waits; how long to rest. Raises when the outbox is out of reach."""
        with self._turn:
            wait = self._not_before - self._clock()
            return wait if wait > 0 else self._serve(limit, stopping)

    def subscribe(self) -> None:
        """Have the outbox keep events for the sink; what is decided from here on is its own."""
        with self._turn:
            self._subscribe()

    def run(self, stopping: Callable[[], bool]) -> None:
        failures = 0
        while not stopping():
            try:
                delay, failures = self.tick(stopping=stopping), 0
            except Exception as error:  # noqa: BLE001  # whatever it was, the events are safe in the outbox
                failures += 1
                delay = BACKOFF.delay(failures)
                self._not_before = self._clock() + delay
                log.warning(
                    "waiting events cannot be read; it is tried again",
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
            return self._rest  # another relay serves this sink just now
        except NotFound:
            self._subscribed = False  # somebody made the outbox forget this sink
            return self._rest
        try:
            # A delivery may take longer than the lease: nobody can end a function of the program.
            with renewing(lambda: self.outbox.renew(lease), lease.seconds):
                return self._deliver_all(lease, limit, stopping)
        except StaleClaim:
            return self._rest  # we were paused for longer than the lease: another relay goes on
        finally:
            with suppress(HeadwayError):  # it ends by itself
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
                    self.outbox.renew(lease)  # or learn that somebody else has it
                    renewed = self._clock()
                delay = self._deliver(handle, event)
                if delay:
                    return delay
                if self._clock() - noted >= moment:
                    self._note()
                    noted = self._clock()
        finally:
            self._note()  # true whatever became of the lease
        self._tidy()
        return 0.0 if len(waiting) >= limit else self._rest

    def _deliver(self, handle: str, event: Event) -> float:
        """How long to leave the sink alone; 0 when this event is settled."""
        if not wants(self.sink, event):
            self._unnoted.append(handle)
            return 0.0
        began = self._clock()
        try:
            self.sink.deliver(event)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C is meant for us; in a thread of ours it can only be the sink's own
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
                    "a sink refuses an event for good; it is put aside (see headway relay --poison list)",
                    sink=name, eventID=event.id, job=event.job, attempt=times, error=describe(error),
                )  # fmt: skip
                return 0.0
        self._failures += 1
        delay = BACKOFF.delay(self._failures)
        self._not_before = self._clock() + delay
        log.warning(
            "a sink did not take an event; it is tried again",
            sink=name, eventID=event.id, attempt=self._failures, seconds=round(delay, 1), error=describe(error),
        )  # fmt: skip
        return delay

    def _count_refusal(self, handle: str) -> int:
        """How often the sink has refused this event by now, whichever relay tried."""
        seen = self._refusals[1] if self._refusals[0] == handle else 0
        try:
            times = self.outbox.count_refusal(self.sink.name, handle, seen=seen, apart=APART)
        except HeadwayError:
            times = seen + 1  # the store is away or full: this relay's own tries decide
        self._refusals = (handle, times)
        return times

    def _note(self) -> None:
        """Tell the outbox what was delivered. One that is away now is told later: by then nothing was delivered twice."""
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
        """Say how far the sink is behind. Nothing is ever dropped for being too much: it is said."""
        if self._clock() - self._measured < MEASURE:
            return
        self._measured = self._clock()
        known = self.outbox.backlog(self.sink.name)
        if not known:
            # The store was wiped, put back to before the sink was seen, or told to forget it: nothing would wait for it.
            self._subscribed = False
        for backlog in known:
            labels = {"sink": backlog.sink, "outbox": self.outbox.name}
            metrics.gauge("headway_events_waiting", backlog.waiting, **labels)
            metrics.gauge("headway_events_oldest_seconds", backlog.oldest_seconds or 0.0, **labels)
            if backlog.waiting > MANY and not self._alarmed:
                log.critical(
                    "too many events wait for a sink; none is dropped, and the store grows",
                    sink=backlog.sink, count=backlog.waiting, seconds=backlog.oldest_seconds,
                )  # fmt: skip
            self._alarmed = backlog.waiting > MANY


class Relay:
    """Serves every sink from every outbox: `run` until a stop, `start` and `close` in the background, `drain` what waits,
    or `tick` one round in this thread. In a forked child it is not running, and says so."""

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
                raise InvalidInput(f"Two sinks are called {name!r}.", hint="Deliveries are noted by name: use two.")
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
        """Whether its threads run, in this process."""
        return not self._guard.crossed and any(thread.is_alive() for thread in self._threads)

    def tick(self, *, limit: int = BATCH) -> float:
        """One round for every route, one after another; an outbox out of reach is raised after the others had theirs."""
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
        """Serve until ``stop`` is set."""
        self.start(stop)
        try:
            stop.wait()
        finally:
            self.close()

    def start(self, stop: threading.Event | None = None) -> Self:
        """Serve in the background until `close`, or until ``stop`` is set."""
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
        """Return when every outbox keeps events for the sinks. A sink that is new is told what is decided after this, also of
        things that happened long ago, which else it is told only if its first round comes before them."""
        self._guard.check()
        for route in self._routes:
            route.subscribe()

    def drain(self, seconds: float) -> bool:
        """Deliver all that waits now, trying for at most ``seconds``; whether nothing is left."""
        self._guard.check()
        if not self._started:
            with self.start():
                return self.drain(seconds)
        deadline = time.monotonic() + seconds
        # A round that is under way now may have looked already: the one after it counts.
        wanted = {route: route.idle_rounds + 2 for route in self._routes}
        while left := [route for route, rounds in wanted.items() if route.idle_rounds < rounds]:
            if time.monotonic() >= deadline or self._stopping():
                return False
            for route in left:
                route.wake.set()
            self._halt.wait(min(0.02, max(0.0, deadline - time.monotonic())))
        return True

    def drain_here(self, seconds: float, stop: threading.Event | None = None) -> bool:
        """`drain` in this thread, for sinks that are functions of the program: what they use may belong to it, and a call
        is waited for however long it takes."""
        pause, deadline = stop or threading.Event(), time.monotonic() + seconds
        while True:
            delay = self.tick()
            if not any(route.outbox.waits(route.sink.name) for route in self._routes):
                return True
            left = deadline - time.monotonic()
            if left <= 0 or pause.wait(min(delay, left)):
                return False

    def close(self, grace: float = GRACE) -> bool:
        """Stop: wait for deliveries under way for ``grace`` seconds, end those that go on, and wait as long again.
        Whether every thread has ended; one that hangs in a program's own function is left to end with the process."""
        if self._guard.crossed:
            return True  # those threads are the parent's
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
            log.warning(
                "the relay stopped while sinks were busy; those events are delivered again later", count=hanging
            )
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
    """A relay in the background of a process that lives for other reasons: it serves ``sinks`` from the database and
    from the outbox in Redis until the block is left or ``stop`` is set. Begin it after the process has forked."""
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
    """What an error says; a sink is foreign code, and so is its error."""
    try:
        return redact(str(error)) or type(error).__name__
    except Exception:  # noqa: BLE001  # __str__ may raise anything
        return type(error).__name__
