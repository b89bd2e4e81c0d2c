"""Requirements for a server that holds state."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway._redis.address import Role, shown_address
from headway._redis.errors import failures
from headway.errors import Refused
from headway.telemetry import Log

if TYPE_CHECKING:
    from redis import Redis

log = Log("redis")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties of a server that decide whether state is safe there."""

    version: tuple[int, ...]
    maxmemory: int
    policy: str
    append_only: bool
    cluster: bool

    @property
    def evicts(self) -> bool:
        """Whether it deletes keys when memory is short. ``volatile-*`` counts, because our keys have a lifetime."""
        return self.maxmemory > 0 and self.policy != "noeviction"


def facts(client: Redis) -> ServerFacts:
    """Read the properties by INFO, which servers allow even where they forbid CONFIG."""
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
    """Raise `Refused` for a server that would lose state, and log other risks.

    ``allow_eviction`` accepts an evicting server and logs that each time. ``durable`` means that the data is in SQL too, so
    missing persistence is no risk.
    """
    found = facts(client)
    server = shown_address(where)
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
                f"{what}. A separate database number does not protect state.",
                hint="Run CONFIG SET maxmemory-policy noeviction, or use a separate server for state.",
            )
        log.critical("an evicting Redis is used because allow_eviction says so", reason=what)
    if not found.append_only and not durable:
        log.warning("this Redis loses what it holds when it crashes: appendonly is off", reason=server)
    return found


class EvictionWatch:
    """Detects that a server begins to evict keys after its preflight, by a later CONFIG SET.

    ``alert`` is called once, and again only if eviction stopped in between. The server stays in use: refusing it would lose
    more.
    """

    #: Seconds between two checks.
    pace = 60.0

    def __init__(self, where: str, alert: Callable[[str], None]) -> None:
        self._where = where
        self._alert = alert
        self._next_check = time.monotonic() + self.pace
        self._alerted = False

    def check(self, client: Redis) -> None:
        """Ask the server once a minute. Called before every operation, which reports an unreachable server itself."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + self.pace
        with suppress(*failures()):
            info: Any = client.info("memory")
            policy = str(info.get("maxmemory_policy", "noeviction"))
            evicts = int(info.get("maxmemory", 0)) > 0 and policy != "noeviction"
            before, self._alerted = self._alerted, evicts
            if evicts and not before:
                self._alert(
                    f"Redis at {shown_address(self._where)} has begun to delete keys when memory is short (maxmemory-policy "
                    f"{policy}). State may be lost."
                )
