"""Redis: clients whose every timeout is said, what a server must be like, scripts, and the name of every key.

Nothing here tries again by itself. A command whose reply was lost may have been applied, so only the caller,
who knows its identity, may repeat it: redis-py's own retries are switched off in every client
(``Retry(NoBackoff(), 0)``).

Standalone servers, or a master behind Sentinel by an address that follows it; Redis Cluster has no database 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from headway.errors import (
    HeadwayError,
    InvalidInput,
    MissingExtra,
    Refused,
    StorageError,
    StoreFull,
    Unavailable,
)
from headway.telemetry import Log, redact

if TYPE_CHECKING:
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis

log = Log("redis")

Role = Literal["state", "queue", "cache"]
Kind = Literal["hash", "string", "set", "zset", "list", "stream", "channel"]
Argument = str | int | float | bytes
Reply = Any  # what a command answers is known where it is sent

#: Four tries of this long and the waits of 1, 2 and 4 s between them end within 15 s.
TIMEOUT = 1.8

#: The database of a role whose address names none. State never shares database 0 with a cache.
DATABASES: dict[Role, int] = {"state": 1, "queue": 0, "cache": 0}


# ----------------------------------------------------------------------------------------------------------
# Keys


@dataclass(frozen=True, slots=True)
class Key:
    """One family of keys: what it is called, its type, how long it lives. Called, it gives one name."""

    pattern: str
    kind: Kind
    lifetime: str
    holds: str

    def __call__(self, **parts: str) -> str:
        return self.pattern.format_map(parts)

    def matches(self, name: str) -> bool:
        pieces = re.split(r"(\{\w+\})", self.pattern)
        shape = "".join("[^:]+" if piece.startswith("{") else re.escape(piece) for piece in pieces)
        return re.fullmatch(shape, name) is not None


#: Every key headway writes. docs/redis.md is compared with it, and so is what tests leave in a server.
KEYS: list[Key] = []


def key(pattern: str, kind: Kind, lifetime: str, holds: str) -> Key:
    """Add a family of keys to the list."""
    made = Key(pattern, kind, lifetime, holds)
    KEYS.append(made)
    return made


_WEEK = "7 days after the last write"
_LONGER = "2 hours longer"

PROJECT = key("smap:proj:{project_id}", "hash", _WEEK, "`status`, `total`, `done`, `errors` of a project")
PROJECT_BOOK = key("smap:proj:{project_id}:book", "hash", _LONGER, "epoch, version, winner; last call per caller")
PROJECT_BITS = key("smap:proj:{project_id}:bits", "string", _LONGER, "bitmap of the item numbers counted")
PROJECT_SEEN = key("smap:proj:{project_id}:seen", "set", _LONGER, "other item ids counted, long ones as a digest")
PROJECT_RESTORE = key("smap:proj:{project_id}:restore", "string", "30 s", "who rebuilds the project just now")
STAGED_BITS = key("smap:proj:{project_id}:bits:{token}", "string", "10 min", "bits of a project being rebuilt")
STAGED_SEEN = key("smap:proj:{project_id}:seen:{token}", "set", "10 min", "ids of a project being rebuilt")
KEEPER = key("smap:keeper", "string", "4.5 s", "who compares Redis with the SQL record just now")
EVENTS = key("smap:events", "stream", "an entry goes when every sink has it", "events on their way to the sinks")
EVENTS_QUARANTINE = key(
    "smap:events:quarantine", "stream", "until retried or discarded", "what a sink refused, or is no event"
)
EVENTS_LEASE = key("smap:events:lease:{sink}", "string", "30 s", "which relay serves the sink just now")

LEASE_TOKEN = key("headway:lease:token", "string", "for ever", "counter: the token of the lease acquired last")

_UNTIL_DELETED = "until the job is deleted"
STATE_JOBS = key("headway:states", "set", "for ever", "ids of the jobs whose states are here")
STATE_JOB = key("headway:states:{job_id}", "hash", _UNTIL_DELETED, "`num_tasks`, `created_at`, `deleted`, ... of a job")
STATES = key("headway:states:{job_id}:states", "hash", _UNTIL_DELETED, "the newest state of each task and tag")
STATE_LOG = key(
    "headway:states:{job_id}:log", "stream", _UNTIL_DELETED, "about 1,000 changes (all of them with history)"
)


# ----------------------------------------------------------------------------------------------------------
# Clients


def connect(
    url: str,
    *,
    role: Role,
    name: str = "",
    timeout: float = TIMEOUT,
    connect_timeout: float = TIMEOUT,
    max_connections: int = 256,
    decode: bool = True,
) -> Redis:
    """A client with a pool of its own. Nothing is sent yet: an absent server is noticed at first use.

    ``timeout`` bounds the wait for one reply; a client that blocks in the server (BLPOP) needs a longer one.
    """
    _import_redis()
    from redis import Redis as Client
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options = _options(url, role, name, (connect_timeout, timeout), max_connections)
    return Client.from_url(url, retry=Retry(NoBackoff(), 0), decode_responses=decode, **options)


def connect_async(
    url: str,
    *,
    role: Role,
    name: str = "",
    timeout: float = TIMEOUT,
    connect_timeout: float = TIMEOUT,
    max_connections: int = 256,
    decode: bool = True,
) -> AsyncRedis:
    """`connect` for a server that lives in an event loop."""
    _import_redis()
    from redis.asyncio import Redis as Client
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    options = _options(url, role, name, (connect_timeout, timeout), max_connections)
    return Client.from_url(url, retry=Retry(NoBackoff(), 0), decode_responses=decode, **options)


def _options(url: str, role: Role, name: str, timeouts: tuple[float, float], max_connections: int) -> dict[str, Any]:
    return {
        "db": database_of(url, role),
        "client_name": f"headway-{name or role}",
        "socket_connect_timeout": timeouts[0],
        "socket_timeout": timeouts[1],
        "socket_keepalive": True,
        "health_check_interval": 0,
        "retry_on_timeout": False,
        "max_connections": max_connections,
        "protocol": 2,  # replies of one shape in every redis-py we support
    }


def database_of(url: str, role: Role) -> int:
    """The database number an address means for a role; `InvalidInput` when it may not be that one."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise InvalidInput(
            f"{redact(url)!r} is not a Redis address.",
            hint="Use redis://host:6379/1, rediss://... or unix://...",
        )
    found = re.search(r"(?:^|&)db=([^&]*)", parts.query)
    text = found[1] if found else parts.path.strip("/") if parts.scheme != "unix" else ""
    if text and not text.isdecimal():
        raise InvalidInput(f"{redact(url)!r}: {text!r} is not a database number.", hint="Use redis://host:6379/1")
    number = int(text) if text else DATABASES[role]
    if role == "state" and number == 0:
        raise InvalidInput(
            f"{redact(url)!r} is database 0, which is a cache's; state is kept in another one.",
            hint="Use database 1: redis://host:6379/1",
        )
    return number


