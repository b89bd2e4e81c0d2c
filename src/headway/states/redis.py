"""States in Redis: a hash of the newest, a stream of the changes, both written by one script.

They are as durable as that Redis is (``appendonly yes``); a Redis that was wiped has lost the job, and writers are
told so. Blocking reads of the stream wake the reader; every entry carries the job's change number, so a reader notices
that the stream was cut or the job made anew, and lists again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from headway import _redis
from headway.errors import HeadwayError
from headway.retry import REDIS_OPERATION
from headway.states.state import State, encoded, moment
from headway.states.store import Change, JobRecord, Relist, Snapshot, marked_deleted, no_such_job

if TYPE_CHECKING:
    from redis import Redis

#: Entries of the stream kept for readers that are a little behind.
LOG_KEPT = 1_024
#: Entries read at once.
BATCH = 512
#: A blocking read answers at least this often; a server that does not is taken for dead after `SILENCE`.
HEARTBEAT_MS = 2_000
SILENCE = 6.0


class RedisStates:
    """A `Backend` over one Redis database."""

    kind = "redis"
    write_policy = REDIS_OPERATION
    listens_at_once = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Redis = _redis.connect(url, role="state", name="states")
        try:
            with self._translating():
                _redis.preflight(self._client, role="state", where=url)
        except BaseException:
            self._client.close()
            raise

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except HeadwayError:
            raise
        except _redis.failures() as error:
            raise _redis.translate(error, self._url) from error

    def _run(self, name: str, keys: list[str], *arguments: str | int) -> Any:
        with self._translating():
            return _redis.script(name)(self._client, keys, arguments)

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

    def write(self, state: State) -> State:
        keys = _keys(state.job_id)
        field, body = f"{state.task_id}-{state.tag}", _body(state)
        word, *stored = self._run("states/write", keys, field, state.event_id, body, LOG_KEPT)
        if word == "NOT_FOUND":
            raise no_such_job(state.job_id)
        if word == "DELETED":
            raise marked_deleted(state.job_id)
        return _state(state.job_id, stored[0])

    def read_all(self, job_id: str) -> Snapshot:
        return self.read_at(job_id)[0]

    def read_at(self, job_id: str) -> tuple[Snapshot, int, str]:
        """Everything of one moment, with its change number and the id of the newest entry of the stream."""
        job, states, log = _keys(job_id)
        with self._translating(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.hmget(job, ["incarnation", "change"])
            pipeline.hgetall(states)
            pipeline.xrevrange(log, count=1)
            (incarnation, change), current, newest = pipeline.execute()
        if incarnation is None:
            return Snapshot("", ()), 0, "0-0"
        found = tuple(_state(job_id, value) for value in current.values())
        return Snapshot(incarnation, found), int(change), newest[0][0] if newest else "0-0"

    def incarnation(self, job_id: str) -> str:
        with self._translating():
            found: Any = self._client.hget(_redis.STATE_JOB(job_id=job_id), "incarnation")
        return found or ""

    def read_history(self, job_id: str, task_id: int, tag: str) -> list[State]:
        with self._translating():
            entries: Any = self._client.xrange(_redis.STATE_LOG(job_id=job_id))
        states = (_state(job_id, fields["state"]) for _, fields in entries)
        return [state for state in states if state.key == (task_id, tag)]

    def mark_deleted(self, job_id: str) -> None:
        if self._run("states/mark_deleted", [_redis.STATE_JOB(job_id=job_id)]) == "NOT_FOUND":
            raise no_such_job(job_id)

    def delete(self, job_id: str) -> bool:
        return int(self._run("states/delete", [*_keys(job_id), _redis.STATE_JOBS()], job_id)) > 0

    def listen(self, job_id: str) -> RedisListener:
        return RedisListener(self, self._url, job_id)

    def unblock(self, client_id: int) -> None:
        """End a blocking read that another connection of ours waits in."""
        with suppress(*_redis.failures()):  # a server that is away has ended it already
            self._client.client_unblock(client_id)

    def close(self) -> None:
        self._client.close()


class RedisListener:
    """Follows one job's stream on a connection of its own."""

    def __init__(self, states: RedisStates, url: str, job_id: str) -> None:
        self._states = states
        self._url = url
        self._job_id = job_id
        self._incarnation = ""
        self._change = 0
        self._position = "0-0"
        self._client = _redis.connect(url, role="state", name="states-listener", timeout=SILENCE, max_connections=1)
        try:
            # The reply of a blocking read needs nothing of redis-py's command layer, which costs as much as the read.
            self._connection: Any = self._client.connection_pool.get_connection()
            self._id = int(self._ask("CLIENT", "ID"))
        except BaseException as error:
            self._client.close()
            if isinstance(error, _redis.failures()):
                raise _redis.translate(error, url) from error
            raise

    def _ask(self, *command: str | int) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response()

    def snapshot(self) -> Snapshot:
        snapshot, self._change, self._position = self._states.read_at(self._job_id)
        self._incarnation = snapshot.incarnation
        return snapshot

    def changes(self) -> list[Change]:
        stream = _redis.STATE_LOG(job_id=self._job_id)
        try:
            reply = self._ask("XREAD", "COUNT", BATCH, "BLOCK", HEARTBEAT_MS, "STREAMS", stream, self._position)
        except _redis.failures() as error:
            raise _redis.translate(error, self._url) from error
        if reply is None:
            # A stream that was deleted wakes nobody, so silence is the time to ask.
            if self._states.incarnation(self._job_id) != self._incarnation:
                raise Relist
            return []
        changes = []
        for position, flat in reply[0][1]:
            entry = dict(zip(flat[::2], flat[1::2], strict=True))
            if entry["incarnation"] != self._incarnation or int(entry["change"]) != self._change + 1:
                raise Relist
            self._change, self._position = self._change + 1, position
            state = _state(self._job_id, entry["state"])
            changes.append(Change(state.key, state))
        return changes

    def wake(self) -> None:
        self._states.unblock(self._id)

    def close(self) -> None:
        self._connection.disconnect()
        self._client.close()


def _keys(job_id: str) -> list[str]:
    return [key(job_id=job_id) for key in (_redis.STATE_JOB, _redis.STATES, _redis.STATE_LOG)]


def _body(state: State) -> str:
    payload = "null" if state.payload is None else encoded(state.payload)
    facts = json.dumps([state.task_id, state.tag, state.status, state.message, state.schema_version])
    return f"{facts[:-1]}, {payload}]"


def _state(job_id: str, stored: str) -> State:
    version, event_id, microseconds, body = stored.split(" ", 3)
    # What a newer headway adds comes after the payload and is left alone.
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
