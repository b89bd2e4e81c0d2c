"""The ports on redis-py and RQ. The only module of this package that imports either.

Replies are taken raw (RESP2, no response callbacks), because what redis-py makes of them differs between its
releases; each is turned into a typed value here or refused. The client never retries: a command whose reply was lost
and a link that was cut both raise, so that nothing is resubscribed behind our back and no event is missed silently.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from headway.errors import MissingExtra, ServerRefused, Unavailable
from headway.telemetry import redact
from headway.watcher.logic import moment, split_member
from headway.watcher.ports import (
    Change,
    ExecutionRecord,
    JobRecord,
    Member,
    Message,
    MessageKind,
    PubSubProto,
    QueueKeys,
    RedisHashes,
    RedisProto,
    ResultRecord,
    RqProto,
    WatcherPorts,
)

try:
    import redis
    import redis.exceptions
    from redis.backoff import NoBackoff
    from redis.retry import Retry
    from rq.executions import Execution, ExecutionRegistry
    from rq.job import Job
    from rq.registry import CanceledJobRegistry, FailedJobRegistry, StartedJobRegistry
    from rq.results import Result
except ImportError as error:
    raise MissingExtra("redis", "The watcher") from error

Word = str | int | float | bytes

#: Seconds a connect or a reply may take.
REPLY_S = 5.0

#: A peer that vanished without a word is noticed by the kernel after 10 + 2 * 5 s, at no cost in commands.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2}

_JOB_FIELDS = ("status", "created_at", "enqueued_at", "started_at", "ended_at", "worker_name", "data")
_RESULTS = 10  # RQ keeps no more of one job
_OUTCOMES: Mapping[int, Literal["successful", "failed", "retried"]] = {
    Result.Type.SUCCESSFUL.value: "successful",
    Result.Type.FAILED.value: "failed",
    Result.Type.STOPPED.value: "failed",
    Result.Type.RETRIED.value: "retried",
    Result.Type.MAX_RETRIES_EXCEEDED.value: "failed",
}
_KINDS: Mapping[str, MessageKind] = {
    "pmessage": "event",
    "psubscribe": "subscribed",
    "punsubscribe": "unsubscribed",
    "pong": "pong",
}


class Pipe(Protocol):
    """What we use of redis-py's pipeline."""

    def execute_command(self, *words: Word) -> object: ...
    def execute(self) -> list[object]: ...


class Connection(Protocol):
    """What we use of redis-py's connection."""

    def can_read(self, timeout: float) -> bool: ...


class PubSub(Protocol):
    """What we use of redis-py's PubSub."""

    @property
    def connection(self) -> Connection: ...
    def psubscribe(self, *patterns: str) -> object: ...
    def punsubscribe(self, *patterns: str) -> object: ...
    def get_message(self, *, timeout: float) -> Mapping[str, object] | None: ...
    def ping(self, message: str) -> object: ...
    def close(self) -> object: ...


class Client(Protocol):
    """What we use of redis-py's client."""

    def execute_command(self, *words: Word) -> object: ...
    def pipeline(self, *, transaction: bool) -> Pipe: ...
    def pubsub(self) -> PubSub: ...
    def close(self) -> object: ...


def default_ports() -> WatcherPorts:
    return WatcherPorts(redis=connect, hashes=connect, rq=RqAdapter, clock=time.monotonic)


def connect(url: str) -> RedisAdapter:
    """A client of its own; nothing is sent until its first command."""
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=REPLY_S,
            socket_connect_timeout=REPLY_S,
            socket_keepalive=True,
            socket_keepalive_options=KEEPALIVE,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
            client_name="headway-watcher",
            protocol=2,
        )
    except ValueError as error:
        raise Unavailable(
            f"{redact(url)!r} is not the address of a Redis: {error}.",
            hint="REDIS_URL looks like redis://host:6379/0",
        ) from error
    client.response_callbacks.clear()
    return RedisAdapter(client, int(client.get_connection_kwargs().get("db") or 0), redact(url))


class RqAdapter(RqProto):
    """RQ's own classes say where things are."""

    def registries(self, queue: str) -> QueueKeys:
        return QueueKeys(
            failed=FailedJobRegistry(queue).key,
            started=StartedJobRegistry(queue).key,
            canceled=CanceledJobRegistry(queue).key,
        )

    def executions(self, job_id: str) -> str:
        return _executions_key(job_id)


#: RQ's key methods want a connection only to keep it; this one is never connected.
_NOWHERE = redis.Redis()
_results_key: Callable[[str], str] = Result.get_key


def _executions_key(job_id: str) -> str:
    return ExecutionRegistry(job_id, _NOWHERE).key


def _execution_key(member: str) -> str:
    job_id, execution_id = split_member(member)
    return Execution(execution_id, job_id, _NOWHERE).key