def _import_redis() -> None:
    try:
        import redis  # noqa: F401  # asked only whether it is there
    except ImportError as error:
        raise MissingExtra("redis", "A redis:// address") from error


# ----------------------------------------------------------------------------------------------------------
# Errors


@lru_cache(maxsize=1)
def failures() -> tuple[type[Exception], ...]:
    """Whatever a client of ours may raise."""
    _import_redis()
    from redis import exceptions

    return (exceptions.RedisError, OSError)


def is_transient(error: BaseException) -> bool:
    """Whether another try on a new connection may help: not after a refused password or a command error."""
    from redis import exceptions

    away = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError)
    refused = (exceptions.AuthenticationError, exceptions.AuthorizationError)
    if isinstance(error, away):
        return not isinstance(error, refused)
    return _says(error, "READONLY", "MASTERDOWN", "NOREPLICAS", "LOADING")


def _says(error: BaseException, *codes: str) -> bool:
    """Whether the server answered one of these; up to 6.2 it wraps what happened inside a script in other words."""
    return any(str(error).startswith(code) or f"-{code} " in str(error) for code in codes)


def translate(error: BaseException, where: str) -> HeadwayError:
    """A client's error in our words. ``where`` is the address; it is shown without its password."""
    from redis import exceptions

    place, why = redact(where), redact(str(error)) or type(error).__name__
    if is_transient(error):
        return Unavailable(
            f"Redis at {place} cannot be reached: {why}",
            hint="Check that it runs and that the address is right.",
        )
    if isinstance(error, exceptions.ConnectionError | exceptions.NoPermissionError):
        return Unavailable(
            f"Redis at {place} refused us: {why}",
            hint="Check user and password in the address, and their ACL.",
        )
    if isinstance(error, exceptions.OutOfMemoryError) or _says(error, "OOM"):
        return StoreFull(
            f"Redis at {place} has reached its maxmemory.",
            hint="Raise maxmemory, or move the cache to another server.",
        )
    return StorageError(f"Redis at {place} did not do it: {why}")


