"""The ports on redis-py and RQ. The only module of this package that imports either.

The client is made by `headway._redis.connect`: it never retries. A command whose reply was lost and a link that was cut
both raise, so that nothing is resubscribed behind our back and no event is missed silently. Replies are taken raw (no
response callbacks), because what redis-py makes of them differs between its releases; `headway.watcher.replies` turns each
into a typed value or refuses it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol
from urllib.parse import parse_qsl, urlsplit

from headway import _redis
from headway.errors import InvalidInput, MissingExtra, ServerRefused
from headway.telemetry import redact
from headway.watcher import replies as raw
from headway.watcher.logic import moment, split_member
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
from headway.watcher.replies import Word

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

#: Seconds a connect or a reply may take.
REPLY_S = 5.0

#: A peer that vanished without a word is noticed by the kernel after 10 + 2 * 5 s, at no cost in commands.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2}

#: What may stand behind the question mark of an address. The rest is ours to decide (limits, retries, the protocol).
_URL_OPTIONS = frozenset(
    ["db", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"]
)

_JOB_FIELDS = ("status", "created_at", "enqueued_at", "started_at", "ended_at", "worker_name")
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
    "message": "event",
    "psubscribe": "subscribed",
    "subscribe": "subscribed",
    "punsubscribe": "unsubscribed",
    "unsubscribe": "unsubscribed",
    "pong": "pong",
}


class Pipe(Protocol):
    """What we use of redis-py's pipeline."""

    def execute_command(self, *words: Word) -> object: ...
    def execute(self, raise_on_error: bool = True) -> list[object]: ...
    def watch(self, *names: Word) -> object: ...
    def multi(self) -> None: ...
    def reset(self) -> None: ...


class Connection(Protocol):
    """What we use of redis-py's connection."""

    def can_read(self, timeout: float) -> bool: ...


class PubSub(Protocol):
    """What we use of redis-py's PubSub."""

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
    """What we use of redis-py's client."""

    def execute_command(self, *words: Word) -> object: ...
    def pipeline(self, *, transaction: bool) -> Pipe: ...
    def pubsub(self) -> PubSub: ...
    def close(self) -> object: ...


def default_ports() -> WatcherPorts:
    return WatcherPorts(redis=connect, hashes=connect, rq=RqAdapter, clock=time.monotonic)


def connect(url: str, *, timeout: float = REPLY_S) -> RedisAdapter:
    """A client of its own; nothing is sent until its first command."""
    place = checked_url(url)
    client = _redis.connect(url, role="queue", name="watcher", timeout=timeout, connect_timeout=timeout, decode=False)
    kwargs = client.get_connection_kwargs()
    if "path" in kwargs:
        kwargs.pop("socket_keepalive", None)  # a peer on this machine does not vanish; redis-py refuses it there
    else:
        kwargs["socket_keepalive_options"] = KEEPALIVE
    client.response_callbacks.clear()
    return RedisAdapter(client, int(kwargs.get("db") or 0), place)


def checked_url(url: str) -> str:
    """``host:port/db`` of an address that we can use as it stands; `InvalidInput` for any other.

    No part of a refused address is repeated: with an unescaped ``#``, ``/`` or ``?`` in the password, any part of it
    may be a part of the password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise _no_address("its host or port makes no sense") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise _no_address("it begins with none of redis://, rediss:// and unix://")
    if parts.fragment or "@" in parts.path + parts.query:
        raise _no_address("a character in it is not escaped")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not options.keys() <= _URL_OPTIONS:
        allowed = ", ".join(sorted(_URL_OPTIONS))
        raise _no_address(f"options other than {allowed} are not taken from it: limits and protocol are the watcher's")
    db = options.get("db") or (parts.path.strip("/") if parts.scheme != "unix" else "")
    if db and not (db.isascii() and db.isdigit()):
        raise _no_address("its database is not a number")
    if parts.scheme == "unix":
        return f"{parts.path}/{db or 0}"
    return f"{parts.hostname or 'localhost'}:{port}/{db or 0}"


def _no_address(why: str) -> InvalidInput:
    return InvalidInput(
        f"REDIS_URL is not an address that can be used: {why}.",
        hint="It looks like redis://user:password@host:6379/0; in a password write %23 for #, %2F for /, %3F for ?, "
        "%40 for @ and %25 for %.",
    )


class _AsItIs:
    """What a job contains, neither read nor changed: RQ's default is pickle, which can run anything when it is read."""

    @staticmethod
    def loads(content: bytes) -> bytes:
        return content

    @staticmethod
    def dumps(content: bytes) -> bytes:
        return content


