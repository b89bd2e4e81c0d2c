"""One contract over the ports: what the watcher expects of Redis, on the real adapter and on the fake of the other tests.

Whatever a test believes because the fake says so, a real server says as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from headway.watcher.adapters import connect
from headway.watcher.ports import Message, PubSubProto, RedisProto
from headway.watcher.reports import channel, pattern
from tests.services.waiting import eventually
from tests.watcher.fakes import FakeRedis
from tests.watcher.scene import Scene


class World(Protocol):
    """A Redis behind the port, and what RQ and others do to it."""

    redis: RedisProto

    def fail(self, job_id: str) -> None: ...

    def remove(self, key: str, member: str) -> None: ...

    @property
    def failed(self) -> str: ...


class RealWorld:
    def __init__(self, scene: Scene) -> None:
        self.redis: RedisProto = connect(scene.url)
        self._scene = scene

    def fail(self, job_id: str) -> None:
        self._scene.burst(1, prefix=job_id)

    def remove(self, key: str, member: str) -> None:
        self._scene.redis.zrem(key, member)

    @property
    def failed(self) -> str:
        return "rq:failed:digits"


class FakeWorld:
    def __init__(self) -> None:
        FakeRedis.clock[0] = 0.0
        self._fake = FakeRedis()
        self.redis: RedisProto = self._fake
        self._number = 0

    def fail(self, job_id: str) -> None:
        self._number += 1
        self._fake.fail(f"{job_id}-00000", f"{self._number}-0", exception=b"eJwDAAAAAAE=")
        self._fake.announce("F")

    def remove(self, key: str, member: str) -> None:
        del self._fake.zsets[key][member]
        self._fake.announce(key, "zrem")

    @property
    def failed(self) -> str:
        return "F"


@pytest.fixture(params=["fake", "real"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world: World = FakeWorld() if request.param == "fake" else RealWorld(request.getfixturevalue("scene"))
    yield world
    world.redis.close()


def hear(link: PubSubProto, wanted: int) -> list[Message]:
    """So many messages, and no more."""
    heard: list[Message] = []

    def enough() -> bool:
        message = link.get_message(0.05)
        if message is not None:
            heard.append(message)
        return len(heard) >= wanted

    eventually(enough)
    assert link.get_message(0.05) is None
    return heard


def scan(redis: RedisProto, key: str, count: int, between: Callable[[], None] = lambda: None) -> dict[str, float]:
    found: dict[str, float] = {}
    cursor = -1
    while cursor != 0:
        cursor, page = redis.zscan(key, max(cursor, 0), count)
        found.update(page)
        between()
    return found


def test_windows_are_by_score_and_then_by_member(world: World):
    redis = world.redis
    for member, score in [("b", 1.0), ("a", 1.0), ("c", -1.0), ("d", 5.5)]:
        redis.zadd("z", member, score)
    assert redis.zrange("z", 0, 3) == [("c", -1.0), ("a", 1.0), ("b", 1.0)]
    assert redis.zrange("z", 3, 3) == [("d", 5.5)]
    assert redis.zrange("z", 4, 3) == []
    assert redis.zrevrangebyscore("z", 0, 2) == [("d", 5.5), ("b", 1.0)]
    assert redis.zrevrangebyscore("z", 2, 2) == [("a", 1.0), ("c", -1.0)]
    assert redis.zrevrangebyscore("z", 4, 2) == []
    assert redis.zcard("z") == 4
    assert (redis.zrank("z", "c"), redis.zrank("z", "x")) == (0, None)
    assert (redis.zscore("z", "d"), redis.zscore("z", "x")) == (5.5, None)
    redis.unlink("z")
    assert (redis.zcard("z"), redis.zrange("z", 0, 3), redis.zscan("z", 0, 3)) == (0, [], (0, []))


@pytest.mark.parametrize("size", [0, 1, 3, 500])
def test_a_scan_returns_members_that_stay_throughout(world: World, size):
    stays = {f"stays{number:03}": float(number) for number in range(size)}
    for member, score in stays.items():
        world.redis.zadd("z", member, score)
        world.redis.zadd("z", f"leaves-{member}", score)
    number = iter(range(10_000))

    def change() -> None:
        one = next(number)
        world.redis.zadd("z", f"joins{one}", -1)
        if one < size:
            world.remove("z", f"leaves-stays{one:03}")
            stays[f"stays{one:03}"] += 1_000
            world.redis.zadd("z", f"stays{one:03}", stays[f"stays{one:03}"])

    found = scan(world.redis, "z", 20, change)
    assert stays.keys() <= found.keys()
    assert all(found[member] in (score, score - 1_000) for member, score in stays.items())


def test_changes_of_a_set_are_announced_by_name_and_by_pattern(world: World):
    link = world.redis.pubsub()
    link.subscribe(channel(0, "q[1]"))
    link.psubscribe(pattern(0, "p*"))
    assert {(one.kind, one.channel) for one in hear(link, 2)} == {
        ("subscribed", channel(0, "q[1]")),
        ("subscribed", pattern(0, "p*")),
    }
    for key in ("q[1]", "q1", "p*", "px"):
        world.redis.zadd(key, "m", 1)
        world.redis.zadd(key, "m", 1)  # the same score: nothing happened
    assert [(one.channel, one.name) for one in hear(link, 2)] == [
        (channel(0, "q[1]"), "zadd"),
        (channel(0, "p*"), "zadd"),
    ]
    world.redis.unlink("q[1]")  # not announced under Kz
    link.ping()
    assert [one.kind for one in hear(link, 1)] == ["pong"]
    link.unsubscribe(channel(0, "q[1]"))
    link.punsubscribe(pattern(0, "p*"))
    assert [one.kind for one in hear(link, 2)] == ["unsubscribed", "unsubscribed"]
    world.redis.zadd("p*", "n", 1)
    assert link.get_message(0.05) is None
    link.close()


def test_a_guard_notices_every_change_and_only_changes(world: World):
    redis = world.redis
    redis.zadd("a", "m", 1)
    guard = redis.guard(["a", "b"])
    assert guard.untouched()
    assert guard.untouched()
    redis.zadd("a", "m", 1)
    redis.zadd("c", "m", 1)
    redis.zrange("a", 0, 5)
    assert guard.untouched()
    for change in (
        lambda: redis.zadd("a", "m", 2),
        lambda: redis.zadd("b", "m", 1),
        lambda: world.remove("a", "m"),
        lambda: redis.unlink("b"),
    ):
        change()
        assert not guard.untouched()
        assert guard.untouched()


def test_jobs_are_returned_in_the_given_order(world: World):
    world.fail("one")
    world.fail("two")
    two, nobody, one = world.redis.jobs(["two-00000", "nobody", "one-00000"], running=True, payload=True)
    assert (one.job_id, nobody.job_id, two.job_id) == ("one-00000", "nobody", "two-00000")
    assert (one.exists, nobody.exists, two.exists) == (True, False, True)
    assert one.status == "failed"
    assert (one.running, nobody.results, nobody.payload) == ("", (), b"")
    assert [result.outcome for result in one.results] == ["failed"]
    assert one.results[0].execution_id
    assert world.redis.have_results(["two-00000", "nobody", "one-00000"]) == [True, False, True]
    assert {"one-00000", "two-00000"} == dict(world.redis.zrange(world.failed, 0, 10)).keys()


def test_results_come_newest_first(world: World):
    for _ in range(3):
        world.fail("one")
    (record,) = world.redis.jobs(["one-00000"], running=False)
    orders = [tuple(map(int, result.id.split("-"))) for result in record.results]
    assert len(orders) == 3
    assert orders == sorted(orders, reverse=True)


def test_missing_executions_are_reported_as_missing(world: World):
    (gone,) = world.redis.executions(["job:execution"])
    assert (gone.exists, gone.created_at, gone.worker, gone.timeout) == (False, 0.0, "", 0.0)


def test_nothing_asked_is_nothing_answered(world: World):
    assert world.redis.jobs([], running=False) == []
    assert world.redis.executions([]) == []
    assert world.redis.have_results([]) == []
    world.redis.publish("c", "", 10, [])


def test_a_setting_and_the_time_can_be_had(world: World):
    assert world.redis.config_get("notify-keyspace-events") == "zK"
    assert world.redis.time() > 1_000
    assert world.redis.db == 0
