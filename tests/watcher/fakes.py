"""Redis and RQ as far as the watcher sees them, in memory: for orders of events that a real server never repeats."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from headway._sql import connect
from headway.watcher import NotificationWatcher, ProcessedStore, SqlProcessedStore, WatcherPorts, WatcherSettings
from headway.watcher.ports import ExecutionRecord, Member, Message, QueueKeys, ResultRecord, RqJobRecord
from headway.watcher.reports import channel

QUEUE = "digits"
KEYS = QueueKeys(failed="F", started="W", canceled="C")


class FakePubSub:
    """Confirms what is asked of it, answers pings while it lives, and hands out what was put in."""

    def __init__(self) -> None:
        self.inbox: deque[Message | Exception] = deque()
        self.patterns: list[str] = []
        self.channels: list[str] = []
        self.answers = True
        self.confirms = True
        self.closed = False

    def psubscribe(self, *patterns: str) -> None:
        self._add(self.patterns, patterns)

    def subscribe(self, *channels: str) -> None:
        self._add(self.channels, channels)

    def _add(self, known: list[str], names: Sequence[str]) -> None:
        known += names
        if self.confirms:
            self.inbox.extend(Message("subscribed", name) for name in names)

    def punsubscribe(self, *patterns: str) -> None:
        self._remove(self.patterns, patterns)

    def unsubscribe(self, *channels: str) -> None:
        self._remove(self.channels, channels)

    def _remove(self, known: list[str], names: Sequence[str]) -> None:
        for name in names:
            known.remove(name)
            self.inbox.append(Message("unsubscribed", name))

    def hears(self, channel: str) -> bool:
        return channel in self.channels or any(unescaped(pattern) == channel for pattern in self.patterns)

    def get_message(self, timeout: float) -> Message | None:
        if not self.inbox:
            FakeRedis.clock[0] += timeout
            return None
        message = self.inbox.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def ping(self) -> None:
        if self.answers:
            self.inbox.append(Message("pong"))

    def close(self) -> None:
        self.closed = True
        self.patterns, self.channels = [], []


def unescaped(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern)


class FakeGuard:
    """Compares what the keys hold with what they held."""

    def __init__(self, redis: FakeRedis, keys: Sequence[str]) -> None:
        self._redis = redis
        self._keys = keys
        self._before = self._look()

    def _look(self) -> list[dict[str, float]]:
        return [dict(self._redis.zsets.get(key, {})) for key in self._keys]

    def untouched(self) -> bool:
        self._redis._called("guard")
        before, self._before = self._before, self._look()
        return before == self._before


class FakeRedis:
    """One database. What a test does to its sets and records is announced only when the test says so; what is done to it
    through the port is announced to whoever subscribed, as a server with ``Kz`` does it."""

    #: Shared with the links, whose waiting is what makes time pass.
    clock: ClassVar[list[float]] = [0.0]

    def __init__(self, flags: str | None = "zK") -> None:
        self.flags = flags
        self.announces = True
        self.skew = 0.0
        self.zsets: dict[str, dict[str, float]] = {"F": {}, "W": {}, "C": {}}
        self.records: dict[str, RqJobRecord] = {}
        self.runs: dict[str, ExecutionRecord] = {}
        self.published: list[str] = []
        self.calls: list[str] = []
        self.asked: list[list[str]] = []
        self.links: list[FakePubSub] = []
        self.error: Exception | None = None
        self.on_publish: Callable[[], None] = lambda: None
        self.closed = False
        self._names: list[str] = []

    # ---- for tests -------------------------------------------------------------------------------------------------

    def announce(self, key: str, command: str = "zadd") -> None:
        """To every link that asked to be told."""
        for link in self.links:
            if link.hears(channel(0, key)):
                link.inbox.append(Message("event", channel(0, key), command))

    def fail(self, job_id: str, result_id: str, *, score: float = 9e9, exception: bytes = b"") -> None:
        """As RQ does it: the hash, a result, the registry."""
        result = ResultRecord(
            result_id,
            "failed",
            execution_id=f"e-{result_id}",
            worker="w",
            started_at="",
            ended_at="",
            exception=exception,
        )
        before = self.records.get(job_id)
        results = (result, *(before.results if before else ()))
        self.records[job_id] = RqJobRecord(job_id, exists=True, status="failed", created_at="then", results=results)
        self.zsets["F"][job_id] = score

    # ---- the port --------------------------------------------------------------------------------------------------

    @property
    def db(self) -> int:
        return 0

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error

    def pubsub(self) -> FakePubSub:
        self.links.append(FakePubSub())
        return self.links[-1]

    def config_get(self, name: str) -> str | None:
        self._called("config_get")
        return self.flags

    def time(self) -> float:
        self._called("time")
        return 1_000_000.0 + self.clock[0] + self.skew

    def _sorted(self, key: str) -> list[Member]:
        return sorted(self.zsets.get(key, {}).items(), key=lambda entry: (entry[1], entry[0]))

    def zrevrangebyscore(self, key: str, offset: int, count: int) -> list[Member]:
        self._called("zrevrangebyscore")
        return self._sorted(key)[::-1][offset : offset + count]

    def zrange(self, key: str, start: int, count: int) -> list[Member]:
        self._called("zrange")
        return self._sorted(key)[start : start + count]

    def zscan(self, key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        """In the order of member names, which no score changes. The cursor is the number of a name."""
        self._called("zscan")
        members = sorted(self.zsets.get(key, {}).items())
        after = "" if cursor == 0 else self._names[cursor - 1]
        page = [entry for entry in members if cursor == 0 or entry[0] > after][:count]
        if not page or page[-1] == members[-1]:
            return 0, page
        self._names.append(page[-1][0])
        return len(self._names), page

    def zcard(self, key: str) -> int:
        self._called("zcard")
        return len(self.zsets.get(key, {}))

    def zrank(self, key: str, member: str) -> int | None:
        self._called("zrank")
        members = [name for name, _ in self._sorted(key)]
        return members.index(member) if member in members else None

    def zscore(self, key: str, member: str) -> float | None:
        self._called("zscore")
        return self.zsets.get(key, {}).get(member)

    def zadd(self, key: str, member: str, score: float) -> None:
        self._called("zadd")
        changed = self.zsets.get(key, {}).get(member) != score
        self.zsets.setdefault(key, {})[member] = score
        if changed and self.announces:
            self.announce(key)

    def unlink(self, key: str) -> None:
        self._called("unlink")
        self.zsets.pop(key, None)

    def jobs(self, job_ids: Sequence[str], *, running: bool, payload: bool = False) -> list[RqJobRecord]:
        self._called("jobs")
        self.asked.append(list(job_ids))
        records = [self.records.get(job_id) or RqJobRecord(job_id, exists=False) for job_id in job_ids]
        return [
            replace(one, running=one.running if running else "", payload=one.payload if payload else b"")
            for one in records
        ]

    def have_results(self, job_ids: Sequence[str]) -> list[bool]:
        self._called("have_results")
        return [bool(self.records[job_id].results) if job_id in self.records else False for job_id in job_ids]

    def guard(self, keys: Sequence[str]) -> FakeGuard:
        return FakeGuard(self, keys)

    def executions(self, members: Sequence[str]) -> list[ExecutionRecord]:
        self._called("executions")
        nothing = ExecutionRecord(exists=False, created_at=0.0, worker="", timeout=0.0)
        return [self.runs.get(member, nothing) for member in members]

    def publish(self, channel: str, stream: str, stream_length: int, bodies: Sequence[str]) -> None:
        self._called("publish")
        self.published += bodies
        self.on_publish()

    def close(self) -> None:
        self.closed = True


class FakeRq:
    def registries(self, queue: str) -> QueueKeys:
        return KEYS

    def executions(self, job_id: str) -> str:
        return f"X:{job_id}"


def ports(redis: FakeRedis) -> WatcherPorts:
    def no_hashes(url: str) -> Any:
        raise AssertionError("not with this store")

    return WatcherPorts(redis=lambda url: redis, hashes=no_hashes, rq=FakeRq, clock=lambda: redis.clock[0])


def settings(**changes: Any) -> WatcherSettings:
    facts: dict[str, Any] = {
        "redis_url": "redis://", "queues": (QUEUE,), "channel": "events", "stuck_job_timeout_s": 100.0,
    }  # fmt: skip
    return WatcherSettings(**(facts | changes))


class Stand:
    """A watcher on fakes whose record outlives it."""

    def __init__(self, redis: FakeRedis | None = None, **changes: Any) -> None:
        FakeRedis.clock[0] = 0.0
        self.redis = redis or FakeRedis()
        self.database = connect("sqlite:///:memory:")
        self.changes = changes
        self.watcher = self.make()

    def make(self) -> NotificationWatcher:
        return NotificationWatcher(settings(**self.changes), ports(self.redis), self.store)

    def store(self, queue: str) -> ProcessedStore:
        return SqlProcessedStore(self.database, queue)

    def open(self) -> Stand:
        self.watcher.open()
        self.redis.calls.clear()
        return self

    def restart(self) -> None:
        self.watcher.close()
        self.watcher = self.make()
        self.watcher.open()

    def pass_time(self, seconds: float) -> None:
        """Tick by tick, as it does when it runs."""
        until = self.redis.clock[0] + seconds
        while self.redis.clock[0] < until:
            before = self.redis.clock[0]
            self.watcher.tick()
            if self.redis.clock[0] == before:
                self.redis.clock[0] += 0.01

    @property
    def link(self) -> FakePubSub:
        return self.redis.links[-1]
