"""A server that grants exactly what is documented, and one that is full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import OutOfMemoryError

from headway.core.retry import RetryPolicy
from headway.errors import Unavailable
from headway.events import CallableSink, Event
from headway.finishline import FinishLine, Status
from tests.finishline.conftest import OpenLine
from tests.services.redis import RedisServer, installations

ROOT = Path(__file__).parents[2]
ONCE = RetryPolicy(retries=0)


def documented_rights() -> list[str]:
    page = (ROOT / "docs" / "reference" / "redis.md").read_text("utf-8")
    found = re.search(r"^ACL SETUSER (headway on .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].split()


@pytest.fixture(params=installations(), ids=lambda path: path.parent.parent.name)
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "guarded", request.param)
    server.start()
    yield server
    server.discard()


def use_all_of_it(line: FinishLine, server: RedisServer) -> list[Event]:
    heard: list[Event] = []
    relay = line.relay([CallableSink("listener", heard.append)])
    line.create("p")
    line.create("p")
    line.set_status("p", Status.CRAWLING)
    line.items_done("p", [1, "a", 60_000_000])
    line.items_failed("p", [2, 60_000_000])
    if line.checkpointer is not None:
        line.checkpointer.tick()
        server.client(1).flushdb()
        assert line.progress("p").done >= 4
        server.client(1).hset("smap:proj:p", "total", 9)
        for _ in range(2):
            server.client(1).delete("smap:checkpointer")
            line.checkpointer.tick()
    line.touch("p")
    assert line.finish_crawl("p", total=4).completed
    for _ in range(3):
        relay.tick()
    line.delete("p")
    return heard


@pytest.mark.parametrize("kind", ["redis", "sqlite", "sqlite-journal"])
def test_the_documented_rights_are_enough_and_none_of_them_is_too_many(
    kind: str, guarded: RedisServer, open_line: OpenLine
):
    admin = guarded.client()
    rights = documented_rights()
    admin.execute_command("ACL", "SETUSER", *[right.replace("PASSWORD", "s3cret") for right in rights])
    url = f"redis://headway:s3cret@127.0.0.1:{guarded.port}/1"
    assert [event.job for event in use_all_of_it(open_line(kind, url=url), guarded)] == ["p"]
    log: list[object] = admin.execute_command("ACL", "LOG")
    refused = [entry for entry in log if "client" not in str(entry).lower().split("object")[-1][:40]]
    assert refused == []


@pytest.mark.parametrize("missing", ["evalsha", "info", "hgetall", "hincrby", "~smap:*"])
def test_a_missing_right_is_reported_at_once_without_the_password(
    missing: str, guarded: RedisServer, open_line: OpenLine
):
    rights = [right.replace("PASSWORD", "s3cret") for right in documented_rights() if right != f"+{missing}"]
    rights = [right for right in rights if right != missing]
    guarded.client().execute_command("ACL", "SETUSER", *rights)
    line = open_line(url=f"redis://headway:s3cret@127.0.0.1:{guarded.port}/1", retry=ONCE)
    guarded_line = open_line(url=guarded.url(1))
    guarded_line.create("p", total=5)

    def use() -> None:
        line.item_done("p", 1)
        line.progress("p")

    with pytest.raises(Unavailable, match="refused us") as refusal:
        use()
    assert "s3cret" not in str(refusal.value)
    assert "ACL" in refusal.value.hint


def fill(server: RedisServer) -> None:
    cache = server.client(0)
    with suppress(OutOfMemoryError):
        for number in range(100_000):
            cache.set(f"page{number}", "x" * 1000)
    with pytest.raises(OutOfMemoryError):
        cache.set("one more", "x" * 1000)


def test_a_full_server_accepts_counts_new_projects_and_rebuilds(
    redis_factory: Callable[..., RedisServer], open_line: OpenLine
):
    server = redis_factory(maxmemory="5mb", maxmemory_policy="noeviction")
    line = open_line("sqlite-journal", url=server.url(1))
    assert line.checkpointer is not None
    heard: list[Event] = []
    relay = line.relay([CallableSink("listener", heard.append)])
    line.create("p", total=6)
    line.items_done("p", [1, "a", 60_000_000])
    state = server.client(1)
    state.delete(*state.scan_iter("smap:proj:*"))
    fill(server)
    assert line.progress("p").done == 3  # rebuilt: what is put back was there before
    line.create("q", total=1)
    assert line.item_done("q", 1).completed
    state.delete(*state.scan_iter("smap:proj:p*"))
    line.checkpointer.tick()
    assert line.items_done("p", [1, 2, 3, 4]).completed
    for _ in range(3):
        relay.tick()
    assert [event.job for event in heard] == ["q", "p"]


@pytest.mark.req("S0-04")
def test_eviction_is_reported_once_and_again_after_it_had_stopped(
    open_line: OpenLine, redis_factory: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway._redis.EvictionWatch.pace", 0.0)
    server, said = redis_factory(maxmemory="100mb"), list[str]()
    line = open_line(url=server.url(1), alert=said.append)
    line.create("p", total=100)
    with server.client() as client:
        for policy, times in (("noeviction", 0), ("allkeys-lru", 1), ("noeviction", 1), ("volatile-ttl", 2)):
            client.config_set("maxmemory-policy", policy)
            for _ in range(3):
                assert line.item_done("p").counted == 1
            assert len(said) == times, policy
        looks = client.info("commandstats")["cmdstat_info"]["calls"]
        assert "volatile-ttl" in said[1]
        assert "may be lost" in said[1]
        monkeypatch.setattr("headway._redis.EvictionWatch.pace", 60.0)
        for _ in range(20):
            line.item_done("p")
        assert client.info("commandstats")["cmdstat_info"]["calls"] <= looks + 2, "once a minute"


def test_allowed_eviction_is_not_reported_again(
    open_line: OpenLine, redis_factory: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway._redis.EvictionWatch.pace", 0.0)
    server, said = redis_factory(maxmemory="100mb", maxmemory_policy="allkeys-lru"), list[str]()
    line = open_line(url=server.url(1), alert=said.append, allow_eviction=True)
    line.create("p", total=100)
    line.item_done("p")
    assert said == []
