"""The ports, implemented with redis-py and RQ. The only module of this package that imports either.

`headway._redis.connect` makes the client, which never retries. A lost reply and a cut connection both raise. So the
client never resubscribes by itself, and no event is missed silently. Replies are read without redis-py's response
callbacks, because their results differ between its releases. The functions at the end of this module convert replies
into typed values, or raise.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Literal, Protocol
from urllib.parse import parse_qsl, urlsplit

from headway import _redis
from headway.errors import InvalidInput, MissingExtra, ServerRefused
from headway.telemetry import redact
from headway.watcher.ports import (
    ExecutionRecord,
    GuardProto,
    Member,
    Message,
    MessageKind,
    PubSubProto,
    QueueKeys,
    RedisHashes,
    RedisProto,
    ResultRecord,
    RqJobRecord,
    RqProto,
    WatcherPorts,
    Write,
)
from headway.watcher.reports import moment, split_member

try:
    import redis
    import redis.exceptions
    from rq.exceptions import DeserializationError, InvalidJobOperation, NoSuchJobError
    from rq.executions import Execution, ExecutionRegistry
    from rq.job import Job
    from rq.registry import CanceledJobRegistry, FailedJobRegistry, StartedJobRegistry
    from rq.results import Result
except ImportError as error:
    raise MissingExtra("redis", "The watcher") from error

#: Timeout of a connect and of a reply, in seconds.
REPLY_S = 5.0

#: The kernel detects a vanished peer after 10 + 2 * 5 s, without any command.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2}

#: The query parameters that an address may have. The watcher sets the others (timeouts, retries, protocol) itself.
_URL_OPTIONS = frozenset(
    ["db", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"]
)

Word = str | int | float | bytes

_JOB_FIELDS = ("status", "created_at", "enqueued_at", "started_at", "ended_at", "worker_name")
_RESULTS = 10  # RQ keeps at most this many results of a job
_OUTCOMES: Mapping[int, Literal["successful", "failed", "retried"]] = {
    Result.Type.SUCCESSFUL.value: "successful",
    Result.Type.FAILED.value: "failed",
    Result.Type.STOPPED.value: "failed",
    Result.Type.RETRIED.value: "retried",
    Result.Type.MAX_RETRIES_EXCEEDED.value: "failed",
}
_KINDS: Mapping[str, MessageKind] = {
    "pmessage": "event",
    "message": "event",
    "psubscribe": "subscribed",
    "subscribe": "subscribed",
    "punsubscribe": "unsubscribed",
    "unsubscribe": "unsubscribed",
    "pong": "pong",
}


class Pipe(Protocol):
    """The part we use of redis-py's pipeline."""

    def execute_command(self, *words: Word) -> object: ...
    def execute(self, raise_on_error: bool = True) -> list[object]: ...
    def watch(self, *names: Word) -> object: ...
    def multi(self) -> None: ...
    def reset(self) -> None: ...


class Connection(Protocol):
    """The part we use of redis-py's connection."""

    def can_read(self, timeout: float) -> bool: ...


class PubSub(Protocol):
    """The part we use of redis-py's PubSub."""

    @property
    def connection(self) -> Connection: ...
    def psubscribe(self, *patterns: Word) -> object: ...
    def punsubscribe(self, *patterns: Word) -> object: ...
    def subscribe(self, *channels: Word) -> object: ...
    def unsubscribe(self, *channels: Word) -> object: ...
    def get_message(self, *, timeout: float) -> Mapping[str, object] | None: ...
    def ping(self, message: str) -> object: ...
    def close(self) -> object: ...


class Client(Protocol):
    """The part we use of redis-py's client."""

    def execute_command(self, *words: Word) -> object: ...
    def pipeline(self, *, transaction: bool) -> Pipe: ...
    def pubsub(self) -> PubSub: ...
    def close(self) -> object: ...


def default_ports() -> WatcherPorts:
    """Return the ports with redis-py, RQ and the monotonic clock."""
    return WatcherPorts(redis=connect, hashes=connect, rq=RqAdapter, clock=time.monotonic)


def connect(url: str, *, timeout: float = REPLY_S) -> RedisAdapter:
    """Return a new client. It connects at its first command."""
    server = checked_url(url)
    client = _redis.connect(url, role="queue", name="watcher", timeout=timeout, connect_timeout=timeout, decode=False)
    kwargs = client.get_connection_kwargs()
    if "path" in kwargs:
        kwargs.pop("socket_keepalive", None)  # redis-py rejects it for a Unix socket
    else:
        kwargs["socket_keepalive_options"] = KEEPALIVE
    client.response_callbacks.clear()
    return RedisAdapter(client, int(kwargs.get("db") or 0), server)


