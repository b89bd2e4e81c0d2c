"""The sinks ``redis://host/0?channel=NAME`` and ``redis://host/0?stream=NAME&maxlen=N``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway import _redis
from headway.errors import Unavailable
from headway.events.deadline import Watchdog
from headway.events.envelope import Event
from headway.events.sinks.sink import DEADLINE

if TYPE_CHECKING:
    from redis import Redis


class _RedisSink:
    """Sends one command to another Redis within the deadline."""

    job: str | None = None
    types: Sequence[str] | None = None

    def __init__(self, client: Redis, name: str, timeout: float = DEADLINE) -> None:
        self._client: Any = client
        self._timeout = timeout
        self._watchdog = Watchdog()
        self.name = name

    def _send(self, *words: str | int) -> None:
        address = _redis.client_address(self._client)
        with self._watchdog.over(self._client.connection_pool.disconnect, self._timeout) as late:
            try:
                self._client.execute_command(*words)
            except Exception as error:  # including what redis-py raises when the watchdog closes its connection
                if late():
                    raise Unavailable(
                        f"Redis at {address} did not take the event within {self._timeout:g} s."
                    ) from None
                if isinstance(error, _redis.failures()):
                    raise _redis.translate(error, address) from error
                raise

    def close(self) -> None:
        """Abort a running command."""
        self._watchdog.abort()


class RedisChannelSink(_RedisSink):
    """Publishes the event as JSON. A channel stores nothing: only current subscribers receive it."""

    def __init__(self, client: Redis, channel: str = "job.completed", *, name: str = "") -> None:
        super().__init__(client, name or f"channel {channel}")
        self._channel = channel

    def deliver(self, event: Event) -> None:
        """Publish the event."""
        self._send("PUBLISH", self._channel, event.as_json())


class RedisStreamSink(_RedisSink):
    """Appends the event as JSON in the field ``event``. The stream is trimmed to about ``maxlen`` entries."""

    def __init__(self, client: Redis, stream: str, *, maxlen: int = 100_000, name: str = "") -> None:
        super().__init__(client, name or f"stream {stream}")
        self._stream, self._maxlen = stream, maxlen

    def deliver(self, event: Event) -> None:
        """Append the event."""
        self._send("XADD", self._stream, "MAXLEN", "~", self._maxlen, "*", "event", event.as_json())
