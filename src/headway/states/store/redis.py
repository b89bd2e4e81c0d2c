"""States in Redis: a hash of the current states and a stream of the changes, both written by one script.

They are as durable as that Redis (``appendonly yes``). If it is wiped, the job is gone, and writers and subscribers get
`JobGone`. A blocking read of the stream wakes the listener. Every entry carries the job's change number, so the listener
detects a trimmed stream or a re-created job, and lists again.

A Redis that was restored to an earlier moment (an RDB file, a failover) has the same job with fewer or other changes. The
store continues the changes read so far only if the stream still contains the entry read last. If that entry was trimmed,
the server must at least be the same process with the same data (run id and replication id).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from headway import _redis
from headway.core.retry import REDIS_OPERATION, RetryPolicy, call
from headway.errors import HeadwayError
from headway.states.state import State, encoded, moment
from headway.states.store.contract import (
    RECENT_LIMIT,
    Change,
    JobRecord,
    Mark,
    Relist,
    Snapshot,
    job_gone,
    marked_deleted,
    no_such_job,
    readable,
)
from headway.telemetry import Log

if TYPE_CHECKING:
    from redis import Redis

log = Log("states")

#: Entries of the stream that are kept for listeners that are behind or lost their connection.
LOG_LENGTH = 16_384
#: Stream entries per read.
BATCH = 512
#: Stream entries per read of a history.
HISTORY_PAGE = 1_000
#: A blocking read answers at least this often, in milliseconds. A server counts as dead after `SILENCE` seconds.
HEARTBEAT_MS = 2_000
SILENCE = 6.0
#: Retries while opening a store, for a short outage.
OPENING = RetryPolicy(retries=3, base=0.25, cap=1.0)

#: A connection counts as alive for this many seconds after a reply.
WARM_SECONDS = 1.0
#: The position before the first entry of a stream.
BEGINNING = "0-0"


class RedisStates:
    """A `Backend` over one Redis database."""

    kind = "redis"
    write_policy = REDIS_OPERATION
    listens_at_once = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Redis = _redis.connect(url, role="state", name="states")
        self._warm: list[tuple[Any, float]] = []  # idle connections and the time of their last reply
        self._closed = False
        self._eviction = _redis.EvictionWatch(
            url, lambda what: log.critical(f"{what}", reason="CONFIG SET maxmemory-policy")
        )
        try:
            call(self._preflight, OPENING, retry_on=_Away)
        except _Away as away:
            self._client.close()
            raise away.final from away.__cause__
        except BaseException:
            self._client.close()
            raise

    def _preflight(self) -> None:
        try:
            _redis.preflight(self._client, role="state", where=self._url)
        except _redis.failures() as error:
            final = _redis.translate(error, self._url)
            raise (_Away(final) if _redis.is_transient(error) else final) from error

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except HeadwayError:
            raise
        except _redis.failures() as error:
            raise _redis.translate(error, self._url) from error
        except BaseException:
            # A signal handler raised. A connection that was interrupted during its handshake returns to the pool open, but
            # connected to database 0 instead of ours.
            self._client.connection_pool.disconnect(inuse_connections=False)
            raise
        finally:
            if self._closed:  # meanwhile, so `close` did not see the connection, which is idle again
                self._close_idle()

    def _run(self, name: str, keys: Sequence[str], *arguments: str | int) -> Any:
        """Run a script once.

        Recently used connections bypass the client's pool, whose health check takes as long as the round trip. A
        connection that failed, or was interrupted before its reply was read, is closed.
        """
        with self._translating():
            self._eviction.check(self._client)
            connection = self._connection()
            try:
                answer = _redis.script(name).on(connection, keys, arguments)
            except BaseException:
                connection.disconnect()
                self._client.connection_pool.release(connection)
                raise
            self._warm.append((connection, time.monotonic()))
            return answer

    def _connection(self) -> Any:
        try:
            connection, used = self._warm.pop()  # atomic; the most recently used one
        except IndexError:
            return _redis.borrow(self._client)
        if time.monotonic() - used < WARM_SECONDS:
            return connection
        self._client.connection_pool.release(connection)  # the server may have closed it: the pool checks
        return _redis.borrow(self._client)

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        keys = [_redis.STATE_JOB(job_id=job_id), _redis.STATE_JOBS()]
        flat = self._run("states/register", keys, job_id, num_tasks, uuid4().hex, int(history))
        return _record(job_id, dict(zip(flat[::2], flat[1::2], strict=True)))

    def find(self, job_id: str) -> JobRecord | None:
        with self._translating():
            fields: Any = self._client.hgetall(_redis.STATE_JOB(job_id=job_id))
        return _record(job_id, fields) if fields else None

    def jobs(self) -> Iterator[JobRecord]:
        with self._translating():
            names: Any = self._client.smembers(_redis.STATE_JOBS())
        for job_id in sorted(names):
            if (record := self.find(job_id)) is not None:
                yield record

    def write(self, state: State, job: JobRecord, writer: str) -> State:
        field, body = f"{state.task_id}-{state.tag}", _body(state)
        word, *found = self._run(
            "states/write", _keys(state.job_id), field, state.event_id, body, LOG_LENGTH, job.incarnation, writer,
            RECENT_LIMIT,
        )  # fmt: skip
        if word == "GONE":
            raise job_gone(state.job_id, remade=bool(found[0]))
        if word == "DELETED":
            raise marked_deleted(state.job_id)
        if word == "DUPLICATE":
            return _state(state.job_id, found[0])
        # All fields are passed: `dataclasses.replace` would add a tenth to the write.
        return State(
            state.job_id, state.task_id, state.tag, state.status, state.message, moment(int(found[1]) / 1e6),
            int(found[0]), state.event_id, state.payload, state.schema_version,
        )  # fmt: skip

    def read_all(self, job: JobRecord, since: Mark) -> Snapshot:
        """Return all states of one moment. The mark is the change number, the newest stream entry and the server."""
        keys = _keys(job.job_id)
        change, position, server = since or (0, BEGINNING, "")
        with self._translating(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.hmget(keys[0], ["incarnation", "change", "deleted"])
            pipeline.hgetall(keys[1])
            pipeline.xrevrange(keys[2], count=1)
            pipeline.xrange(keys[2], count=1)
            pipeline.xrange(keys[2], min=position, max=position)
            pipeline.xrange(keys[2], min=f"({position}", count=1)
            pipeline.info()
            (incarnation, now, deleted), current, newest, oldest, last, following, info = pipeline.execute()
        if incarnation is None:
            return Snapshot("")
        same_server = _server(info)
        if since is None or change == 0:
            continuous = True
        elif last:
            continuous = int(last[0][1]["change"]) == change
        else:  # trimmed, or never written to this server
            trimmed = bool(oldest) and int(oldest[0][1]["change"]) > int(change)
            continuous = trimmed and same_server == server and int(now) >= int(change)
        resumes = since is not None and (
            int(now) == change or any(_follows(entry, incarnation, int(change)) for _, entry in following)
        )
        return Snapshot(
            incarnation,
            tuple(readable(current.values(), lambda value: _state(job.job_id, value), job.job_id)),
            (int(now), newest[0][0] if newest else BEGINNING, same_server),
            deleted == "1",
            continuous,
            continuous and resumes,
        )

    def read_history(self, job_id: str, task_id: int, tag: str, *, after: int, limit: int) -> list[State]:
        """Read the stream in pages, so that the server can serve others in between. Decodes only the states of this key."""
        wanted, stream = f"{json.dumps([task_id, tag])[:-1]},", _redis.STATE_LOG(job_id=job_id)
        found: list[State] = []
        entries: Any = [(BEGINNING, {})]
        while entries and len(found) < limit:
            with self._translating():
                entries = self._client.xrange(stream, min=f"({entries[-1][0]}", count=HISTORY_PAGE)
            stored = (fields.get("state", "").split(" ", 3) for _, fields in entries)
            page = (" ".join(parts) for parts in stored if len(parts) == 4 and parts[3].startswith(wanted))
            states = readable(page, lambda value: _state(job_id, value), job_id)
            found += [state for state in states if state.version > after]
        return found[:limit]

    def mark_deleted(self, job_id: str, incarnation: str | None = None) -> None:
        word = self._run("states/mark_deleted", [_redis.STATE_JOB(job_id=job_id)], incarnation or "")
        if word == "GONE":
            raise job_gone(job_id, remade=True)
        if word == "NOT_FOUND":
            raise no_such_job(job_id) if incarnation is None else job_gone(job_id)

    def delete(self, job_id: str, incarnation: str | None = None, *, unless_after: Mark = None) -> bool:
        keys = [*_keys(job_id), _redis.STATE_JOBS()]
        change = "" if unless_after is None else unless_after[0]
        return int(self._run("states/delete", keys, job_id, incarnation or "", change)) > 0

    def listen(self, job: JobRecord) -> RedisListener:
        return RedisListener(self, self._url, job)

    def unblock(self, client_id: int) -> None:
        """End a blocking read on another connection of this process."""
        with suppress(*_redis.failures()):  # an unreachable server has ended it already
            self._client.client_unblock(client_id)

    def close(self) -> None:
        """Close the idle connections. Running calls finish and close theirs, so that no write is left without a reply."""
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):  # the list is empty
            while True:
                self._client.connection_pool.release(self._warm.pop()[0])
        self._client.connection_pool.disconnect(inuse_connections=False)


class _Away(Exception):
    """The server cannot be reached at the moment. ``final`` is the error to raise if that lasts."""

    def __init__(self, final: HeadwayError) -> None:
        super().__init__(str(final))
        self.final = final


class RedisListener:
    """Follows one job's stream on a dedicated connection."""

    def __init__(self, states: RedisStates, url: str, job: JobRecord) -> None:
        self._states = states
        self._url = url
        self._job = job
        self._deleted = job.deleted
        self._change = 0
        self._position = BEGINNING
        self._server = ""
        self._client = _redis.connect(url, role="state", name="states-listener", timeout=SILENCE, max_connections=1)
        try:
            # redis-py's command layer is bypassed: for a blocking read it takes as long as the read.
            self._connection: Any = self._client.connection_pool.get_connection()
            self._id = int(self._command("CLIENT", "ID"))
        except BaseException as error:
            self._client.close()
            if isinstance(error, _redis.failures()):
                raise _redis.translate(error, url) from error
            raise

    def _command(self, *command: str | int) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response()

    @property
    def mark(self) -> Mark:
        return (self._change, self._position, self._server)

    def snapshot(self, since: Mark) -> Snapshot:
        snapshot = self._states.read_all(self._job, since)
        if snapshot.mark is not None:
            change, position, _ = (since if snapshot.resumes else None) or snapshot.mark
            self._change, self._position, self._server = int(change), str(position), str(snapshot.mark[2])
        self._deleted = snapshot.deleted
        return snapshot

    def changes(self) -> list[Change]:
        stream = _redis.STATE_LOG(job_id=self._job.job_id)
        try:
            reply = self._command("XREAD", "COUNT", BATCH, "BLOCK", HEARTBEAT_MS, "STREAMS", stream, self._position)
            if reply is None:
                self._check(stream)
                return []
        except _redis.failures() as error:
            raise _redis.translate(error, self._url) from error
        states: list[str] = []
        for position, flat in reply[0][1]:
            entry = dict(zip(flat[::2], flat[1::2], strict=True))
            if not _follows(entry, self._job.incarnation, self._change):
                if not states:
                    raise Relist
                break  # deliver the entries before it first; the next call relists
            self._change, self._position = self._change + 1, position
            states.append(entry["state"])
        found = readable(states, lambda value: _state(self._job.job_id, value), self._job.job_id)
        return [Change(state.key, state) for state in found]

    def _check(self, stream: str) -> None:
        """Raise `Relist` if the stream was deleted or restored. Neither wakes a blocking read, so silence is checked."""
        job = _redis.STATE_JOB(job_id=self._job.job_id)
        incarnation, deleted, change = self._command("HMGET", job, "incarnation", "deleted", "change")
        if incarnation != self._job.incarnation or (deleted == "1") != self._deleted:
            raise Relist
        if int(change) < self._change or (
            self._position != BEGINNING and not self._command("XRANGE", stream, self._position, self._position)
        ):
            raise Relist

    def wake(self) -> None:
        self._states.unblock(self._id)

    def close(self) -> None:
        self._connection.disconnect()
        self._client.close()


