"""`RegistryConnection`: the watcher's subscribed connection, and the check that Redis announces changes.

The link is never repaired. If it was cut, was reconnected by the client, or is silent, it raises. A supervisor restarts
the process, which then catches up.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

from headway._redis.keys import PROBE
from headway.errors import ConfigError, Unavailable
from headway.watcher.ports import Message, PubSubProto, RedisProto
from headway.watcher.reports import channel, notifies

SETTING = "notify-keyspace-events"

#: Timeout of a subscription's confirmation and of a pong, in seconds.
REPLY_S = 5.0

#: Timeout of the event that a probe causes, in seconds.
PROBE_S = 2.0

#: Maximum number of messages read before the registries are read, so that a flood of messages does not delay that.
BATCH = 1_000

#: Receives the name of the command that changed a key.
Route = Callable[[str], None]


class RegistryConnection:
    """Receives announcements and passes each to the route of its channel. Raises `Unavailable` if any may be lost."""

    def __init__(
        self, pubsub: PubSubProto, routes: dict[str, Route], *, clock: Callable[[], float], ping_s: float
    ) -> None:
        self._pubsub = pubsub
        self._routes = routes
        self._clock = clock
        self._ping_s = ping_s
        # Channels and patterns without a confirmation yet. An unexpected confirmation means that the client reconnected.
        self._unconfirmed: Counter[str] = Counter()
        self._received_at = 0.0
        self._pinged_at: float | None = None
        self._announced = False

    def subscribe_patterns(self, patterns: Sequence[str]) -> None:
        """Subscribe to patterns and wait for the confirmations."""
        self._unconfirmed.update(patterns)
        self._pubsub.psubscribe(*patterns)
        deadline = self._clock() + REPLY_S
        while self._unconfirmed.total():
            left = deadline - self._clock()
            if left <= 0:
                raise Unavailable("Redis did not confirm the subscription.")
            message = self._pubsub.get_message(left)
            if message is not None:
                self._handle(message)

    def subscribe(self, name: str) -> None:
        """Subscribe to a channel. Its confirmation arrives later."""
        self._unconfirmed[name] += 1
        self._pubsub.subscribe(name)

    def route(self, name: str, route: Route) -> None:
        """Set the route of a channel."""
        self._routes[name] = route

    def unsubscribe(self, name: str) -> None:
        """Unsubscribe from a channel and remove its route."""
        del self._routes[name]
        self._pubsub.unsubscribe(name)

    def receive(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a message, and handle all that have arrived."""
        for _ in range(BATCH):
            message = self._pubsub.get_message(timeout)
            if message is None:
                return
            self._handle(message)
            timeout = 0.0

    def _handle(self, message: Message) -> None:
        self._received_at, self._pinged_at = self._clock(), None
        if message.kind == "event":
            self._announced = True
            route = self._routes.get(message.channel)
            if route is not None:
                route(message.name)
        elif message.kind == "subscribed":
            if not self._unconfirmed[message.channel]:
                raise Unavailable(
                    "The connection to Redis was cut and reconnected: events may be lost.",
                    hint="The supervisor starts the watcher again, which catches up.",
                )
            self._unconfirmed[message.channel] -= 1

    def take_announced(self) -> bool:
        """Return whether anything was announced since the last call."""
        announced, self._announced = self._announced, False
        return announced

    def check_alive(self) -> None:
        """Ping after a silence and raise without a pong. A dead connection may fail no call and deliver nothing."""
        now = self._clock()
        if self._pinged_at is not None and now - self._pinged_at > REPLY_S:
            self.receive(0.0)  # the watcher may have been busy for that long
        if self._pinged_at is not None:
            if now - self._pinged_at > REPLY_S:
                raise Unavailable(
                    f"The connection to Redis is dead: no answer to a ping within {REPLY_S:g} s.",
                    hint="The supervisor starts the watcher again, which catches up.",
                )
        elif now - self._received_at >= self._ping_s:
            self._pubsub.ping()
            self._pinged_at = now

    def close(self) -> None:
        self._pubsub.close()


def preflight(redis: RedisProto, clock: Callable[[], float] = time.monotonic) -> None:
    """Raise `ConfigError` unless Redis announces changes of sorted sets. The setting is the operator's: it is only read."""
    flags = redis.config_get(SETTING)
    if flags is None:  # many managed servers deny CONFIG
        if not probe(redis, clock):
            raise _silent("a test change was not announced")
    elif not notifies(flags):
        raise _silent(f"{SETTING} is '{flags}'")


def probe(redis: RedisProto, clock: Callable[[], float]) -> bool:
    """Change a temporary sorted set. Return whether that is announced within `PROBE_S`."""
    key = PROBE(token=uuid.uuid4().hex)
    pubsub = redis.pubsub()
    try:
        pubsub.subscribe(channel(redis.db, key))
        deadline = clock() + PROBE_S
        while (left := deadline - clock()) > 0:
            message = pubsub.get_message(left)
            if message is not None and message.kind == "event":
                return True
            if message is not None and message.kind == "subscribed":
                redis.zadd(key, "probe", 1)
        return False
    finally:
        pubsub.close()
        redis.unlink(key)


def _silent(why: str) -> ConfigError:
    return ConfigError(
        f"Redis does not announce changes of sorted sets: {why}.",
        hint=f"Set it on the server: CONFIG SET {SETTING} Kz (and in redis.conf, so that it survives a restart).",
    )
