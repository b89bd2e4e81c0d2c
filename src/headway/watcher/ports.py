"""What the watcher needs from Redis and RQ, as few typed verbs; `adapters` has the real ones, tests have fakes.

Nothing else in this package knows redis-py or RQ. `WatcherPorts` holds the factories, so that a watcher opens what
it needs in the process that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

#: A member of a registry and its score.
Member = tuple[str, float]

#: HSET key field value | HDEL key field | ZADD key [XX] score member | ZREM key member, as words.
Write = tuple[str | float, ...]

MessageKind = Literal["event", "subscribed", "unsubscribed", "pong"]


@dataclass(frozen=True, slots=True)
class Message:
    """One thing that arrived on the subscribed link.

    ``channel`` is the channel of an event, the channel or pattern of a confirmation, empty for a pong. ``name`` is
    the name of the command that changed the key; which member it changed is never said.
    """

    kind: MessageKind
    channel: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Where RQ keeps the registries of one queue."""

    failed: str
    started: str
    canceled: str


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """How one execution of a job ended, as RQ recorded it. ``id`` grows with every result of the job."""

    id: str
    outcome: Literal["successful", "failed", "retried"]
    execution_id: str
    worker: str
    started_at: str
    ended_at: str
    #: What RQ kept of the exception: base64 of a zlib stream, not yet opened.
    exception: bytes


@dataclass(frozen=True, slots=True)
class RqJobRecord:
    """What is left of a job. When its hash is gone, ``exists`` is False and the rest is empty."""

    job_id: str
    exists: bool
    status: str = ""
    created_at: str = ""
    enqueued_at: str = ""
    started_at: str = ""
    ended_at: str = ""
    worker: str = ""
    #: Id of an execution that is under way, if there is one.
    running: str = ""
    #: Newest first.
    results: tuple[ResultRecord, ...] = ()
    #: The call as RQ stored it: a zlib stream in whatever format the program chose. Never unpickled.
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One run of a job, and the time its job may take (0: no limit)."""

    exists: bool
    created_at: float
    worker: str
    timeout: float


class PubSubProto(Protocol):
    """A link that was told what to listen to. Any failure of it raises `Unavailable`; it never reconnects."""

    def psubscribe(self, *patterns: str) -> None: ...

    def punsubscribe(self, *patterns: str) -> None: ...

    def subscribe(self, *channels: str) -> None: ...

    def unsubscribe(self, *channels: str) -> None: ...

    def get_message(self, timeout: float) -> Message | None:
        """The next message, waiting at most ``timeout`` seconds for it."""
        ...

    def ping(self) -> None:
        """Ask for a pong, which arrives as a message."""
        ...

    def close(self) -> None: ...


class GuardProto(Protocol):
    """Notices whether any of some keys was touched, by whatever command: also by those that are not announced."""

    def untouched(self) -> bool:
        """Whether none of them was touched since this was asked last, or since it was made. False when the server
        cannot say."""
        ...


class RedisProto(Protocol):
    """The commands the watcher issues. `Unavailable` when the server cannot be reached in time or refuses us, another
    `HeadwayError` when it refuses a command; neither is ever retried here.

    What a job's keys hold is anybody's: a value of a wrong kind counts as absent and never raises.
    """

    @property
    def db(self) -> int: ...

    def pubsub(self) -> PubSubProto: ...

    def config_get(self, name: str) -> str | None:
        """A setting of the server; None when it does not say: no such setting, or no right to ask."""
        ...

    def time(self) -> float:
        """The server's clock, seconds since 1970."""
        ...

    def zrevrangebyscore(self, key: str, offset: int, count: int) -> list[Member]:
        """``count`` members from the highest score down, after skipping ``offset``."""
        ...

    def zrange(self, key: str, start: int, count: int) -> list[Member]:
        """``count`` members by rank, from the lowest score up, beginning at rank ``start``."""
        ...

    def zscan(self, key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        """About ``count`` members, and the cursor to go on with; it begins and ends with 0.

        A member that is there from the first call to the last is given at least once, whatever else changes.
        """
        ...

    def zcard(self, key: str) -> int: ...

    def zrank(self, key: str, member: str) -> int | None: ...

    def zscore(self, key: str, member: str) -> float | None: ...

    def zadd(self, key: str, member: str, score: float) -> None: ...

    def unlink(self, key: str) -> None: ...

    def jobs(self, job_ids: Sequence[str], *, running: bool, payload: bool = False) -> list[RqJobRecord]:
        """What is left of each job, in one round trip, in the order asked. What runs of it costs a command more; its
        payload, which may be large, is read only when it is wanted."""
        ...

    def have_results(self, job_ids: Sequence[str]) -> list[bool]:
        """Of which jobs RQ still keeps results, in one round trip, in the order asked."""
        ...

    def executions(self, members: Sequence[str]) -> list[ExecutionRecord]:
        """Each member ``job_id:execution_id`` of the started registry, in one round trip, in the order asked."""
        ...

    def guard(self, keys: Sequence[str]) -> GuardProto: ...

    def publish(self, channel: str, stream: str, stream_length: int, bodies: Sequence[str]) -> None:
        """Every body to ``channel``, and to ``stream`` first unless that is empty; in one round trip."""
        ...

    def close(self) -> None: ...


class RedisHashes(Protocol):
    """The further commands that keeping the record of reports in Redis takes."""

    def setnx(self, key: str, value: str) -> str:
        """Set it unless it is set; the value it has now."""
        ...

    def hmget(self, key: str, fields: Sequence[str]) -> list[str | None]: ...

    def hgetall(self, key: str) -> dict[str, str]: ...

    def highest(self, key: str) -> float | None:
        """The highest score of a sorted set."""
        ...

    def lowest(self, key: str, before: float, count: int) -> list[str]:
        """Up to ``count`` members with a score below ``before``."""
        ...

    def together(self, changes: Sequence[Write]) -> None:
        """All of them in one transaction."""
        ...


class RqProto(Protocol):
    """RQ's names. They are asked for, never spelled out here: RQ changed them before."""

    def registries(self, queue: str) -> QueueKeys: ...

    def executions(self, job_id: str) -> str:
        """The key that lists a job's executions under way."""
        ...


@dataclass(frozen=True, slots=True)
class WatcherPorts:
    """How to get a connection, RQ's names, and time."""

    redis: Callable[[str], RedisProto]
    hashes: Callable[[str], RedisHashes]
    rq: Callable[[], RqProto]
    #: Seconds that never jump.
    clock: Callable[[], float]