def _follows(entry: dict[str, str], incarnation: str, change: int) -> bool:
    """Return whether an entry of the log is the change after ``change`` of this incarnation."""
    return entry.get("incarnation") == incarnation and entry.get("change") == str(change + 1) and "state" in entry


@lru_cache(maxsize=256)
def _keys(job_id: str) -> tuple[str, ...]:
    families = (_redis.STATE_JOB, _redis.STATES, _redis.STATE_LOG, _redis.STATE_WRITERS)
    return tuple(key(job_id=job_id) for key in families)


def _server(info: dict[str, Any]) -> str:
    """Return the run id and the replication id. A restart changes both, a failover the second."""
    return f"{info.get('run_id', '')}/{info.get('master_replid', '')}"


def _body(state: State) -> str:
    payload = "null" if state.payload is None else encoded(state.payload)
    facts = json.dumps([state.task_id, state.tag, state.status, state.message, state.schema_version])
    return f"{facts[:-1]}, {payload}]"


def _state(job_id: str, stored: str) -> State:
    version, event_id, microseconds, body = stored.split(" ", 3)
    # A newer version may append fields after the payload.
    task_id, tag, status, message, schema_version, payload, *_ = json.loads(body)
    return State(
        job_id, task_id, tag, status, message, moment(int(microseconds) / 1e6), int(version), event_id, payload,
        schema_version,
    )  # fmt: skip


def _record(job_id: str, fields: dict[str, str]) -> JobRecord:
    return JobRecord(
        job_id,
        int(fields["num_tasks"]),
        moment(int(fields["created_at"]) / 1e6),
        fields["incarnation"],
        deleted=fields["deleted"] == "1",
        history=fields["history"] == "1",
    )