class RedisAdapter(RedisProto, RedisHashes):
    """Both ports that are Redis commands."""

    def __init__(self, client: Client, db: int, name: str) -> None:
        self._client = client
        self._db = db
        self._name = name

    @property
    def db(self) -> int:
        return self._db

    def pubsub(self) -> PubSubProto:
        return PubSubAdapter(self._client.pubsub(), self._name)

    def config_get(self, name: str) -> str | None:
        pairs = _items(self._command("CONFIG", "GET", name))
        return _text(pairs[1]) if len(pairs) == 2 else None

    def time(self) -> float:
        seconds, microseconds = _items(self._command("TIME"))
        return _number(seconds) + _number(microseconds) / 1_000_000

    def zrevrangebyscore(self, key: str, offset: int, count: int) -> list[Member]:
        # ZREVRANGEBYSCORE by its name since 6.2.
        return _members(
            self._command(
                "ZRANGE", key, "+inf", "-inf", "BYSCORE", "REV", "LIMIT", offset, count, "WITHSCORES"
            )
        )  # fmt: skip

    def zrange(self, key: str, start: int, count: int) -> list[Member]:
        return _members(self._command("ZRANGE", key, start, start + count - 1, "WITHSCORES"))

    def zcard(self, key: str) -> int:
        return int(_number(self._command("ZCARD", key)))

    def zrank(self, key: str, member: str) -> int | None:
        reply = self._command("ZRANK", key, member)
        return None if reply is None else int(_number(reply))

    def zscore(self, key: str, member: str) -> float | None:
        reply = self._command("ZSCORE", key, member)
        return None if reply is None else _number(reply)

    def zadd(self, key: str, member: str, score: float) -> None:
        self._command("ZADD", key, score, member)

    def unlink(self, key: str) -> None:
        self._command("UNLINK", key)

    def jobs(self, job_ids: Sequence[str], *, running: bool) -> list[JobRecord]:
        commands: list[tuple[Word, ...]] = []
        for job_id in job_ids:
            commands.append(("HMGET", Job.key_for(job_id), *_JOB_FIELDS))
            commands.append(("XREVRANGE", _results_key(job_id), "+", "-", "COUNT", _RESULTS))
            if running:
                commands.append(("ZRANGE", _executions_key(job_id), -1, -1))
        replies, step = self._commands(commands), 3 if running else 2
        return [
            _job(job_id, *replies[number : number + step])
            for job_id, number in zip(job_ids, range(0, len(replies), step), strict=True)
        ]

    def executions(self, members: Sequence[str]) -> list[ExecutionRecord]:
        commands: list[tuple[Word, ...]] = []
        for member in members:
            commands.append(("HMGET", _execution_key(member), "created_at", "worker_name"))
            commands.append(("HMGET", Job.key_for(split_member(member)[0]), "timeout", "worker_name"))
        replies = [_items(reply) for reply in self._commands(commands)]
        return [
            ExecutionRecord(
                exists=execution[0] is not None,
                created_at=_number(execution[0] or 0),
                worker=_text(execution[1] or job[1] or b""),
                timeout=_number(job[0] or 0),
            )
            for execution, job in zip(replies[0::2], replies[1::2], strict=True)
        ]

    def publish(self, channel: str, stream: str, stream_length: int, bodies: Sequence[str]) -> None:
        commands: list[tuple[Word, ...]] = []
        for body in bodies:
            if stream:
                commands.append(("XADD", stream, "MAXLEN", "~", stream_length, "*", "event", body))
            commands.append(("PUBLISH", channel, body))
        if not stream:
            self._commands(commands)
            return
        # Together or not at all: a server that refuses to publish must not keep one more copy at each of our restarts.
        replies = self._commands([("MULTI",), *commands, ("EXEC",)])
        for reply in _items(replies[-1]):
            if isinstance(reply, redis.exceptions.RedisError):
                raise ServerRefused(f"Redis at {self._name} refused to publish: {redact(str(reply))}")

    def setnx(self, key: str, value: str) -> str:
        self._command("SET", key, value, "NX")
        return _text(self._command("GET", key))

    def hmget(self, key: str, fields: Sequence[str]) -> list[str | None]:
        return [None if value is None else _text(value) for value in _items(self._command("HMGET", key, *fields))]

    def hgetall(self, key: str) -> dict[str, str]:
        flat = _items(self._command("HGETALL", key))
        return {_text(name): _text(value) for name, value in zip(flat[0::2], flat[1::2], strict=True)}

    def highest(self, key: str) -> float | None:
        found = self.zrevrangebyscore(key, 0, 1)
        return found[0][1] if found else None

    def lowest(self, key: str, before: float, count: int) -> list[str]:
        return [
            _text(member)
            for member in _items(self._command("ZRANGE", key, "-inf", f"({before!r}", "BYSCORE", "LIMIT", 0, count))
        ]

    def together(self, changes: Sequence[Change]) -> None:
        if changes:
            self._commands([("MULTI",), *changes, ("EXEC",)])

    def close(self) -> None:
        self._client.close()

    def _command(self, *words: Word) -> object:
        with _translated(self._name, str(words[0])):
            return self._client.execute_command(*words)

    def _commands(self, commands: Sequence[tuple[Word, ...]]) -> list[object]:
        with _translated(self._name, str(commands[0][0])):
            pipe = self._client.pipeline(transaction=False)
            for words in commands:
                pipe.execute_command(*words)
            return pipe.execute()


