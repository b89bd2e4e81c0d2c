"""What two stores say of one project when one of them went back, was wiped, or did not answer at the wrong moment."""

from __future__ import annotations

import pytest

from headway.events import CallableSink, Event
from headway.finishline import Outcome, Status
from tests.finishline.conftest import OpenLine, events
from tests.finishline.test_rebuild import counts
from tests.services.redis import RedisServer

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
def test_an_empty_project_that_was_told_is_neither_open_again_nor_told_again_when_a_late_item_rebuilds_it(
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
