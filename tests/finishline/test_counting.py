"""The counters and the finish line, for every way of keeping them."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any

import pytest

from headway.errors import InvalidInput, NotFound, Refused, StoreCorrupt
from headway.finishline import Outcome, Status
from headway.finishline.progress import BITMAP_LIMIT, identity
from tests.finishline.conftest import KINDS, OpenLine, events
from tests.services.redis import RedisServer

KEY = "smap:proj:p"
TTL = 604_800

every_kind = pytest.mark.parametrize("kind", list(KINDS))
quick_kinds = pytest.mark.parametrize("kind", ["redis", "sqlite", "sqlite-journal"])


@pytest.mark.req("S0-01", "S0-05", "S0-06", "S0-07")
@every_kind
def test_a_new_project_is_a_hash_of_four_fields_in_database_1_for_seven_days(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    open_line(kind).create("p")
    state = redis_server.client(1)
    assert state.type(KEY) == "hash"
    assert state.hgetall(KEY) == {"status": "INITIALIZING", "total": "0", "done": "0", "errors": "0"}
    assert TTL - 5 <= state.ttl(KEY) <= TTL
    assert redis_server.client(0).keys() == []


@quick_kinds
def test_creating_an_existing_project_leaves_it_as_it_is(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p", total=3)
    line.item_done("p", 1)
    again = line.create("p", total=9)
    assert (again.total, again.done) == (3, 1)


@pytest.mark.req("S0-09", "S0-10")
@every_kind
def test_every_write_gives_the_project_and_its_companions_seven_days_more(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p", total=100)
    line.items_done("p", [1, "a"])
    state = redis_server.client(1)
    names = [KEY, f"{KEY}:meta", f"{KEY}:bits", f"{KEY}:seen"]
    writes: list[Callable[[], object]] = [
        lambda: line.item_done("p", 2),
        lambda: line.item_done("p", 2),
        lambda: line.item_failed("p", "x"),
        lambda: line.item_done("p"),
        lambda: line.set_total("p", 50),
        lambda: line.set_status("p", Status.CRAWLING),
        lambda: line.finish_crawl("p"),
        lambda: line.touch("p"),
    ]
    for write in writes:
        for name in names:
            state.expire(name, 100)
        write()
        assert [state.ttl(name) > TTL - 60 for name in names] == [True] * 4


@pytest.mark.req("S0-07", "S0-09")
@quick_kinds
def test_no_key_of_a_project_is_ever_without_a_lifetime_and_none_goes_before_the_hash(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    state = redis_server.client(1)
    line.create("p", total=100)
    writes: list[Callable[[], object]] = [
        lambda: line.set_total("p", 90),
        lambda: line.item_done("p", 1),
        lambda: line.item_done("p", "a"),
        lambda: line.item_done("p"),
        lambda: line.items_done("p", [2, "b"]),
    ]
    for write in writes:
        write()
        lives = {name: state.ttl(name) for name in state.scan_iter(f"{KEY}*")}
        hash_lives = lives.pop(KEY)
        assert all(life > hash_lives + 3000 for life in lives.values()), lives


@pytest.mark.req("S0-11")
@pytest.mark.parametrize("kind", ["redis", "sqlite-journal"])
@pytest.mark.parametrize("named", [True, False], ids=["item ids", "no ids"])
def test_each_of_fifty_threads_gets_its_own_new_value(
    kind: str, named: bool, open_line: OpenLine, each_thread: Callable[..., list[Any]]
):
    line = open_line(kind)
    line.create("p", total=1000)
    answers = each_thread(lambda number: line.item_done("p", number if named else None), 50)
    assert sorted(answer.done for answer in answers) == list(range(1, 51))
    assert {answer.outcome for answer in answers} == {Outcome.COUNTED}


@pytest.mark.req("S0-12")
@every_kind
def test_a_failed_item_counts_as_done_and_as_an_error(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p", total=10)
    answer = line.item_failed("p", 1, error=ValueError("bad"))
    progress = line.progress("p")
    assert (answer.done, progress.done, progress.errors) == (1, 1, 1)


@pytest.mark.req("S0-08", "S0-12")
def test_a_change_of_several_fields_is_one_command_on_the_wire(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    line.create("p", total=10)
    line.item_done("p", 0)
    line.set_total("p", 9)
    with redis_server.client().monitor() as monitor:
        line.item_failed("p", 1)
        line.finish_crawl("p", total=5)
        line.progress("p")
        commands: list[str] = []
        for heard in monitor.listen():
            if heard["client_type"] != "lua":
                commands.append(heard["command"].split()[0].upper())
            if commands and commands[-1] == "HGETALL":
                break
    assert commands == ["EVALSHA", "EVALSHA", "HGETALL"]


@pytest.mark.req("S0-14", "S0-15")
@every_kind
def test_the_last_item_completes_the_project_and_appends_the_event(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p")
    line.set_total("p", 2)
    assert line.item_done("p", 0).outcome is Outcome.COUNTED
    assert line.item_failed("p", "b").completed
    assert line.progress("p").status is Status.DONE
    [event] = events(redis_server)
    assert event["type"] == "job.completed"
    assert event["job"] == "p"
    assert event.keys() == {"id", "type", "source", "job", "at", "version", "data"}
    assert json.loads(event["data"]) == {"total": 2, "succeeded": 1, "failed": 1}


@pytest.mark.req("S0-16")
@quick_kinds
def test_after_completion_items_still_count_but_never_complete_again(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p", total=1)
    assert line.item_done("p", 0).completed
    assert line.item_done("p", 0).outcome is Outcome.DUPLICATE
    assert line.item_done("p", 1).outcome is Outcome.COUNTED
    assert line.set_total("p", 1).outcome is Outcome.LATE
    assert line.set_status("p", "PROCESSING").outcome is Outcome.LATE
    assert line.finish_crawl("p", 1).outcome is Outcome.LATE
    progress = line.progress("p")
    assert (progress.status, progress.done, progress.total, progress.percent) == (Status.DONE, 2, 1, 100.0)
    assert len(events(redis_server)) == 1


@pytest.mark.req("S0-17")
@every_kind
def test_nothing_completes_while_crawling_and_the_end_of_the_crawl_does(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p", total=2)
    line.set_status("p", Status.CRAWLING)
    assert line.items_done("p", [0, 1, 2]).outcome is Outcome.COUNTED
    assert line.set_total("p", 3).outcome is Outcome.UPDATED
    assert events(redis_server) == []
    assert line.finish_crawl("p").completed


@pytest.mark.req("S0-17")
@quick_kinds
def test_any_status_after_crawling_may_complete_the_project(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p", total=1)
    line.set_status("p", Status.CRAWLING)
    line.item_done("p", 0)
    assert line.set_status("p", Status.PROCESSING).completed


@pytest.mark.req("S0-14")
@quick_kinds
def test_a_total_that_arrives_after_the_last_item_completes_the_project(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p")
    line.item_done("p", 0)
    assert line.set_total("p", 1).completed


@pytest.mark.req("S0-18")
@every_kind
def test_without_a_total_no_count_completes_and_only_the_end_of_the_crawl_completes_an_empty_project(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p")
    assert line.item_done("p", 0).outcome is Outcome.COUNTED
    assert line.set_total("p", 0).outcome is Outcome.UPDATED
    line.create("empty")
    assert line.finish_crawl("empty").completed
    assert [event["job"] for event in events(redis_server)] == ["empty"]


@quick_kinds
def test_a_project_marked_failed_counts_on_and_does_not_complete_until_it_is_taken_up_again(
    kind: str, open_line: OpenLine
):
    line = open_line(kind)
    line.create("p", total=1)
    line.set_status("p", Status.FAILED)
    assert line.item_done("p", 0).outcome is Outcome.COUNTED
    assert line.set_status("p", Status.PROCESSING).completed


@every_kind
def test_an_item_counts_once_and_its_first_outcome_stays(kind: str, open_line: OpenLine):
    line, other = open_line(kind), open_line(kind)
    line.create("p", total=10)
    assert line.item_done("p", 7).counted == 1
    assert other.item_failed("p", "7").outcome is Outcome.DUPLICATE
    url = "https://example.org/a/very/long/address?with=a&query=of&many=parts"
    assert other.item_failed("p", url).done == 2
    assert line.item_done("p", url).outcome is Outcome.DUPLICATE
    batch = line.items_done("p", [7, 8, 8, url, "9"])
    assert (batch.done, batch.counted) == (4, 2)
    assert line.progress("p").errors == 1


@quick_kinds
def test_calls_without_an_item_id_count_each_time(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p", total=10)
    assert [line.item_done("p").done for _ in range(3)] == [1, 2, 3]
    assert line.item_failed("p").done == 4
    assert line.progress("p").errors == 1


@every_kind
def test_counting_in_an_unknown_project_is_an_error_and_creates_nothing(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    calls: list[Callable[[], object]] = [
        lambda: line.item_done("nobody", 1),
        lambda: line.item_done("nobody"),
        lambda: line.item_failed("nobody", 1),
        lambda: line.set_total("nobody", 1),
        lambda: line.set_status("nobody", "CRAWLING"),
        lambda: line.finish_crawl("nobody", 0),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            call()
    assert redis_server.client(1).keys("smap:proj:*") == []


@every_kind
def test_a_recreated_project_starts_at_zero_with_its_own_event(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    for _ in range(2):
        line.create("p", total=1)
        assert line.item_done("p", 1).completed
        assert line.delete("p")
    assert not line.delete("p")
    assert line.progress("p").status is Status.NOT_FOUND
    assert redis_server.client(1).keys("smap:proj:*") == []
    first, second = events(redis_server)
    assert first["id"] != second["id"]


def test_leftovers_of_an_earlier_project_are_not_counted_in_a_new_one(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    line.create("p", total=2)
    line.items_done("p", [1, "a"])
    redis_server.client(1).delete(KEY)  # by hand, its companions stay
    line.create("p", total=5)
    assert line.items_done("p", [1, "a"]).done == 2


def test_a_count_beside_the_journal_is_refused(open_line: OpenLine):
    journal, plain, bare = open_line("sqlite-journal"), open_line("sqlite"), open_line("redis")
    journal.create("p", total=2)
    plain.create("q", total=2)
    for line in (plain, bare):
        with pytest.raises(Refused, match="journal"):
            line.item_done("p", 1)
    with pytest.raises(Refused, match="without a journal"):
        journal.item_done("q", 1)
    assert journal.item_done("p", 1).done == 1


@pytest.mark.parametrize("damage", [{"done": "abc"}, {"total": ""}, {"errors": "1.5x"}, {"status": None}])
def test_a_damaged_hash_is_an_error_and_the_other_projects_go_on(
    damage: dict[str, str | None], open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    line.create("p", total=2)
    line.create("q", total=2)
    for field, value in damage.items():
        if value is None:
            redis_server.client(1).hdel(KEY, field)
        else:
            redis_server.client(1).hset(KEY, field, value)
    for call in (lambda: line.item_done("p", 1), lambda: line.set_total("p", 3), lambda: line.progress("p")):
        with pytest.raises(StoreCorrupt):
            call()
    assert line.item_done("q", 1).done == 1


BAD_IDS: list[Any] = ["", ".", "..", "__x__", "a b", "a:b", "a/b", "*", "{p}", "é", "x" * 129, "a\nb", "\x00", 7, None]


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
def test_an_id_that_could_mean_something_else_to_a_store_is_refused(bad: Any, open_line: OpenLine):
    line = open_line()
    calls = (line.create, line.progress, line.item_done, line.item_failed, line.finish_crawl, line.delete, line.touch)
    for call in calls:
        with pytest.raises(InvalidInput):
            call(bad)


@pytest.mark.parametrize("bad", ["", "x" * 513, "a\nb", "\x00", "\ud800", True, 1.5, b"x"], ids=repr)
def test_an_invalid_item_id_is_refused(bad: Any, open_line: OpenLine):
    line = open_line()
    line.create("p", total=3)
    with pytest.raises(InvalidInput):
        line.item_done("p", bad)
    assert line.progress("p").done == 0


@pytest.mark.parametrize("bad", [-1, 2**53, 1.0, "5", True, None], ids=repr)
def test_an_invalid_total_is_refused(bad: Any, open_line: OpenLine):
    line = open_line()
    with pytest.raises(InvalidInput):
        line.create("p", total=bad)
    with pytest.raises(InvalidInput):
        line.set_total("p", bad)


@pytest.mark.parametrize("bad", ["DONE", "NOT_FOUND", "done", "", "CRAWLING "])
def test_a_status_that_is_not_an_operators_to_set_is_refused(bad: str, open_line: OpenLine):
    line = open_line()
    line.create("p")
    with pytest.raises(InvalidInput, match="status"):
        line.set_status("p", bad)


@pytest.mark.parametrize("count", [0, 10_001])
def test_a_batch_of_none_or_of_too_many_is_refused(count: int, open_line: OpenLine):
    line = open_line()
    line.create("p")
    with pytest.raises(InvalidInput, match="in one call"):
        line.items_done("p", range(count))
    assert line.items_done("p", range(10_000)).counted == 10_000


def test_ids_of_any_script_count_and_numbers_of_any_length_are_an_answer(open_line: OpenLine):
    class Page(str, Enum):  # noqa: UP042  # as older programs write it
        HOME = "home"

    line = open_line()
    line.create("p", total=100)
    for odd in (
        "👩‍👩‍👧",
        "שלום\u200f",
        "a\u00adb",
        "ن\u200cن",
        10**400,
        -(10**18),
        HTTPStatus.OK,
        Page.HOME,
        "é",
        "e\u0301",
    ):
        assert line.item_done("p", odd).counted == 1, odd
    assert line.items_done("p", ["home", 200, "200"]).outcome is Outcome.DUPLICATE
    for bad in (10**5000, -(10**5000), "\u2028", "\x7f", "x\ud800"):
        with pytest.raises(InvalidInput):
            line.item_done("p", bad)
    with pytest.raises(InvalidInput):
        line.set_total("p", 10**5000)
    assert line.progress("p").done == 10


def test_numbers_are_one_identity_as_text_too_and_odd_ones_are_texts():
    assert identity(17) == identity("17") == "#17"
    assert identity("017") == "$017"
    assert identity("٣") == "$٣"  # a digit, but not one of ours
    assert identity(BITMAP_LIMIT - 1) == f"#{BITMAP_LIMIT - 1}"
    assert identity(BITMAP_LIMIT) == f"${BITMAP_LIMIT}"
    assert identity(-3) == "$-3"
    long = identity("x" * 33)
    assert len(long) == 34
    assert identity(long[1:]) != long  # a short id cannot be made to look like the digest of a long one


@pytest.mark.parametrize("kind", ["sqlite-journal", "postgres-journal"])
@pytest.mark.parametrize("error", ["no such file: \udcff", "\0", OSError("\ud800")])
def test_an_error_that_no_database_takes_as_it_is_does_not_keep_its_item_from_being_counted(
    kind: str, error: str | OSError, open_line: OpenLine
):
    line = open_line(kind)
    line.create("p", total=2)
    assert line.item_failed("p", 1, error=error).counted == 1
    assert line.item_failed("p", 2, error=error).completed