class PubSubAdapter(PubSubProto):
    def __init__(self, pubsub: PubSub, name: str) -> None:
        self._pubsub = pubsub
        self._name = name

    def psubscribe(self, *patterns: str) -> None:
        with _translated(self._name, "PSUBSCRIBE"):
            self._pubsub.psubscribe(*patterns)

    def punsubscribe(self, *patterns: str) -> None:
        with _translated(self._name, "PUNSUBSCRIBE"):
            self._pubsub.punsubscribe(*patterns)

    def get_message(self, timeout: float) -> Message | None:
        with _translated(self._name, "PSUBSCRIBE"):
            # The wait is for a message to begin. Given to get_message, newer releases of redis-py would also allow
            # no more than that for the rest of it, and take a message that is half here for a dead link.
            if not self._pubsub.connection.can_read(timeout):
                return None
            found = self._pubsub.get_message(timeout=REPLY_S)
        if found is None:
            return None
        kind = _KINDS.get(_text(found["type"]))
        if kind is None:
            raise ServerRefused(f"Redis at {self._name} sent a message of an unknown kind: {found['type']!r}")
        if kind == "event":
            return Message(kind, _text(found["channel"]), _text(found["data"]))
        return Message(kind, "" if kind == "pong" else _text(found["channel"]))

    def ping(self) -> None:
        with _translated(self._name, "PING"):
            self._pubsub.ping("headway")

    def close(self) -> None:
        self._pubsub.close()


@contextmanager
def _translated(name: str, command: str) -> Iterator[None]:
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise Unavailable(
            f"Redis at {name} cannot be reached ({command}): {redact(str(error))}",
            hint="Check that it runs and that REDIS_URL is right; the supervisor starts the watcher again.",
        ) from error
    except redis.exceptions.RedisError as error:
        raise ServerRefused(f"Redis at {name} refused {command}: {redact(str(error))}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Replies


def _text(reply: object) -> str:
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    if isinstance(reply, str):
        return reply
    raise ServerRefused(f"Redis answered {type(reply).__name__} where a text belongs.")


def _number(reply: object) -> float:
    try:
        if isinstance(reply, bytes | str | int | float):
            return float(reply)
    except ValueError:
        pass
    raise ServerRefused(f"Redis answered {redact(repr(reply))[:80]} where a number belongs.")


def _items(reply: object) -> list[object]:
    if isinstance(reply, list):
        return reply
    raise ServerRefused(f"Redis answered {type(reply).__name__} where a list belongs.")


def _members(reply: object) -> list[Member]:
    flat = _items(reply)
    return [(_text(member), _number(score)) for member, score in zip(flat[0::2], flat[1::2], strict=True)]


def _job(job_id: str, fields: object, results: object, executions: object = None) -> JobRecord:
    status, created_at, enqueued_at, started_at, ended_at, worker, data = (
        value if isinstance(value, bytes) else b"" for value in _items(fields)
    )
    running = [] if executions is None else _items(executions)
    return JobRecord(
        job_id=job_id,
        exists=bool(created_at),  # a late heartbeat may leave a hash with nothing but itself in it
        status=_text(status),
        created_at=_text(created_at),
        enqueued_at=_text(enqueued_at),
        started_at=_text(started_at),
        ended_at=_text(ended_at),
        worker=_text(worker),
        running=_text(running[0]) if running else "",
        results=tuple(_result(*_items(entry)) for entry in _items(results)),
        payload=data,
    )


def _result(entry_id: object, entry: object) -> ResultRecord:
    flat = _items(entry)
    fields = {_text(name): value for name, value in zip(flat[0::2], flat[1::2], strict=True)}
    exception = fields.get("exc_string")
    return ResultRecord(
        id=_text(entry_id),
        # A type that a later RQ may add is at any rate an end we know nothing of: told as a failure, not dropped.
        outcome=_OUTCOMES.get(int(_number(fields.get("type", 0))), "failed"),
        execution_id=_text(fields.get("execution_id", "")),
        worker=_text(fields.get("worker_name", "")),
        started_at=_moment(fields.get("execution_started_at")),
        ended_at=_moment(fields.get("execution_ended_at")),
        exception=exception if isinstance(exception, bytes) else b"",
    )


def _moment(seconds: object) -> str:
    """RQ writes a job's times as text and a result's as seconds; events have them alike."""
    return "" if seconds is None else moment(_number(seconds))
