"""What was reported already. It survives restarts, so a watcher that comes back repeats nothing.

A row says up to where one member of a registry was reported; a `Follow` says whose outcome is still awaited. Rows are
written after their events were published: a crash in between publishes them again, with the same event ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, Protocol

from headway import _redis
from headway._sql import Database, Tx, marks
from headway.errors import StoreCorrupt
from headway.watcher.ports import RedisHashes, Write

Registry = Literal["failed", "canceled", "started"]


@dataclass(frozen=True, slots=True)
class Seen:
    """How far one member was reported: the score it had, and the newest fact told about it."""

    member: str
    score: float
    seen: str
    #: When the job was looked at, by Redis's clock.
    at: float


@dataclass(frozen=True, slots=True)
class Follow:
    """An execution (``job_id:execution_id``) whose outcome is still awaited, and what was reported of it."""

    member: str
    kind: str
    event: str
    #: Since when, by Redis's clock.
    since: float


class ProcessedStore(Protocol):
    """Few verbs over one queue. Each write is durable when it returns, and may be repeated. Any number of members may
    be given, none among them, and they may contain anything."""

    def baseline(self, now: float) -> float:
        """When this queue was first watched: ``now`` the first time, that same moment ever after."""
        ...

    def look(self, registry: Registry, members: Sequence[str]) -> dict[str, Seen]: ...

    def newest(self, registry: Registry) -> float:
        """The latest ``at`` of a registry; 0 when there is none."""
        ...

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        """Note what was just published, and whose outcome is awaited from now on or no longer; all or nothing."""
        ...

    def follows(self) -> list[Follow]: ...

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        """These are still in the registry."""
        ...

    def stale(self, registry: Registry, before: float, count: int) -> list[str]:
        """Up to ``count`` members that were not found since ``before``."""
        ...

    def forget(self, registry: Registry, members: Sequence[str]) -> None: ...


class SqlProcessedStore:
    """Tables ``watched``, ``followed`` and ``watchers`` (SQLite by default, PostgreSQL as well)."""

    def __init__(self, database: Database, queue: str) -> None:
        self._database = database
        self._queue = queue

    def baseline(self, now: float) -> float:
        def work(tx: Tx) -> float:
            tx.execute("INSERT INTO watchers VALUES (?, ?) ON CONFLICT DO NOTHING", (self._queue, now))
            return _first(tx.one("SELECT baseline FROM watchers WHERE queue = ?", (self._queue,)))

        return self._database.run(work, operation="watcher.baseline")

    def look(self, registry: Registry, members: Sequence[str]) -> dict[str, Seen]:
        found: dict[str, Seen] = {}
        for some in _portions(members):
            names = {_name(member): member for member in some}
            for row in self._database.all(
                "SELECT member, score, seen, at FROM watched WHERE queue = ? AND registry = ? "
                f"AND member IN ({marks(len(names))})",
                (self._queue, registry, *names),
            ):
                member = names[str(row[0])]
                found[member] = Seen(member, float(row[1]), str(row[2]), float(row[3]))
        return found

    def newest(self, registry: Registry) -> float:
        return _first(
            self._database.one(
                "SELECT coalesce(max(at), 0) FROM watched WHERE queue = ? AND registry = ?", (self._queue, registry)
            )
        )

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        def work(tx: Tx) -> None:
            tx.executemany(
                "INSERT INTO watched VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (queue, registry, member) "
                "DO UPDATE SET score = excluded.score, seen = excluded.seen, at = excluded.at, "
                "found = excluded.found",
                [
                    (self._queue, registry, _name(row.member), row.score, _name(row.seen), row.at, row.at)
                    for row in rows
                ],
            )
            tx.executemany(
                "DELETE FROM followed WHERE queue = ? AND member = ?",
                [(self._queue, _name(member)) for member in unfollow],
            )
            tx.executemany(
                "INSERT INTO followed (queue, member, kind, event, since) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (queue, member) "
                "DO UPDATE SET kind = excluded.kind, event = excluded.event, since = excluded.since",
                [(self._queue, _name(one.member), one.kind, one.event, one.since) for one in follow],
            )

        self._database.run(work, operation="watcher.mark")

    def follows(self) -> list[Follow]:
        rows = self._database.all(
            "SELECT member, kind, event, since FROM followed WHERE queue = ? ORDER BY member", (self._queue,)
        )
        return [Follow(str(row[0]), str(row[1]), str(row[2]), float(row[3])) for row in rows]

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        self._each("UPDATE watched SET found = ?", (now,), registry, members, operation="watcher.found")

    def stale(self, registry: Registry, before: float, count: int) -> list[str]:
        rows = self._database.all(
            "SELECT member FROM watched WHERE queue = ? AND registry = ? AND found < ? ORDER BY found, member LIMIT ?",
            (self._queue, registry, before, count),
        )
        return [str(row[0]) for row in rows]

    def forget(self, registry: Registry, members: Sequence[str]) -> None:
        self._each("DELETE FROM watched", (), registry, members, operation="watcher.forget")

    def _each(
        self, change: str, values: tuple[float, ...], registry: Registry, members: Sequence[str], *, operation: str
    ) -> None:
        def work(tx: Tx) -> None:
            for some in _portions(members):
                tx.execute(
                    f"{change} WHERE queue = ? AND registry = ? AND member IN ({marks(len(some))})",
                    (*values, self._queue, registry, *map(_name, some)),
                )

        if members:
            self._database.run(work, operation=operation)


class RedisProcessedStore:
    """The same in Redis, for a host without a disk of its own. As durable as that Redis is.

    ``headway:watcher:{queue}:{registry}`` hash: member to its row; ``…:found`` and ``…:at`` sorted sets: member by the
    time it was last found and looked at; ``headway:watcher:{queue}:followed`` hash; ``…:baseline`` text.
    """

    def __init__(self, redis: RedisHashes, queue: str) -> None:
        self._redis = redis
        # Braces keep one queue's keys in one slot of a cluster: they are changed in one transaction.
        self._slot = f"{{{queue}}}"

    def baseline(self, now: float) -> float:
        return float(self._redis.setnx(_redis.WATCHER_BASELINE(queue=self._slot), repr(now)))

    def look(self, registry: Registry, members: Sequence[str]) -> dict[str, Seen]:
        found: dict[str, Seen] = {}
        for some in _portions(members):
            rows = self._redis.hmget(
                _redis.WATCHED(queue=self._slot, registry=registry), [_name(member) for member in some]
            )
            found |= {member: _seen(member, row) for member, row in zip(some, rows, strict=True) if row is not None}
        return found

    def newest(self, registry: Registry) -> float:
        return self._redis.highest(_redis.WATCHED_AT(queue=self._slot, registry=registry)) or 0.0

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        key, found, at = self._keys(registry)
        followed = _redis.WATCHER_FOLLOWED(queue=self._slot)
        writes: list[Write] = []
        for row in rows:
            member = _name(row.member)
            writes.append(("HSET", key, member, json.dumps([row.score, row.seen, row.at])))
            writes.append(("ZADD", found, row.at, member))
            writes.append(("ZADD", at, row.at, member))
        writes += [("HDEL", followed, _name(member)) for member in unfollow]
        writes += [
            ("HSET", followed, _name(one.member), json.dumps([one.kind, one.event, one.since])) for one in follow
        ]
        self._redis.together(writes)

    def follows(self) -> list[Follow]:
        kept = self._redis.hgetall(_redis.WATCHER_FOLLOWED(queue=self._slot))
        return [_followed(member, text) for member, text in sorted(kept.items())]

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        key = _redis.WATCHED_FOUND(queue=self._slot, registry=registry)
        for some in _portions(members):
            self._redis.together([("ZADD", key, "XX", now, _name(member)) for member in some])

    def stale(self, registry: Registry, before: float, count: int) -> list[str]:
        return self._redis.lowest(_redis.WATCHED_FOUND(queue=self._slot, registry=registry), before, count)

    def forget(self, registry: Registry, members: Sequence[str]) -> None:
        key, found, at = self._keys(registry)
        for some in _portions([_name(member) for member in members]):
            self._redis.together(
                [
                    write
                    for member in some
                    for write in (("HDEL", key, member), ("ZREM", found, member), ("ZREM", at, member))
                ]
            )

    def _keys(self, registry: Registry) -> tuple[str, str, str]:
        return (
            _redis.WATCHED(queue=self._slot, registry=registry),
            _redis.WATCHED_FOUND(queue=self._slot, registry=registry),
            _redis.WATCHED_AT(queue=self._slot, registry=registry),
        )


def _portions(members: Sequence[str]) -> Iterator[Sequence[str]]:
    """As many as one statement takes; nothing for an empty list, which no engine takes."""
    for start in range(0, len(members), 5_000):
        yield members[start : start + 5_000]


def _name(member: str) -> str:
    """The member as every engine can keep and index it: whoever named a job may have used any bytes, and any number."""
    raw = member.encode("utf-8", "surrogatepass")
    if len(raw) <= 512 and "\0" not in member and raw.decode("utf-8", "ignore") == member:
        return member
    return f"sha256 {sha256(raw).hexdigest()}"


def _first(row: Sequence[float] | None) -> float:
    assert row is not None, "an aggregate and a row just written are always there"
    return float(row[0])


def _seen(member: str, text: str) -> Seen:
    parsed: object = json.loads(text)
    match parsed:
        case [float() | int() as score, str() as seen, float() | int() as at]:
            return Seen(member, float(score), seen, float(at))
    raise StoreCorrupt(f"The watcher's record of {member} in Redis is damaged.")


def _followed(member: str, text: str) -> Follow:
    parsed: object = json.loads(text)
    match parsed:
        case [str() as kind, str() as event]:  # written before it was noted since when
            return Follow(member, kind, event, 0.0)
        case [str() as kind, str() as event, float() | int() as since]:
            return Follow(member, kind, event, float(since))
    raise StoreCorrupt("The watcher's record of a followed job in Redis is damaged.")
