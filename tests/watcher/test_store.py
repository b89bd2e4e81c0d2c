"""One contract over every store of what was reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import pytest

from headway._sql import connect
from headway.errors import StoreCorrupt
from headway.watcher import ProcessedStore, RedisProcessedStore, SqlProcessedStore
from headway.watcher.adapters import connect as connect_redis
from headway.watcher.store.contract import Follow, Seen

Open = Callable[[str], ProcessedStore]


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def open_store(request: pytest.FixtureRequest, tmp_path) -> Iterator[Open]:
    """Opens the same store again and again, as restarts do."""
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url()
        yield lambda queue: RedisProcessedStore(connect_redis(url), queue)
    else:
        sqlite = f"sqlite:///{tmp_path}/watcher.db"
        url = sqlite if request.param == "sqlite" else request.getfixturevalue("postgres_with_tables")
        yield lambda queue: SqlProcessedStore(connect(url), queue)


@pytest.mark.req("S4-19")
def test_marked_members_are_found_after_a_restart(open_store: Open):
    rows = [Seen("a", 5.0, "1-0", 100.0), Seen("b", -1.0, "2-0", 101.5), Seen("c:x", inf, "stuck", 99.0)]
    open_store("q@0").mark("failed", rows, [], [])
    store = open_store("q@0")
    assert store.look("failed", ["b", "c:x", "a", "unknown"]) == {row.member: row for row in rows}
    assert store.newest("failed") == 101.5


def test_marking_again_replaces(open_store: Open):
    store = open_store("q@0")
    for seen in ("1-0", "2-0"):
        store.mark("failed", [Seen("a", 5.0, seen, 100.0)], [], [])
    assert store.look("failed", ["a"])["a"].seen == "2-0"


def test_queues_and_registries_are_apart(open_store: Open):
    open_store("q@0").mark("failed", [Seen("a", 5.0, "1-0", 100.0)], [Follow("a:x", "stuck", "e", 1.5)], [])
    assert open_store("q@0").look("canceled", ["a"]) == {}
    assert open_store("q@1").look("failed", ["a"]) == {}
    assert open_store("q@1").follows() == []
    assert open_store("q@0").newest("canceled") == 0


def test_the_first_start_is_remembered(open_store: Open):
    assert open_store("q@0").baseline(100.25) == 100.25
    assert open_store("q@0").baseline(200.0) == 100.25


def test_awaited_outcomes_are_stored_until_they_end(open_store: Open):
    store = open_store("q@0")
    store.mark("started", [], [Follow("b:y", "lost", "e2", 2.5), Follow("a:x", "stuck", "e1", 1.5)], [])
    store.mark("canceled", [], [Follow("a:x", "canceled", "e3", 3.5)], [])
    assert open_store("q@0").follows() == [Follow("a:x", "canceled", "e3", 3.5), Follow("b:y", "lost", "e2", 2.5)]
    store.mark("started", [], [], ["a:x", "unknown"])
    assert open_store("q@0").follows() == [Follow("b:y", "lost", "e2", 2.5)]


def test_only_members_missing_for_long_are_forgotten(open_store: Open):
    store = open_store("q@0")
    store.mark("failed", [Seen(member, 5.0, "1-0", 100.0) for member in "abc"], [], [])
    store.mark("canceled", [Seen("a", 5.0, "1-0", 100.0)], [], [])
    store.found("failed", ["b", "unknown"], 200.0)
    assert store.stale("failed", 150.0, 1) == ["a"]
    stale = store.stale("failed", 150.0, 10)
    assert stale == ["a", "c"]
    store.forget("failed", stale)
    assert store.stale("failed", 150.0, 10) == []
    assert set(store.look("failed", ["a", "b", "c", "unknown"])) == {"b"}
    assert set(store.look("canceled", ["a"])) == {"a"}
    assert store.newest("failed") == 100.0


@pytest.mark.parametrize("count", [0, 1, 3, 10_000])
def test_any_number_of_members_may_be_given(open_store: Open, count):
    store = open_store("q@0")
    if isinstance(store, RedisProcessedStore):
        count = min(count, 2_000)  # SQL has limits of its own, to parameters and texts
    members = [f"job-{number:05}" for number in range(count)]
    store.mark("failed", [Seen(member, 5.0, "1-0", 100.0) for member in members], [], [])
    assert store.look("failed", [*members]).keys() == set(members)
    assert store.look("canceled", members) == {}
    store.found("failed", members, 200.0)
    assert store.stale("failed", 200.0, 5) == []
    assert len(store.stale("failed", 300.0, 50_000)) == count
    store.forget("failed", members)
    assert store.look("failed", members) == {}
    assert store.newest("failed") == 0
    store.mark("started", [], [Follow(f"{member}:x", "lost", "e", 1.0) for member in members], [])
    assert len(store.follows()) == count
    store.mark("started", [], [], [f"{member}:x" for member in members])
    assert store.follows() == []


@pytest.mark.parametrize("member", ["a\0b", "\udcff", "x" * 100_000, "\u2603" * 300, "\u0661"])
def test_a_member_may_be_any_text(open_store: Open, member):
    open_store("q@0").mark("failed", [Seen(member, 5.0, "1-0", 100.0), Seen("a", 5.0, "2-0", 100.0)], [], [])
    assert open_store("q@0").look("failed", [member])[member].seen == "1-0"
    (other, stale) = sorted(open_store("q@0").stale("failed", 200.0, 5), key=lambda one: one != "a")
    assert other == "a"
    open_store("q@0").forget("failed", [stale])
    assert open_store("q@0").look("failed", [member, "a"]).keys() == {"a"}


def test_outcomes_awaited_by_an_earlier_release_in_redis_are_read(redis_server):
    redis_server.client().hset("headway:watcher:{q@0}:followed", "a:x", '["stuck", "e"]')
    store = RedisProcessedStore(connect_redis(redis_server.url()), "q@0")
    assert store.follows() == [Follow("a:x", "stuck", "e", 0.0)]


def test_a_damaged_record_in_redis_is_not_taken_for_nothing(redis_server):
    store = RedisProcessedStore(connect_redis(redis_server.url()), "q@0")
    client = redis_server.client()
    client.hset("headway:watcher:{q@0}:failed", "a", '["high", 1]')
    client.hset("headway:watcher:{q@0}:followed", "a:x", "[1]")
    with pytest.raises(StoreCorrupt, match="record of a"):
        store.look("failed", ["a"])
    with pytest.raises(StoreCorrupt, match="followed"):
        store.follows()


def test_an_empty_change_sends_no_command(redis_server):
    RedisProcessedStore(connect_redis(redis_server.url()), "q@0").mark("failed", [], [], [])
    assert redis_server.client().keys("*") == []