def checked_url(url: str) -> str:
    """Return ``host:port/db`` of a Redis URL. Raises `InvalidInput` if the watcher cannot use the URL.

    The error contains no part of the URL: if the password has an unescaped ``#``, ``/`` or ``?``, any part of the URL may
    be a part of the password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise _invalid_url("its host or port is invalid") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise _invalid_url("it must begin with redis://, rediss:// or unix://")
    if parts.fragment or "@" in parts.path + parts.query:
        raise _invalid_url("a character in it is not escaped")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not options.keys() <= _URL_OPTIONS:
        allowed = ", ".join(sorted(_URL_OPTIONS))
        raise _invalid_url(f"its options must be among {allowed}: the watcher sets the others itself")
    db = options.get("db") or (parts.path.strip("/") if parts.scheme != "unix" else "")
    if db and not (db.isascii() and db.isdigit()):
        raise _invalid_url("its database is not a number")
    if parts.scheme == "unix":
        return f"{parts.path}/{db or 0}"
    return f"{parts.hostname or 'localhost'}:{port}/{db or 0}"


def _invalid_url(why: str) -> InvalidInput:
    return InvalidInput(
        f"REDIS_URL is not a valid address: {why}.",
        hint="It looks like redis://user:password@host:6379/0; in a password write %23 for #, %2F for /, %3F for ?, "
        "%40 for @ and %25 for %.",
    )


class _Opaque:
    """An RQ serializer that leaves payloads unread: RQ's default is pickle, which may execute code when it is loaded."""

    @staticmethod
    def loads(content: bytes) -> bytes:
        return content

    @staticmethod
    def dumps(content: bytes) -> bytes:
        return content


