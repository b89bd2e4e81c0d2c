"""The watcher's record in Redis, for a host without a disk. It is as durable as that Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headway import _redis
from headway.errors import StoreCorrupt
from headway.watcher.ports import RedisHashes, Write
from headway.watcher.store.contract import Follow, Registry, Seen, batches, stored_name


class RedisProcessedStore:
    """A `ProcessedStore` in Redis.

    - ``headway:watcher:{queue}:{registry}``: hash of the rows by member.
    - ``…:found`` and ``…:at``: sorted sets of the members, by the time they were last found and read.
    - ``headway:watcher:{queue}:followed``: hash of the awaited outcomes.
    - ``headway:watcher:{queue}:baseline``: when the queue was first watched.
    """

    def __init__(self, redis: RedisHashes, queue: str) -> None:
        self._redis = redis
        # Braces keep the keys of a queue in one cluster slot, because one transaction changes them.
        self._slot = f"{{{queue}}}"
        self._followed = _redis.WATCHER_FOLLOWED(queue=self._slot)

    def baseline(self, now: float) -> float:
        return float(self._redis.setnx(_redis.WATCHER_BASELINE(queue=self._slot), repr(now)))

    def look(self, registry: Registry, members: Sequence[str]) -> dict[str, Seen]:
        key, found = _redis.WATCHED(queue=self._slot, registry=registry), dict[str, Seen]()
        for batch in batches(members):
            rows = self._redis.hmget(key, [stored_name(member) for member in batch])
            found |= {member: _seen(member, row) for member, row in zip(batch, rows, strict=True) if row is not None}
        return found

    def newest(self, registry: Registry) -> float:
        return self._redis.highest(_redis.WATCHED_AT(queue=self._slot, registry=registry)) or 0.0

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        key, found, at = self._keys(registry)
        writes: list[Write] = []
        for row in rows:
            member = stored_name(row.member)
            writes.append(("HSET", key, member, json.dumps([row.score, row.seen, row.at])))
            writes.append(("ZADD", found, row.at, member))
            writes.append(("ZADD", at, row.at, member))
        writes += [("HDEL", self._followed, stored_name(member)) for member in unfollow]
        writes += [
            ("HSET", self._followed, stored_name(one.member), json.dumps([one.kind, one.event, one.since]))
            for one in follow
        ]
        self._redis.together(writes)

    def follows(self) -> list[Follow]:
        return [_follow(member, text) for member, text in sorted(self._redis.hgetall(self._followed).items())]

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        key = _redis.WATCHED_FOUND(queue=self._slot, registry=registry)
        for batch in batches(members):
            self._redis.together([("ZADD", key, "XX", now, stored_name(member)) for member in batch])

    def stale(self, registry: Registry, before: float, count: int) -> list[str]:
        return self._redis.lowest(_redis.WATCHED_FOUND(queue=self._slot, registry=registry), before, count)

    def forget(self, registry: Registry, members: Sequence[str]) -> None:
        key, found, at = self._keys(registry)
        for batch in batches([stored_name(member) for member in members]):
            writes: list[Write] = []
            for member in batch:
                writes += [("HDEL", key, member), ("ZREM", found, member), ("ZREM", at, member)]
            self._redis.together(writes)

    def _keys(self, registry: Registry) -> tuple[str, str, str]:
        families = (_redis.WATCHED, _redis.WATCHED_FOUND, _redis.WATCHED_AT)
        rows, found, at = (family(queue=self._slot, registry=registry) for family in families)
        return rows, found, at


def _seen(member: str, text: str) -> Seen:
    parsed: object = json.loads(text)
    match parsed:
        case [float() | int() as score, str() as seen, float() | int() as at]:
            return Seen(member, float(score), seen, float(at))
    raise StoreCorrupt(f"The watcher's record of {member} in Redis is damaged.")


def _follow(member: str, text: str) -> Follow:
    parsed: object = json.loads(text)
    match parsed:
        case [str() as kind, str() as event]:  # written by a release that stored no time
            return Follow(member, kind, event, 0.0)
        case [str() as kind, str() as event, float() | int() as since]:
            return Follow(member, kind, event, float(since))
    raise StoreCorrupt("The watcher's record of a followed job in Redis is damaged.")
