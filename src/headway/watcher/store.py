"""What was reported already. It survives restarts, so a watcher that comes back repeats nothing.

A row says up to where one member of a registry was reported; a `Follow` says whose outcome is still awaited. Rows are
written after their events were published: a crash in between publishes them again, with the same event ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
    """An execution (``job_id:execution_id``) whose outcome is still awaited, and what was told of it."""

    member: str
    kind: str
    event: str


class ProcessedStore(Protocol):
    """Few verbs over one queue. Each write is durable when it returns, and may be repeated."""

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

    def prune(self, registry: Registry, before: float) -> int:
        """Forget members not found since ``before``; how many."""
        ...


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
        rows = self._database.all(
            "SELECT member, score, seen, at FROM watched WHERE queue = ? AND registry = ? "
            f"AND member IN ({marks(len(members))})",
            (self._queue, registry, *members),
        )
        return {str(row[0]): Seen(str(row[0]), float(row[1]), str(row[2]), float(row[3])) for row in rows}

    def newest(self, registry: Registry) -> float:
        return _first(
            self._database.one(
                "SELECT coalesce(max(at), 0) FROM watched WHERE queue = ? AND registry = ?",
                (self._queue, registry),
            )
        )

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        def work(tx: Tx) -> None:
            tx.executemany(
                "INSERT INTO watched VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (queue, registry, member) "
                "DO UPDATE SET score = excluded.score, seen = excluded.seen, at = excluded.at, "
                "found = excluded.found",
                [(self._queue, registry, row.member, row.score, row.seen, row.at, row.at) for row in rows],
            )
            tx.executemany(
                "DELETE FROM followed WHERE queue = ? AND member = ?",
                [(self._queue, member) for member in unfollow],
            )
            tx.executemany(
                "INSERT INTO followed VALUES (?, ?, ?, ?) ON CONFLICT (queue, member) "
                "DO UPDATE SET kind = excluded.kind, event = excluded.event",
                [(self._queue, one.member, one.kind, one.event) for one in follow],
            )

        self._database.run(work, operation="watcher.mark")

    def follows(self) -> list[Follow]:
        rows = self._database.all(
            "SELECT member, kind, event FROM followed WHERE queue = ? ORDER BY member", (self._queue,)
        )
        return [Follow(str(row[0]), str(row[1]), str(row[2])) for row in rows]

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        self._database.run(
            lambda tx: tx.execute(
                f"UPDATE watched SET found = ? WHERE queue = ? AND registry = ? AND member IN ({marks(len(members))})",
                (now, self._queue, registry, *members),
            ),
            operation="watcher.found",
        )

    def prune(self, registry: Registry, before: float) -> int:
        return self._database.run(
            lambda tx: tx.execute(
                "DELETE FROM watched WHERE queue = ? AND registry = ? AND found < ?",
                (self._queue, registry, before),
            ),
            operation="watcher.prune",
        )


class RedisProcessedStore:
    """The same in Redis, for a host without a disk of its own. As durable as that Redis is.

    ``headway:watcher:{queue}:{registry}`` hash: member to its row; ``…:found`` and ``…:at`` sorted sets: member by the
    time it was last found and looked at; ``headway:watcher:{queue}:followed`` hash; ``…:baseline`` text.
    """

    def __init__(self, redis: RedisHashes, queue: str) -> None:
        self._redis = redis
        # Braces keep one queue's keys in one slot of a cluster: they are changed in one transaction.
        self._prefix = f"headway:watcher:{{{queue}}}"

    def baseline(self, now: float) -> float:
        return float(self._redis.setnx(f"{self._prefix}:baseline", repr(now)))

    def look(self, registry: Registry, members: Sequence[str]) -> dict[str, Seen]:
        rows = self._redis.hmget(f"{self._prefix}:{registry}", members)
        return {member: _seen(member, row) for member, row in zip(members, rows, strict=True) if row is not None}

    def newest(self, registry: Registry) -> float:
        return self._redis.highest(f"{self._prefix}:{registry}:at") or 0.0

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        key, followed = f"{self._prefix}:{registry}", f"{self._prefix}:followed"
        changes: list[Write] = []
        for row in rows:
            changes.append(("HSET", key, row.member, json.dumps([row.score, row.seen, row.at])))
            changes.append(("ZADD", f"{key}:found", row.at, row.member))
            changes.append(("ZADD", f"{key}:at", row.at, row.member))
        changes += [("HDEL", followed, member) for member in unfollow]
        changes += [("HSET", followed, one.member, json.dumps([one.kind, one.event])) for one in follow]
        self._redis.together(changes)

    def follows(self) -> list[Follow]:
        kept = self._redis.hgetall(f"{self._prefix}:followed")
        return [Follow(member, *_words(text)) for member, text in sorted(kept.items())]

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        key = f"{self._prefix}:{registry}:found"
        self._redis.together([("ZADD", key, "XX", now, member) for member in members])

    def prune(self, registry: Registry, before: float) -> int:
        key, pruned = f"{self._prefix}:{registry}", 0
        while gone := self._redis.lowest(f"{key}:found", before, 500):
            self._redis.together(_forget(key, gone))
            pruned += len(gone)
        return pruned


def _forget(key: str, members: Iterable[str]) -> list[Write]:
    return [
        change
        for member in members
        for change in (("HDEL", key, member), ("ZREM", f"{key}:found", member), ("ZREM", f"{key}:at", member))
    ]


def _first(row: Sequence[float] | None) -> float:
    assert row is not None, "an aggregate and a row just written are always there"
    return float(row[0])


def _seen(member: str, text: str) -> Seen:
    parsed: object = json.loads(text)
    match parsed:
        case [float() | int() as score, str() as seen, float() | int() as at]:
            return Seen(member, float(score), seen, float(at))
    raise StoreCorrupt(f"The watcher's record of {member} in Redis is damaged.")


def _words(text: str) -> tuple[str, str]:
    parsed: object = json.loads(text)
    match parsed:
        case [str() as kind, str() as event]:
            return kind, event
    raise StoreCorrupt("The watcher's record of a followed job in Redis is damaged.")