# ----------------------------------------------------------------------------------------------------------
# Preflight


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
    place = redact(where)
    if found.version < (6, 2):
        version = ".".join(map(str, found.version))
        raise Refused(f"Redis at {place} is version {version}.", hint="Use 6.2 or newer.")
    if role == "cache":
        return found
    if found.cluster:
        raise Refused(
            f"{place} is a Redis Cluster, which has no database 1.",
            hint="Use a standalone server, or a master behind Sentinel.",
        )
    if found.evicts:
        what = f"Redis at {place} deletes keys when memory is short (maxmemory-policy {found.policy})"
        if not allow_eviction:
            raise Refused(
                f"{what}; separate database numbers do not protect state from that.",
                hint="CONFIG SET maxmemory-policy noeviction, or give state a server of its own.",
            )
        log.critical("an evicting Redis is used because allow_eviction says so", reason=what)
    if not found.append_only and not durable:
        log.warning("this Redis loses what it holds when it crashes: appendonly is off", reason=place)
    return found


# ----------------------------------------------------------------------------------------------------------
# Scripts


class Script:
    """One operation of ``lua/``. A server that forgot it (restart, SCRIPT FLUSH) is taught it on the way."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        import hashlib

        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # the server's name for it

    def __call__(self, client: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        """Run it once on a connection of the client's pool. Raises what redis-py raises; see `translate`."""
        connection = borrow(client)
        try:
            return self.on(connection, keys, arguments)
        finally:
            client.connection_pool.release(connection)

    def on(self, connection: Any, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        """Run it once on this connection, past the client's command layer, which costs as much as the round trip.

        A connection that fails or is interrupted closes itself, so nobody reads a reply that came late.
        """
        try:
            connection.send_packed_command(_packed("EVALSHA", self.sha, len(keys), *keys, *arguments))
            return connection.read_response()
        except _no_script():  # nothing was run
            connection.send_packed_command(_packed("EVAL", self.text, len(keys), *keys, *arguments))
            return connection.read_response()


@lru_cache(maxsize=1)
def _no_script() -> type[Exception]:
    from redis.exceptions import NoScriptError

    return NoScriptError


def borrow(client: Redis) -> Any:
    """A connection of the client's pool, to be released there; redis-py leaves connections untyped."""
    return client.connection_pool.get_connection()


def _packed(*words: Argument) -> list[bytes]:
    try:
        from hiredis import pack_command
    except ImportError:  # the optional parser is missing: slower, and the same
        raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        return [b"*%d\r\n" % len(raw), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)]
    return [pack_command(words)]  # type: ignore[arg-type]  # its stub says a tuple of one


@lru_cache(maxsize=64)
def script(name: str) -> Script:
    """``lua/OWNER/NAME.lua``, with the files it includes (``-- include: other``) put before it."""
    return Script(name, _source(name))


def _source(name: str) -> str:
    file = resources.files("headway._redis").joinpath("lua", *f"{name}.lua".split("/"))
    text = file.read_text(encoding="utf-8")
    included = re.findall(r"^-- include: (\S+)$", text, re.MULTILINE)
    return "".join(_source(other) for other in included) + text
