"""The state server as this process sees it: tries again, fails fast, says once that it is away, and drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

from headway import _redis
from headway.core.lifecycle import Budget, Flag, Shutdown
from headway.core.retry import REDIS_OPERATION, CircuitBreaker, RetryPolicy, pause
from headway.errors import HeadwayError, Stopping, Unavailable
from headway.telemetry import Log, metrics, redact

log = Log("finishline")

T = TypeVar("T")

#: An outage of this many seconds is an alert.
EXTENDED = 5.0
#: What a shutdown grants the operations under way.
DRAIN_SECONDS = 5.0


class StateServer:
    """One client for state, and what is known about its server.

    A write is repeated after 1, 2 and 4 s: it carries an identity, so that a repetition counts once. A read is
    tried once. The first failure opens the circuit: reads then fail at once, but for one probe a second.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "state",
        shutdown: Shutdown | None = None,
        allow_eviction: bool = False,
        durable: bool = False,
        alert: Callable[[str], None] | None = None,
        timeout: float = _redis.TIMEOUT,
        policy: RetryPolicy = REDIS_OPERATION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.client = _redis.connect(
            url, role="state", name=name, timeout=timeout, connect_timeout=timeout, max_connections=1024
        )
        self.shutdown = shutdown or Shutdown()
        self.shutdown.on_request(lambda: self.halt.set())  # noqa: PLW0108  # a forked child has a halt of its own
        self._allow_eviction = allow_eviction
        self._durable = durable
        self._alert = alert
        self._policy = policy
        self._clock = clock
        self._closed = False
        self._eviction = None if allow_eviction else _redis.EvictionWatch(url, self._say_eviction)
        self.begin_process()

    def begin_process(self) -> None:
        """What a forked child must not share with its parent: locks that a thread of the parent may hold, sockets,
        operations under way. Called where the child has one thread only."""
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0, clock=self._clock)
        self._away = False  # the breaker's state, readable without its lock
        self._alerted = False
        self._fit = False
        self.halt = Flag()  # ends every wait: a shutdown was asked for, or this is closed
        if self.shutdown.stop.is_set() or self._closed:
            self.halt.set()
        self._mine = threading.local()
        self._under_way: WeakSet[Any] = WeakSet()  # a lock per thread, held while the thread is in an operation
        self._adding = threading.Lock()
        self.client.connection_pool.reset()

    @property
    def away(self) -> bool:
        return self._away

    # ---- calls ---------------------------------------------------------------------------------------------

    def write(self, operation: str, project_id: str, work: Callable[[], T]) -> T:
        """``work``, tried up to four times. `Unavailable` when the server stayed away, `Stopping` in a shutdown."""
        failures = 0
        while True:
            try:
                if not self._fit:
                    self._inspect()
                elif self._eviction is not None:
                    self._eviction.look(self.client)
                result = work()
            except _redis.failures() as error:
                if not _redis.is_transient(error):
                    raise self._translate(operation, project_id, error) from error
                failures += 1
                self._failed(error)
                if self._policy.exhausted(failures):
                    raise self._translate(operation, project_id, error) from error
                wait = self._policy.delay(failures)
                metrics.count("headway_redis_retries", operation=operation)
                log.warning(
                    "Redis did not answer; the operation is tried again",
                    operation=operation, project_id=project_id, attempt=failures, seconds=wait,
                    error=redact(str(error)),
                )  # fmt: skip
                pause(wait, self.halt)
            else:
                if self._away:
                    self._returned()
                return result

    def read(self, operation: str, project_id: str, work: Callable[[], T]) -> T:
        """``work``, tried once, and not at all while the server is known to be away."""
        if self._away and not self._breaker.allow():
            raise Unavailable(
                f"Redis at {_redis.place(self.url)} is away since {self._breaker.open_for or 0.0:.0f} s: "
                "the progress is not known.",
                hint="It is asked again every second; the counts are not lost.",
            )
        try:
            if not self._fit:
                self._inspect()
            result = work()
        except _redis.failures() as error:
            if _redis.is_transient(error):
                self._failed(error)
            raise self._translate(operation, project_id, error) from error
        if self._away:
            self._returned()
        return result

    def probe(self) -> bool:
        """Whether the server answers, asked now."""
        try:
            if not self._fit:
                self._inspect()
            self.client.ping()
        except _redis.failures() as error:
            self._failed(error)
            return False
        except HeadwayError as error:  # it answers, but is not fit to hold state; that was said by an error each time
            log.warning("the state server is refused", operation="probe", error=str(error))
            return False
        if self._away:
            self._returned()
        return True

    # ---- shutdown ------------------------------------------------------------------------------------------

    @property
    def operation(self) -> Any:
        """``with server.operation:`` around what `drain` waits for; `accept` is its first line.

        It is a lock of the thread's own, because taking and releasing one is a single step that no exception of a signal
        handler can split: a count of operations under way would stay too high for ever. It may be taken again within,
        as an alert that asks for progress does.
        """
        try:
            return self._mine.lock
        except AttributeError:
            lock = self._mine.lock = threading.RLock()
            with self._adding:
                self._under_way.add(lock)
            return lock

    def accept(self) -> None:
        """Raise `Stopping` once a shutdown was asked for: no operation begins after it."""
        if self._closed:
            raise Stopping("The finish line was closed.")
        self.shutdown.check()

    def drain(self, seconds: float) -> bool:
        """Accept no more operations and let those under way end; whether all of them did in time."""
        self._closed = True  # seen by whoever takes its lock after we had it
        budget = Budget(seconds)
        with self._adding:
            locks = list(self._under_way)
        late = 0
        for lock in locks:
            if lock.acquire(timeout=budget.left):
                lock.release()
            else:
                late += 1
        self.halt.set()
        if late:
            log.error("operations were still under way when the time was up", operation="close", count=late)
        return not late

    def close(self) -> None:
        self._closed = True
        self.halt.set()
        self.client.close()

    # ---- what is known of the server -----------------------------------------------------------------------

    def alert(self, message: str, **facts: str | float) -> None:
        """Something a person must look at: CRITICAL in the log, and the program's own ``alert``."""
        log.critical(message, **facts)
        if self._alert is None:
            return
        try:
            self._alert(message)
        except Exception as trouble:  # noqa: BLE001  # foreign code: the caller waits for Redis, not for it
            log.warning("the alert could not be given", error=redact(str(trouble)))

    def _say_eviction(self, what: str) -> None:
        self.alert(what, operation="eviction", reason="CONFIG SET maxmemory-policy")

    def _inspect(self) -> None:
        _redis.preflight(
            self.client, role="state", where=self.url, allow_eviction=self._allow_eviction, durable=self._durable
        )
        self._fit = True

    def _failed(self, error: BaseException) -> None:
        self._fit = False  # whoever comes back may be another server
        self._away = True
        self._breaker.failed()
        metrics.gauge("headway_redis_away", 1)
        lasted = self._breaker.open_for or 0.0
        if lasted >= EXTENDED and not self._alerted:
            self._alerted = True
            self.alert(
                f"Redis at {_redis.place(self.url)} is away since {lasted:.0f} s: progress is not tracked",
                operation="outage", seconds=round(lasted, 1), error=redact(str(error)),
            )  # fmt: skip

    def _returned(self) -> None:
        lasted = self._breaker.open_for or 0.0
        self._breaker.succeeded()
        self._away = self._alerted = False
        metrics.gauge("headway_redis_away", 0)
        log.warning("Redis is back", operation="outage", seconds=round(lasted, 1))

    def _translate(self, operation: str, project_id: str, error: BaseException) -> HeadwayError:
        trouble = _redis.translate(error, self.url)
        metrics.count("headway_redis_failures", operation=operation)
        log.error("the operation failed", operation=operation, project_id=project_id, error=str(trouble))
        return trouble
