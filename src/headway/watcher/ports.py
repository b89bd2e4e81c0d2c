"""The interfaces between the watcher and Redis and RQ. `adapters` implements them; tests have fakes.

The rest of this package does not import redis-py or RQ. `WatcherPorts` holds factories, so that a watcher opens its
connections in the process that uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

#: A member of a registry and its score.
Member = tuple[str, float]

#: One command as words: HSET key field value, HDEL key field, ZADD key [XX] score member or ZREM key member.
Write = tuple[str | float, ...]

MessageKind = Literal["event", "subscribed", "unsubscribed", "pong"]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the subscribed connection.

    ``channel`` is the channel of an event, the channel or pattern of a confirmation, or empty for a pong. ``name`` is the
    command that changed the key. Redis does not say which member it changed.
    """

    kind: MessageKind
    channel: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one queue's registries."""

    failed: str
    started: str
    canceled: str


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """RQ's record of the end of one execution. The ids of a job's results increase."""

    id: str
    outcome: Literal["successful", "failed", "retried"]
    execution_id: str
    worker: str
    started_at: str
    ended_at: str
    #: The exception as RQ stored it: base64 of a zlib stream.
    exception: bytes


@dataclass(frozen=True, slots=True)
class RqJobRecord:
    """A job and its results. If the job's hash is gone, ``exists`` is False and the fields of the hash are empty."""

    job_id: str
    exists: bool
    status: str = ""
    created_at: str = ""
    enqueued_at: str = ""
    started_at: str = ""
    ended_at: str = ""
    worker: str = ""
    #: Id of the running execution, or empty.
    running: str = ""
    #: Newest first.
    results: tuple[ResultRecord, ...] = ()
    #: The call as RQ stored it: a zlib stream in the format that the program chose. It is never unpickled.
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One execution of a job, and the job's timeout in seconds (0: none)."""

    exists: bool
    created_at: float
    worker: str
    timeout: float


class PubSubProto(Protocol):
    """A connection with subscriptions. It never reconnects: every failure raises `Unavailable`."""

    def psubscribe(self, *patterns: str) -> None: ...

    def punsubscribe(self, *patterns: str) -> None: ...

    def subscribe(self, *channels: str) -> None: ...

    def unsubscribe(self, *channels: str) -> None: ...

    def get_message(self, timeout: float) -> Message | None:
        """Return the next message, or None after ``timeout`` seconds."""
        ...

    def ping(self) -> None:
        """Send a ping. The pong arrives as a message."""
        ...

    def close(self) -> None: ...


class GuardProto(Protocol):
    """Detects changes of some keys by any command, also by commands that are not announced."""

    def untouched(self) -> bool:
        """Return whether no key changed since the last call or the creation. False if the server cannot tell."""
        ...


class RedisProto(Protocol):
    """The watcher's commands. No command is retried.

    Raises `Unavailable` if the server does not answer in time or denies access, and another `HeadwayError` if it rejects
    a command. A value of a wrong type in a job's keys counts as absent and never raises.
    """

    @property
    def db(self) -> int: ...

    def pubsub(self) -> PubSubProto: ...

    def config_get(self, name: str) -> str | None:
        """Return a setting of the server. None if it does not exist or may not be read."""
        ...

    def time(self) -> float:
        """Return the server's time, in seconds since 1970."""
        ...

    def zrevrangebyscore(self, key: str, offset: int, count: int) -> list[Member]:
        """Return ``count`` members by descending score, after ``offset`` others."""
        ...

    def zrange(self, key: str, start: int, count: int) -> list[Member]:
        """Return ``count`` members by ascending score, from rank ``start``."""
        ...

    def zscan(self, key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        """Return the next cursor and about ``count`` members. The first and the last cursor are 0.

        A member that is present from the first call to the last is returned at least once.
        """
        ...

    def zcard(self, key: str) -> int: ...

    def zrank(self, key: str, member: str) -> int | None: ...

    def zscore(self, key: str, member: str) -> float | None: ...

    def zadd(self, key: str, member: str, score: float) -> None: ...

    def unlink(self, key: str) -> None: ...

    def jobs(self, job_ids: Sequence[str], *, running: bool, payload: bool = False) -> list[RqJobRecord]:
        """Return the jobs in the given order, in one round trip.

        ``running`` also reads the running execution, by one more command per job. ``payload`` also reads the payload,
        which may be large.
        """
        ...

    def have_results(self, job_ids: Sequence[str]) -> list[bool]:
        """Return for each job whether RQ still keeps results of it, in one round trip."""
        ...

    def executions(self, members: Sequence[str]) -> list[ExecutionRecord]:
        """Return the executions of members ``job_id:execution_id`` of the started registry, in one round trip."""
        ...

    def guard(self, keys: Sequence[str]) -> GuardProto: ...

    def publish(self, channel: str, stream: str, stream_length: int, bodies: Sequence[str]) -> None:
        """Publish every body to ``channel``, and first to ``stream`` unless it is empty. One round trip."""
        ...

    def close(self) -> None: ...


class RedisHashes(Protocol):
    """The commands of `RedisProcessedStore`."""

    def setnx(self, key: str, value: str) -> str:
        """Set a key unless it exists. Return its value."""
        ...

    def hmget(self, key: str, fields: Sequence[str]) -> list[str | None]: ...

    def hgetall(self, key: str) -> dict[str, str]: ...

    def highest(self, key: str) -> float | None:
        """Return the highest score of a sorted set, or None."""
        ...

    def lowest(self, key: str, before: float, count: int) -> list[str]:
        """Return up to ``count`` members with a score below ``before``."""
        ...

    def together(self, changes: Sequence[Write]) -> None:
        """Execute all commands in one transaction."""
        ...


class RqProto(Protocol):
    """RQ's key names. They come from RQ, because RQ has changed them before."""

    def registries(self, queue: str) -> QueueKeys:
        """Return the keys of a queue's registries."""
        ...

    def executions(self, job_id: str) -> str:
        """Return the key of a job's running executions."""
        ...


@dataclass(frozen=True, slots=True)
class WatcherPorts:
    """Factories of connections and of RQ's names, and the clock."""

    redis: Callable[[str], RedisProto]
    hashes: Callable[[str], RedisHashes]
    rq: Callable[[], RqProto]
    #: A monotonic clock, in seconds.
    clock: Callable[[], float]