def requeue_failed(url: str, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Take jobs out of the failed registry and put them into their queue, as RQ does it; those that were. What a job looks
    like when it is written back is tried before anything is changed, so a damaged one stays where it is."""
    place, moved = checked_url(url), []
    with _translating(place):
        client = _redis.connect(
            url, role="queue", name="requeue", timeout=REPLY_S, connect_timeout=REPLY_S, decode=False
        )
        try:
            registry = FailedJobRegistry(queue, connection=client, serializer=_AsItIs)
            for job_id in job_ids:
                try:
                    job = Job.fetch(job_id, connection=client, serializer=_AsItIs)
                    job.to_dict(include_meta=True)
                except (NoSuchJobError, DeserializationError, ValueError, TypeError, KeyError, AttributeError):
                    continue
                try:
                    registry.requeue(job)
                except InvalidJobOperation:
                    continue  # somebody else was faster
                moved.append(job_id)
        finally:
            client.close()
    return moved


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


def _job_key(job_id: str) -> str:
    return f"{Job.redis_job_namespace_prefix}{job_id}"


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
        (reply,) = self._try([("CONFIG", "GET", name)], forgiving=redis.exceptions.ResponseError)
        pairs = [] if isinstance(reply, Exception) else raw.items(reply)
        return raw.text(pairs[1]) if len(pairs) == 2 else None

    def time(self) -> float:
        seconds, microseconds = raw.items(self._command("TIME"))
        return raw.number(seconds) + raw.number(microseconds) / 1_000_000

    def zrevrangebyscore(self, key: str, offset: int, count: int) -> list[Member]:
        # ZREVRANGEBYSCORE by its name since 6.2.
        return raw.members(
            self._command(
                "ZRANGE", key, "+inf", "-inf", "BYSCORE", "REV", "LIMIT", offset, count, "WITHSCORES"
            )
        )  # fmt: skip

    def zrange(self, key: str, start: int, count: int) -> list[Member]:
        return raw.members(self._command("ZRANGE", key, start, start + count - 1, "WITHSCORES"))

    def zscan(self, key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        following, members = raw.items(self._command("ZSCAN", key, cursor, "COUNT", count))
        return int(raw.number(following)), raw.members(members)

    def zcard(self, key: str) -> int:
        return int(raw.number(self._command("ZCARD", key)))

    def zrank(self, key: str, member: str) -> int | None:
        reply = self._command("ZRANK", key, member)
        return None if reply is None else int(raw.number(reply))

    def zscore(self, key: str, member: str) -> float | None:
        reply = self._command("ZSCORE", key, member)
        return None if reply is None else raw.number(reply)

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
        replies = [raw.values(reply, 2) for reply in self._try(commands)]
        return [
            ExecutionRecord(
                exists=raw.seconds(execution[0]) is not None,
                created_at=raw.seconds(execution[0]) or 0.0,
                worker=raw.text(execution[1] or job[1]),
                timeout=raw.seconds(job[0]) or 0.0,
            )
            for execution, job in zip(replies[0::2], replies[1::2], strict=True)
        ]

    def guard(self, keys: Sequence[str]) -> GuardProto:
        return GuardAdapter(self._client, [raw.word(key) for key in keys])

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
        for reply in raw.items(replies[-1]):
            if isinstance(reply, redis.exceptions.RedisError):
                raise ServerRefused(f"Redis at {self._name} refused to publish: {redact(str(reply))}")

    def setnx(self, key: str, value: str) -> str:
        self._command("SET", key, value, "NX")
        return raw.text(self._command("GET", key))

    def hmget(self, key: str, fields: Sequence[str]) -> list[str | None]:
        return [None if value is None else raw.text(value) for value in raw.items(self._command("HMGET", key, *fields))]

    def hgetall(self, key: str) -> dict[str, str]:
        flat = raw.items(self._command("HGETALL", key))
        return {raw.text(name): raw.text(value) for name, value in zip(flat[0::2], flat[1::2], strict=True)}

    def highest(self, key: str) -> float | None:
        found = self.zrevrangebyscore(key, 0, 1)
        return found[0][1] if found else None

    def lowest(self, key: str, before: float, count: int) -> list[str]:
        return [
            raw.text(member)
            for member in raw.items(self._command("ZRANGE", key, "-inf", f"({before!r}", "BYSCORE", "LIMIT", 0, count))
        ]

    def together(self, changes: Sequence[Write]) -> None:
        if changes:
            self._commands([("MULTI",), *changes, ("EXEC",)])

    def close(self) -> None:
        self._client.close()

    def _command(self, *words: Word) -> object:
        with _translating(self._name):
            return self._client.execute_command(*map(raw.word, words))

    def _commands(self, commands: Sequence[tuple[Word, ...]]) -> list[object]:
        with _translating(self._name):
            return self._pipe(commands).execute() if commands else []

    def _try(self, commands: Sequence[tuple[Word, ...]], *, forgiving: type[Exception] | None = None) -> list[object]:
        """The same, with an error in the place of its reply when a key is of a wrong type, or of the ``forgiving``
        class."""
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
            pipe.execute_command(*map(raw.word, words))
        return pipe


class GuardAdapter(GuardProto):
    """WATCH: the server fails a transaction when a watched key was touched, by whichever command.

    The next one watches before the last one is asked, so that nothing happens unnoticed in between. A server that
    cannot say (it closed the connection because it was idle, it denies WATCH) is answered for with False.
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
    def __init__(self, pubsub: PubSub, name: str) -> None:
        self._pubsub = pubsub
        self._name = name

    def psubscribe(self, *patterns: str) -> None:
        with _translating(self._name):
            self._pubsub.psubscribe(*map(raw.word, patterns))

    def punsubscribe(self, *patterns: str) -> None:
        with _translating(self._name):
            self._pubsub.punsubscribe(*map(raw.word, patterns))

    def subscribe(self, *channels: str) -> None:
        with _translating(self._name):
            self._pubsub.subscribe(*map(raw.word, channels))

    def unsubscribe(self, *channels: str) -> None:
        with _translating(self._name):
            self._pubsub.unsubscribe(*map(raw.word, channels))

    def get_message(self, timeout: float) -> Message | None:
        with _translating(self._name):
            # The wait is for a message to begin. Given to get_message, newer releases of redis-py would also allow
            # no more than that for the rest of it, and take a message that is half here for a dead link.
            if not self._pubsub.connection.can_read(timeout):
                return None
            found = self._pubsub.get_message(timeout=REPLY_S)
        if found is None:
            return None
        kind = _KINDS.get(raw.text(found["type"]))
        if kind is None:
            raise ServerRefused(f"Redis at {self._name} sent a message of an unknown kind: {found['type']!r}")
        if kind == "event":
            return Message(kind, raw.text(found["channel"]), raw.text(found["data"]))
        return Message(kind, "" if kind == "pong" else raw.text(found["channel"]))

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
    status, created_at, enqueued_at, started_at, ended_at, worker, *data = raw.values(fields, len(_JOB_FIELDS))
    running = raw.entries(executions)
    return RqJobRecord(
        job_id=job_id,
        exists=bool(created_at),  # a late heartbeat may leave a hash with nothing but itself in it
        status=raw.text(status),
        created_at=raw.text(created_at),
        enqueued_at=raw.text(enqueued_at),
        started_at=raw.text(started_at),
        ended_at=raw.text(ended_at),
        worker=raw.text(worker),
        running=raw.text(running[0]) if running else "",
        results=tuple(_result(*raw.items(entry)) for entry in raw.entries(results)),
        payload=data[0] if data else b"",
    )


def _result(entry_id: object, entry: object) -> ResultRecord:
    flat = raw.items(entry)
    fields = {raw.text(name): value for name, value in zip(flat[0::2], flat[1::2], strict=True)}
    exception = fields.get("exc_string")
    return ResultRecord(
        id=raw.text(entry_id),
        # A type that a later RQ may add is at any rate an end we know nothing of: told as a failure, not dropped.
        outcome=_OUTCOMES.get(int(raw.seconds(fields.get("type")) or 0), "failed"),
        execution_id=raw.text(fields.get("execution_id", "")),
        worker=raw.text(fields.get("worker_name", "")),
        started_at=_moment(fields.get("execution_started_at")),
        ended_at=_moment(fields.get("execution_ended_at")),
        exception=exception if isinstance(exception, bytes) else b"",
    )


def _moment(value: object) -> str:
    """RQ writes a job's times as text and a result's as seconds; events have them alike."""
    seconds = raw.seconds(value)
    return "" if seconds is None else moment(seconds)
