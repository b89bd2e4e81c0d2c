"""What two stores say of one project when one of them went back, was wiped, or did not answer at the wrong moment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from headway import _redis
from headway.events import CallableSink, Event
from headway.finishline import Outcome, Progress, Status
from tests.finishline.conftest import OpenLine, events
from tests.finishline.test_rebuild import counts
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

Proxies = Callable[[int], TcpProxy]

recorded = pytest.mark.parametrize("kind", ["sqlite", "sqlite-journal"])


@recorded
def test_an_empty_project_that_was_finished_stays_so_when_an_item_came_late_and_redis_was_wiped(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    assert line.checkpointer is not None
    line.create("p")
    assert line.finish_crawl("p").completed
    assert line.item_done("p", 1).outcome is Outcome.COUNTED
    redis_server.client().flushall()  # and with it the event that nobody was told yet
    line.checkpointer.tick()
    assert counts(redis_server)["status"] == "DONE"
    assert [event["job"] for event in events(redis_server)] == ["p"]
    assert line.item_done("p", 2).outcome is Outcome.COUNTED
    assert line.progress("p").status is Status.DONE


@recorded
def test_a_late_item_does_not_reopen_an_empty_delivered_project(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p")
    assert line.finish_crawl("p").completed
    heard: list[Event] = []
    relay = line.relay([CallableSink("listener", heard.append)])
    relay.tick()
    relay.tick()
    line.item_done("p", 1)
    redis_server.client().flushall()
    assert line.item_done("p", 2).outcome is Outcome.COUNTED
    assert line.progress("p").status is Status.DONE
    relay.tick()
    assert [event.job for event in heard] == ["p"]


def test_a_completed_project_that_an_older_redis_has_open_is_completed_by_the_record_and_its_event_appended(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    line.create("p")
    line.set_status("p", Status.CRAWLING)
    state = redis_server.client(1)
    snapshot = {name: state.hgetall(name) for name in ("smap:proj:p", "smap:proj:p:meta")}
    assert line.finish_crawl("p").completed
    line.item_done("p", 1)  # late: by now there are more items than the total says
    state.flushdb()
    for name, fields in snapshot.items():  # as a replica that had not heard of the end
        state.hset(name, mapping=fields)  # type: ignore[arg-type]  # this client is not an asynchronous one
    for _ in range(2):
        state.delete("smap:checkpointer")
        line.checkpointer.tick()
    assert counts(redis_server) == {"status": "DONE", "total": "0", "done": "1", "errors": "0"}
    assert [event["job"] for event in events(redis_server)] == ["p"]


def test_a_lease_whose_answer_was_lost_does_not_keep_the_call_that_asked_for_it_waiting(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Proxies
):
    proxy, state = tcp_proxy(redis_server.port), redis_server.client(1)
    line = open_line("sqlite-journal", f"redis://127.0.0.1:{proxy.port}/1")
    line.create("p", total=2)
    line.item_done("p", 1)
    state.flushdb()
    proxy.drop_replies(to=_redis.script("lease/acquire").sha.encode())
    with ThreadPoolExecutor() as threads:
        counting = threads.submit(line.item_done, "p", 2)
        eventually(lambda: state.exists("smap:proj:p:rebuild"))
        state.persist("smap:proj:p:rebuild")  # it does not end by itself
        proxy.pass_through()
        assert counting.result().completed


def test_a_project_whose_creation_was_not_answered_says_after_a_wipe_that_counts_may_be_missing(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Proxies
):
    proxy = tcp_proxy(redis_server.port)
    creator, worker = open_line("sqlite", f"redis://127.0.0.1:{proxy.port}/1"), open_line("sqlite")
    worker.create("another")  # the server knows the scripts
    proxy.drop_replies(to=_redis.script("finishline/install").sha.encode())
    assert not creator.create("p", total=10).live  # as far as it knows
    worker.items_done("p", [1, 2, 3])
    redis_server.client().flushall()
    assert worker.progress("p").restored is not None


def test_a_restored_database_is_still_authoritative(open_line: OpenLine, redis_server: RedisServer, tmp_path: Path):
    line = open_line("sqlite-journal")
    line.create("p", total=9)
    line.set_status("p", Status.CRAWLING)
    line.close()
    database = tmp_path / "projects.db"
    backup = database.read_bytes()
    line = open_line("sqlite-journal")
    for total in (7, 8, 9):  # what the backup does not have, and Redis has heard
        line.set_total("p", total)
    line.close()
    database.write_bytes(backup)
    line = open_line("sqlite-journal")
    line.item_done("p", 1)
    assert line.finish_crawl("p", total=1).completed
    assert counts(redis_server)["status"] == "DONE"


def older_redis(server: RedisServer, images: dict[str, bytes]) -> None:
    """As a server is that was restored from an older dump, or a replica that lagged and took over."""
    server.client(1).flushdb()
    with Redis(port=server.port, db=1) as raw:
        for name, image in images.items():
            raw.restore(name, 600_000, image)


def dump(server: RedisServer) -> dict[str, bytes]:
    state: Any = server.client(1)
    with Redis(port=server.port, db=1) as raw:
        return {name: cast("bytes", raw.dump(name)) for name in state.scan_iter("smap:proj:p*")}


@pytest.mark.parametrize("how", ["older", "killed"])
def test_an_item_after_the_end_is_not_lost_without_a_relay(how: str, open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    line.create("p", total=2)
    assert line.items_done("p", [1, 2]).completed
    before = dump(redis_server)
    if how == "older":
        assert line.item_failed("p", 3).done == 3
        older_redis(redis_server, before)
    else:
        line._journal.write("p", {"#3": (True, None)})  # its caller is killed before Redis hears of it
    for _ in range(3):
        redis_server.client(1).delete("smap:checkpointer")
        line.checkpointer.tick()
    assert line.progress("p") == Progress(Status.DONE, 2, 3, 1)
    assert line.item_done("p", 3).outcome is Outcome.DUPLICATE
    assert len(events(redis_server)) == (0 if how == "older" else 1)  # it is not announced again for that


@pytest.mark.parametrize("how", ["total", "crawl"])
@pytest.mark.parametrize("who", ["count", "checkpointer", "create"])
def test_a_project_of_an_older_redis_does_not_finish_by_the_total_and_status_it_had_then(
    how: str, who: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    line.create("p", total=3)
    line.items_done("p", [1, 2])
    before = dump(redis_server)
    if how == "total":
        line.set_total("p", 10)
    else:
        line.set_status("p", Status.CRAWLING)
    line.items_done("p", [3, 4, 5])
    older_redis(redis_server, before)
    if who == "count":
        assert line.item_done("p", 6).outcome is Outcome.COUNTED
    if who == "create":
        line.create("p")
    for _ in range(3):
        redis_server.client(1).delete("smap:checkpointer")
        line.checkpointer.tick()
    assert events(redis_server) == []
    assert line.progress("p").done == (6 if who == "count" else 5)
    line.items_done("p", range(6, 11))
    if how == "crawl":
        assert line.finish_crawl("p", total=10).completed
    assert len(events(redis_server)) == 1


def test_a_checkpoint_does_not_finish_a_project_of_an_older_redis_by_the_total_it_had_then(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite")
    assert line.checkpointer is not None
    line.create("p", total=3)
    line.items_done("p", [1, 2])
    before = dump(redis_server)
    line.set_total("p", 10)
    line.items_done("p", [3, 4, 5])
    line.checkpointer.tick()
    older_redis(redis_server, before)
    line.create("p")  # puts it in place as the record has it
    for _ in range(3):
        redis_server.client(1).delete("smap:checkpointer")
        line.checkpointer.tick()
    assert events(redis_server) == []
    assert (line.progress("p").done, line.progress("p").total) == (5, 10)


def test_a_count_between_the_writes_of_a_total_uses_the_newer_total(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite-journal")
    line.create("p", total=1)
    assert line._records is not None
    late = line._records.change("p", total=2, status=None, crawled=None)  # committed, not yet told to Redis
    assert late is not None
    assert line.item_done("p", 1).outcome is Outcome.COUNTED
    assert line._commands.send("set_total", "finishline/change", "p", late.as_change()).outcome is Outcome.UPDATED
    late = line._records.change("p", total=1, status=None, crawled=None)
    assert line.item_done("p", 1).completed  # it was through before, and the total it heard of made that all
    assert len(events(redis_server)) == 1


@pytest.mark.parametrize("kind", ["redis", "sqlite", "sqlite-journal"])
def test_a_deletion_that_is_tried_again_does_not_delete_the_next_project_of_that_name(
    kind: str, open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Proxies
):
    proxy, state = tcp_proxy(redis_server.port), redis_server.client(1)
    one, other = open_line(kind, f"redis://127.0.0.1:{proxy.port}/1"), open_line(kind)
    other.create("another")
    assert other.delete("another")  # the server knows the scripts
    one.create("p", total=2)
    proxy.drop_replies(to=_redis.script("finishline/remove").sha.encode())
    with ThreadPoolExecutor() as threads:
        deleting = threads.submit(one.delete, "p")
        eventually(lambda: not state.exists("smap:proj:p"))
        state.delete("smap:proj:p:rebuild")  # a lease whose end was not heard lapses
        other.create("p", total=2)
        other.item_done("p", 1)
        proxy.pass_through()
        assert deleting.result()
    assert other.progress("p").done == 1
    assert other.item_done("p", 2).completed
