"""What a server must be like to hold state."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway._redis.address import Role, place
from headway._redis.errors import failures
from headway.errors import Refused
from headway.telemetry import Log

if TYPE_CHECKING:
    from redis import Redis

log = Log("redis")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself, as far as it decides whether state is safe there."""

    version: tuple[int, ...]
    maxmemory: int
    policy: str
    append_only: bool
    cluster: bool

    @property
    def evicts(self) -> bool:
        """Whether it deletes keys when memory is short; ``volatile-*`` too, for ours have a lifetime."""
        return self.maxmemory > 0 and self.policy != "noeviction"


def facts(client: Redis) -> ServerFacts:
    """Read by INFO alone, which servers allow where CONFIG is forbidden."""
    info: Any = client.info()
    return ServerFacts(
        version=tuple(int(part) for part in str(info["redis_version"]).split(".") if part.isdecimal()),
        maxmemory=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        append_only=bool(info.get("aof_enabled", 0)),
        cluster=bool(info.get("cluster_enabled", 0)),
    )


def preflight(
    client: Redis, *, role: Role, where: str, allow_eviction: bool = False, durable: bool = False
) -> ServerFacts:
    """Refuse a server that would lose what we keep there; say what else is missing.

    ``allow_eviction`` accepts an evicting server against this advice, and the log says so each time.
    ``durable`` means that the truth is kept elsewhere, so that missing persistence is no worry.
    """
    found = facts(client)
    server = place(where)
    if found.version < (6, 2):
        version = ".".join(map(str, found.version))
        raise Refused(f"Redis at {server} is version {version}.", hint="Use 6.2 or newer.")
    if role == "cache":
        return found
    if found.cluster:
        raise Refused(
            f"{server} is a Redis Cluster, which has no database 1.",
            hint="Use a standalone server, or a master behind Sentinel.",
        )
    if found.evicts:
        what = f"Redis at {server} deletes keys when memory is short (maxmemory-policy {found.policy})"
        if not allow_eviction:
            raise Refused(
                f"{what}; separate database numbers do not protect state from that.",
                hint="CONFIG SET maxmemory-policy noeviction, or give state a server of its own.",
            )
        log.critical("an evicting Redis is used because allow_eviction says so", reason=what)
    if not found.append_only and not durable:
        log.warning("this Redis loses what it holds when it crashes: appendonly is off", reason=server)
    return found


class EvictionWatch:
    """Notices that a server begins to evict after its preflight: anybody may say CONFIG SET. ``say`` is told once; again
    only if it had stopped in between. What is kept there goes on being used: to refuse it now would lose more."""

    #: Seconds between two looks.
    pace = 60.0

    def __init__(self, where: str, say: Callable[[str], None]) -> None:
        self._where = where
        self._say = say
        self._look_at = time.monotonic() + self.pace
        self._said = False

    def look(self, client: Redis) -> None:
        """Called before every operation; asks the server once a minute. That it does not answer is for the operation to
        say."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + self.pace
        with suppress(*failures()):
            info: Any = client.info("memory")
            policy = str(info.get("maxmemory_policy", "noeviction"))
            evicts = int(info.get("maxmemory", 0)) > 0 and policy != "noeviction"
            before, self._said = self._said, evicts
            if evicts and not before:
                self._say(
                    f"Redis at {place(self._where)} has begun to delete keys when memory is short (maxmemory-policy "
                    f"{policy}): what is kept there may be lost"
                )
