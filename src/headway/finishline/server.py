"""The way to the state server: tries again, fails fast, says once that the server is away, and drains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headway import _redis
from headway.errors import HeadwayError, Stopping, Unavailable
from headway.lifecycle import Shutdown
from headway.retry import REDIS_OPERATION, CircuitBreaker, RetryPolicy, pause
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
        self._allow_eviction = allow_eviction
        self._durable = durable
        self._alert = alert
        self._policy = policy
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0, clock=clock)
        self._away = False  # the breaker's state, readable without its lock
        self._alerted = False
        self._fit = False
        self._closed = False
        self.halt = threading.Event()  # ends every wait: a shutdown was asked for, or this server is closed
        self.shutdown.on_request(self.halt.set)
        if self.shutdown.stop.is_set():
            self.halt.set()
        self._busy = 0
        self._pid = os.getpid()
        self._idle = threading.Condition()

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
                f"Redis at {redact(self.url)} is away since {self._breaker.open_for or 0.0:.0f} s: "
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

    def enter(self) -> None:
        """An operation begins. After a shutdown was asked for none does."""
        if self._pid != os.getpid():  # a forked child has none of its parent's operations under way
            self._pid, self._busy, self._idle = os.getpid(), 0, threading.Condition()
        if self._closed:
            raise Stopping("The finish line was closed.")
        self.shutdown.check()
        with self._idle:
            self._busy += 1

    def leave(self) -> None:
        with self._idle:
            self._busy -= 1
            if not self._busy:
                self._idle.notify_all()

    def drain(self, seconds: float) -> bool:
        """Accept no more operations and let those under way end; whether all of them did in time."""
        self._closed = True
        with self._idle:
            drained = self._idle.wait_for(lambda: not self._busy, seconds)
        self.halt.set()
        if not drained:
            log.error("operations were still under way when the time was up", operation="close", count=self._busy)
        return drained

    def close(self) -> None:
        self._closed = True
        self.halt.set()
        self.client.close()

    # ---- what is known of the server -----------------------------------------------------------------------

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
            message = f"Redis at {redact(self.url)} is away since {lasted:.0f} s: progress is not tracked"
            log.critical(message, operation="outage", seconds=round(lasted, 1), error=redact(str(error)))
            if self._alert is not None:
                try:
                    self._alert(message)
                except Exception as trouble:  # noqa: BLE001  # foreign code: the caller waits for Redis, not for it
                    log.warning("the alert could not be given", operation="outage", error=redact(str(trouble)))

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
