"""The state server as this process sees it: retries, circuit breaker, one alert per outage, shutdown."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headway import _redis
from headway.core.lifecycle import Flag, Shutdown
from headway.core.retry import REDIS_OPERATION, CircuitBreaker, RetryPolicy, pause
from headway.errors import HeadwayError, Stopping, Unavailable
from headway.finishline.operations import Operations
from headway.telemetry import Log, metrics, redact

log = Log("finishline")

T = TypeVar("T")

#: Seconds after which an outage raises an alert.
EXTENDED = 5.0
#: Seconds that a shutdown waits for running operations.
DRAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server is used. ``durable``: the counts are in SQL too, so missing persistence of Redis is no risk."""

    allow_eviction: bool = False
    durable: bool = False
    timeout: float = _redis.TIMEOUT
    retry: RetryPolicy = REDIS_OPERATION


class StateServer:
    """A client of the state server and the server's condition.

    A write is retried after 1, 2 and 4 s. It carries an identity, so a repetition counts once. A read is tried once. The
    first failure opens the circuit: then reads fail at once, except one probe per second.
    """

    def __init__(
        self,
        url: str,
        options: ServerOptions | None = None,
        *,
        shutdown: Shutdown | None = None,
        alert: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or ServerOptions()
        self.url = url
        self.client = _redis.connect(
            url, role="state", timeout=options.timeout, connect_timeout=options.timeout, max_connections=1024
        )
        self.shutdown = shutdown or Shutdown()
        self.shutdown.on_request(lambda: self.halt.set())  # noqa: PLW0108  # a forked child has its own halt
        self._preflight = partial(
            _redis.preflight,
            role="state",
            where=url,
            allow_eviction=options.allow_eviction,
            durable=options.durable,
        )
        self._eviction = None if options.allow_eviction else _redis.EvictionWatch(url, self._alert_eviction)
        self._alert = alert
        self._policy = options.retry
        self._clock = clock
        self._closed = False
        self.begin_process()

    def begin_process(self) -> None:
        """Create what a forked child must not share with its parent: locks, sockets, running operations.

        Called in a forked child while it has a single thread.
        """
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0, clock=self._clock)
        self._away = False  # state of the breaker, readable without its lock
        self._alerted = False
        self._fit = False
        self.halt = Flag()  # ends every wait, at a shutdown or on close
        if self.shutdown.stop.is_set() or self._closed:
            self.halt.set()
        self._operations = Operations()
        self.client.connection_pool.reset()

    @property
    def away(self) -> bool:
        """Whether the last call found the server unreachable."""
        return self._away

    # ---- calls ---------------------------------------------------------------------------------------------

    def write(self, operation: str, project_id: str, work: Callable[[], T]) -> T:
        """Run ``work``, up to four times. Raises `Unavailable` if the server stays away and `Stopping` in a shutdown."""
        failures = 0
        while True:
            try:
                if not self._fit:
                    self._inspect()
                elif self._eviction is not None:
                    self._eviction.check(self.client)
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
        """Run ``work`` once, or raise `Unavailable` at once while the circuit is open."""
        if self._away and not self._breaker.allow():
            raise Unavailable(
                f"Redis at {_redis.shown_address(self.url)} has been unreachable for {self._breaker.open_for or 0.0:.0f} s. "
                "The progress is unknown.",
                hint="Headway tries again every second. The counts are not lost.",
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
        """Ask the server now and return whether it answers and may hold state."""
        try:
            if not self._fit:
                self._inspect()
            self.client.ping()
        except _redis.failures() as error:
            self._failed(error)
            return False
        except HeadwayError as error:  # it answers, but must not hold state
            log.warning("the state server is not accepted", operation="probe", error=str(error))
            return False
        if self._away:
            self._returned()
        return True

    # ---- shutdown ------------------------------------------------------------------------------------------

    @property
    def operation(self) -> Any:
        """A context manager for everything that `drain` must wait for. Its first statement is `accept`."""
        return self._operations.lock

    def accept(self) -> None:
        """Raise `Stopping` after `close` or the request to shut down."""
        if self._closed:
            raise Stopping("The finish line was closed.")
        self.shutdown.check()

    def drain(self, seconds: float) -> bool:
        """Accept no more operations and wait for running ones. Return whether all ended in time."""
        self._closed = True  # an operation that begins after `wait` passed its thread sees this in `accept`
        late = self._operations.wait(seconds)
        self.halt.set()
        if late:
            log.error("operations were still running at the end of the shutdown", operation="close", count=late)
        return not late

    def close(self) -> None:
        """End every wait and close the connections."""
        self._closed = True
        self.halt.set()
        self.client.close()

    # ---- condition of the server ---------------------------------------------------------------------------

    def alert(self, message: str, **facts: str | float) -> None:
        """Log a critical message and call the program's ``alert``."""
        log.critical(message, **facts)
        if self._alert is None:
            return
        try:
            self._alert(message)
        except Exception as trouble:  # noqa: BLE001  # the program's function must not fail the operation
            log.warning("the alert function failed", error=redact(str(trouble)))

    def _alert_eviction(self, what: str) -> None:
        self.alert(what, operation="eviction", reason="CONFIG SET maxmemory-policy")

    def _inspect(self) -> None:
        self._preflight(self.client)
        self._fit = True

    def _failed(self, error: BaseException) -> None:
        self._fit = False  # another server may answer next time
        self._away = True
        self._breaker.failed()
        metrics.gauge("headway_redis_away", 1)
        lasted = self._breaker.open_for or 0.0
        if lasted >= EXTENDED and not self._alerted:
            self._alerted = True
            self.alert(
                f"Redis at {_redis.shown_address(self.url)} has been unreachable for {lasted:.0f} s: progress is not tracked",
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