def requeue_failed(url: str, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Requeue failed jobs as RQ does. Return the ids of those that were requeued.

    Each job is serialized once before anything changes, so a damaged job stays in the registry.
    """
    server, moved = checked_url(url), []
    with _translating(server):
        client = _redis.connect(
            url, role="queue", name="requeue", timeout=REPLY_S, connect_timeout=REPLY_S, decode=False
        )
        try:
            registry = FailedJobRegistry(queue, connection=client, serializer=_Opaque)
            for job_id in job_ids:
                try:
                    job = Job.fetch(job_id, connection=client, serializer=_Opaque)
                    job.to_dict(include_meta=True)
                except (NoSuchJobError, DeserializationError, ValueError, TypeError, KeyError, AttributeError):
                    continue
                try:
                    registry.requeue(job)
                except InvalidJobOperation:
                    continue  # requeued by another process
                moved.append(job_id)
        finally:
            client.close()
    return moved


class RqAdapter(RqProto):
    """Key names from RQ's own classes."""

    def registries(self, queue: str) -> QueueKeys:
        return QueueKeys(
            failed=FailedJobRegistry(queue).key,
            started=StartedJobRegistry(queue).key,
            canceled=CanceledJobRegistry(queue).key,
        )

    def executions(self, job_id: str) -> str:
        return _executions_key(job_id)


#: RQ's key methods require a connection. This one is never connected.
_NOWHERE = redis.Redis()
_results_key: Callable[[str], str] = Result.get_key


def _job_key(job_id: str) -> str:
    return f"{Job.redis_job_namespace_prefix}{job_id}"


def _executions_key(job_id: str) -> str:
    return ExecutionRegistry(job_id, _NOWHERE).key


def _execution_key(member: str) -> str:
    job_id, execution_id = split_member(member)
    return Execution(execution_id, job_id, _NOWHERE).key


class RedisAdapter(RedisProto, RedisHashes):
    """The commands of both Redis ports."""

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
        (reply,) = self._try([("CONFIG", "GET", name)], forgiving=redis.exceptions.ResponseError)
        pairs = [] if isinstance(reply, Exception) else _items(reply)
        return _text(pairs[1]) if len(pairs) == 2 else None

    def time(self) -> float:
        seconds, microseconds = _items(self._command("TIME"))
        return _number(seconds) + _number(microseconds) / 1_000_000

    def zrevrangebyscore(self, key: str, offset: int, count: int) -> list[Member]:
        return _members(
            self._command(
                "ZRANGE", key, "+inf", "-inf", "BYSCORE", "REV", "LIMIT", offset, count, "WITHSCORES"
            )
        )  # fmt: skip

    def zrange(self, key: str, start: int, count: int) -> list[Member]:
        return _members(self._command("ZRANGE", key, start, start + count - 1, "WITHSCORES"))

    def zscan(self, key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        following, members = _items(self._command("ZSCAN", key, cursor, "COUNT", count))
        return int(_number(following)), _members(members)

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

    def jobs(self, job_ids: Sequence[str], *, running: bool, payload: bool = False) -> list[RqJobRecord]:
        fields = (*_JOB_FIELDS, "data") if payload else _JOB_FIELDS
        commands: list[tuple[Word, ...]] = []
        for job_id in job_ids:
            commands.append(("HMGET", _job_key(job_id), *fields))
            commands.append(("XREVRANGE", _results_key(job_id), "+", "-", "COUNT", _RESULTS))
            if running:
                commands.append(("ZRANGE", _executions_key(job_id), -1, -1))
        replies, step = self._try(commands), 3 if running else 2
        return [
            _job(job_id, *replies[number : number + step])
            for job_id, number in zip(job_ids, range(0, len(replies), step), strict=True)
        ]

    def have_results(self, job_ids: Sequence[str]) -> list[bool]:
        return [reply == 1 for reply in self._commands([("EXISTS", _results_key(job_id)) for job_id in job_ids])]

    def executions(self, members: Sequence[str]) -> list[ExecutionRecord]:
        commands: list[tuple[Word, ...]] = []
        for member in members:
            commands.append(("HMGET", _execution_key(member), "created_at", "worker_name"))
            commands.append(("HMGET", _job_key(split_member(member)[0]), "timeout", "worker_name"))
        replies = [_values(reply, 2) for reply in self._try(commands)]
        return [
            ExecutionRecord(
                exists=_seconds(execution[0]) is not None,
                created_at=_seconds(execution[0]) or 0.0,
                worker=_text(execution[1] or job[1]),
                timeout=_seconds(job[0]) or 0.0,
            )
            for execution, job in zip(replies[0::2], replies[1::2], strict=True)
        ]

    def guard(self, keys: Sequence[str]) -> GuardProto:
        return GuardAdapter(self._client, [_word(key) for key in keys])

    def publish(self, channel: str, stream: str, stream_length: int, bodies: Sequence[str]) -> None:
        commands: list[tuple[Word, ...]] = []
        for body in bodies:
            if stream:
                commands.append(("XADD", stream, "MAXLEN", "~", stream_length, "*", "event", body))
            commands.append(("PUBLISH", channel, body))
        if not stream:
            self._commands(commands)
            return
        # A transaction: if the server rejects PUBLISH, the stream must not grow with each restart of the watcher.
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

    def together(self, changes: Sequence[Write]) -> None:
        if changes:
            self._commands([("MULTI",), *changes, ("EXEC",)])

    def close(self) -> None:
        self._client.close()

    def _command(self, *words: Word) -> object:
        with _translating(self._name):
            return self._client.execute_command(*map(_word, words))

    def _commands(self, commands: Sequence[tuple[Word, ...]]) -> list[object]:
        with _translating(self._name):
            return self._pipe(commands).execute() if commands else []

    def _try(self, commands: Sequence[tuple[Word, ...]], *, forgiving: type[Exception] | None = None) -> list[object]:
        """Run commands. An error about a key's type, or of the ``forgiving`` class, is returned in place of its reply."""
        with _translating(self._name):
            replies = self._pipe(commands).execute(raise_on_error=False) if commands else []
            for reply in replies:
                if isinstance(reply, Exception) and not (
                    str(reply).startswith("WRONGTYPE") or (forgiving is not None and isinstance(reply, forgiving))
                ):
                    raise reply
            return replies

    def _pipe(self, commands: Sequence[tuple[Word, ...]]) -> Pipe:
        pipe = self._client.pipeline(transaction=False)
        for words in commands:
            pipe.execute_command(*map(_word, words))
        return pipe


class GuardAdapter(GuardProto):
    """Uses WATCH: the server aborts a transaction if a watched key was changed by any command.

    The next WATCH begins before the last transaction is executed, so that no change falls in between. If the server closed
    the idle connection or denies WATCH, the answer is False.
    """

    def __init__(self, client: Client, keys: Sequence[Word]) -> None:
        self._client = client
        self._keys = keys
        self._pipe = self._watch()

    def untouched(self) -> bool:
        before, self._pipe = self._pipe, self._watch()
        if before is None:
            return False
        try:
            before.multi()
            before.execute()
        except (redis.exceptions.RedisError, OSError):
            return False
        return True

    def _watch(self) -> Pipe | None:
        pipe = self._client.pipeline(transaction=True)
        try:
            pipe.watch(*self._keys)
        except (redis.exceptions.RedisError, OSError):
            pipe.reset()
            return None
        return pipe


class PubSubAdapter(PubSubProto):
    """A redis-py PubSub."""

    def __init__(self, pubsub: PubSub, name: str) -> None:
        self._pubsub = pubsub
        self._name = name

    def psubscribe(self, *patterns: str) -> None:
        with _translating(self._name):
            self._pubsub.psubscribe(*map(_word, patterns))

    def punsubscribe(self, *patterns: str) -> None:
        with _translating(self._name):
            self._pubsub.punsubscribe(*map(_word, patterns))

    def subscribe(self, *channels: str) -> None:
        with _translating(self._name):
            self._pubsub.subscribe(*map(_word, channels))

    def unsubscribe(self, *channels: str) -> None:
        with _translating(self._name):
            self._pubsub.unsubscribe(*map(_word, channels))

    def get_message(self, timeout: float) -> Message | None:
        with _translating(self._name):
            # Waits for the beginning of a message. As get_message's timeout, newer redis-py releases would apply it to the
            # whole message, and report a half-received one as a dead connection.
            if not self._pubsub.connection.can_read(timeout):
                return None
            found = self._pubsub.get_message(timeout=REPLY_S)
        if found is None:
            return None
        kind = _KINDS.get(_text(found["type"]))
        if kind is None:
            raise ServerRefused(f"Redis at {self._name} sent a message of an unknown type: {found['type']!r}")
        if kind == "event":
            return Message(kind, _text(found["channel"]), _text(found["data"]))
        return Message(kind, "" if kind == "pong" else _text(found["channel"]))

    def ping(self) -> None:
        with _translating(self._name):
            self._pubsub.ping("headway")

    def close(self) -> None:
        self._pubsub.close()


@contextmanager
def _translating(name: str) -> Iterator[None]:
    try:
        yield
    except _redis.failures() as error:
        raise _redis.translate(error, name) from error


def _job(job_id: str, fields: object, results: object, executions: object = None) -> RqJobRecord:
    status, created_at, enqueued_at, started_at, ended_at, worker, *data = _values(fields, len(_JOB_FIELDS))
    running = _entries(executions)
    return RqJobRecord(
        job_id=job_id,
        exists=bool(created_at),  # a late heartbeat may create a hash with only itself in it
        status=_text(status),
        created_at=_text(created_at),
        enqueued_at=_text(enqueued_at),
        started_at=_text(started_at),
        ended_at=_text(ended_at),
        worker=_text(worker),
        running=_text(running[0]) if running else "",
        results=tuple(_result(*_items(entry)) for entry in _entries(results)),
        payload=data[0] if data else b"",
    )


def _result(entry_id: object, entry: object) -> ResultRecord:
    flat = _items(entry)
    fields = {_text(name): value for name, value in zip(flat[0::2], flat[1::2], strict=True)}
    exception = fields.get("exc_string")
    return ResultRecord(
        id=_text(entry_id),
        # A type added by a later RQ release is reported as a failure, not dropped.
        outcome=_OUTCOMES.get(int(_seconds(fields.get("type")) or 0), "failed"),
        execution_id=_text(fields.get("execution_id", "")),
        worker=_text(fields.get("worker_name", "")),
        started_at=_moment(fields.get("execution_started_at")),
        ended_at=_moment(fields.get("execution_ended_at")),
        exception=exception if isinstance(exception, bytes) else b"",
    )


def _moment(value: object) -> str:
    """Convert a result's time (seconds) to the text format of a job's times."""
    seconds = _seconds(value)
    return "" if seconds is None else moment(seconds)


# ---------------------------------------------------------------------------------------------------------------------
# Replies. A value of a job that makes no sense counts as absent.


def _word(value: Word) -> Word:
    """Encode a command word. Names may consist of any bytes: `_text` decodes them losslessly."""
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def _text(reply: object) -> str:
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "surrogateescape")
    if isinstance(reply, str):
        return reply
    raise ServerRefused(f"Redis answered {type(reply).__name__} instead of a text.")


def _number(reply: object) -> float:
    try:
        if isinstance(reply, bytes | str | int | float):
            return float(reply)
    except ValueError:
        pass
    raise ServerRefused(f"Redis answered {redact(repr(reply))[:80]} instead of a number.")


def _items(reply: object) -> list[object]:
    if isinstance(reply, list):
        return reply
    raise ServerRefused(f"Redis answered {type(reply).__name__} instead of a list.")


def _members(reply: object) -> list[Member]:
    flat = _items(reply)
    return [(_text(member), _number(score)) for member, score in zip(flat[0::2], flat[1::2], strict=True)]


def _values(reply: object, count: int) -> list[bytes]:
    """Return the values of an HMGET. A key of another type has none."""
    found = reply if isinstance(reply, list) else [None] * count
    return [value if isinstance(value, bytes) else b"" for value in found]


def _entries(reply: object) -> list[object]:
    return reply if isinstance(reply, list) else []


def _seconds(value: object) -> float | None:
    """Parse a number of a job's record. None if it is not a finite number."""
    try:
        found = float(value) if isinstance(value, bytes) else float("nan")
    except ValueError:
        return None
    return found if isfinite(found) else None
