"""A project is deleted, remade, restored from an older dump, let go by Redis: what is counted stays its own."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from headway._lease import Owner, RedisLeases
from headway.errors import HeadwayError, InvalidInput, NotFound, Refused, StorageError
from headway.events import CallableSink, Event
from headway.finishline import FinishLine, Outcome, Progress, Status
from tests.finishline.conftest import OpenLine, events
from tests.finishline.lines import at_line
from tests.services.redis import RedisServer

TTL = 604_800


def lives(server: RedisServer) -> dict[str, int]:
    state: Any = server.client(1)
    return {name: state.ttl(name) for name in state.scan_iter("smap:proj:p*")}


@pytest.mark.req("S0-07", "S0-09")
@pytest.mark.parametrize("kind", ["redis", "sqlite", "sqlite-journal"])
def test_every_refresh_of_a_project_refreshes_its_identities_too(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    """Else a project that is asked for every day lives on, and its items count twice after a week."""
    line, other = open_line(kind), open_line("redis")
    line.create("p", total=100)
    line.items_done("p", [1, "a"])
    state = redis_server.client(1)
    calls: list[Callable[[], object]] = [
        lambda: line.create("p"),  # EXISTS
        lambda: line.item_done("p", 1),  # DUPLICATE
        lambda: line.touch("p"),
        lambda: _refused(lambda: other.item_done("p", 1)),  # perhaps JOURNALED
        lambda: _refused(lambda: other.set_total("p", 100)),  # perhaps RECORDED
        lambda: _refused(lambda: (state.hset("smap:proj:p", "done", "x"), line.item_done("p", 1))),  # CORRUPT
    ]
    for number, call in enumerate(calls):
        for name in state.scan_iter("smap:proj:p*"):
            state.expire(name, 100)
        call()
        after = {name: life for name, life in lives(redis_server).items() if not name.endswith(":rebuild")}
        assert len(after) == 4
        refreshed = {life > 100 for life in after.values()}
        assert len(refreshed) == 1, (number, after)


def _refused(call: Callable[[], object]) -> None:
    with suppress(HeadwayError):
        call()


def test_a_key_of_another_type_is_refused_and_gets_no_lifetime(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    state = redis_server.client(1)
    state.set("smap:proj:p", "somebody's")
    for call in (lambda: line.item_done("p", 1), lambda: line.create("p"), lambda: line.touch("p")):
        with pytest.raises(StorageError):
            call()
    assert (state.ttl("smap:proj:p"), state.get("smap:proj:p")) == (-1, "somebody's")


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-journal"])
def test_a_project_deleted_while_it_is_rebuilt_does_not_come_back(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line, operator = open_line(kind), open_line(kind)
    assert line.checkpointer is not None
    for number in range(0, 400, 5):
        line.create("p", total=10)
        line.items_done("p", [1, 2, 3])
        line.checkpointer.tick()
        redis_server.client(1).flushdb()
        deleting: list[bool] = []

        def delete(deleting: list[bool] = deleting) -> None:
            # The lease of whoever rebuilds would be waited for: let it end, as if he had been stopped for a minute.
            redis_server.client(1).delete("smap:proj:p:rebuild")
            deleting.append(operator.delete("p"))

        with at_line(
            number,
            delete,
            "finishline/rebuild.py",
            "finishline/line.py",
            "finishline/commands.py",
            "finishline/creation.py",
        ) as steps:
            line.progress("p")
        if not steps.reached:
            line.delete("p")
            break
        assert deleting == [True]
        assert redis_server.client(1).keys("smap:proj:p*") == []
        assert line.create("p", total=7) == Progress(Status.INITIALIZING, 7)
        assert line.item_done("p", 1).counted == 1
        line.delete("p")
    assert number > 50


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-journal"])
def test_a_project_rebuilt_while_it_is_deleted_does_not_stay(kind: str, open_line: OpenLine, redis_server: RedisServer):
    line, other = open_line(kind), open_line(kind)
    assert line.checkpointer is not None
    state = redis_server.client(1)
    for number in range(0, 400, 3):
        line.create("p", total=10)
        line.items_done("p", [1, 2, 3])
        line.checkpointer.tick()
        state.flushdb()

        def rebuild() -> None:
            state.delete("smap:proj:p:rebuild")  # as if whoever deletes had been stopped for a minute
            other.progress("p")

        with at_line(
            number,
            rebuild,
            "finishline/rebuild.py",
            "finishline/line.py",
            "finishline/commands.py",
            "finishline/creation.py",
        ) as steps:
            assert line.delete("p")
        if not steps.reached:
            break
        assert state.keys("smap:proj:p*") == [], number
        assert line.progress("p").status is Status.NOT_FOUND, number
    assert number > 20


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("sqlite", lambda line: line.set_total("p", 50)),
        ("sqlite", lambda line: line.checkpointer.tick()),
        ("sqlite-journal", lambda line: line.item_done("p", 4)),
        ("sqlite-journal", lambda line: line.checkpointer.tick()),
    ],
    ids=["change", "checkpoint", "journal", "journal-checkpoint"],
)
def test_an_answer_of_sql_about_a_deleted_project_does_not_reach_its_successor(
    kind: str, call: Callable[[FinishLine], object], open_line: OpenLine, redis_server: RedisServer
):
    """Redis would take the older one's version for the newer, and answer UPDATED to changes it ignores, for good."""
    line, operator = open_line(kind), open_line(kind)
    assert line._records is not None
    state = redis_server.client(1)
    for number in range(400):
        line.create("p", total=100)
        line.items_done("p", [1, 2, 3])
        for total in (101, 102, 103):
            line._records.change("p", total=total, status=None, crawled=None)  # of a caller that was killed then

        def remake() -> None:
            state.delete("smap:proj:p:rebuild")  # as if whoever has it had been stopped for a minute
            operator.delete("p")
            operator.create("p", total=9)

        state.delete("smap:checkpointer")
        with at_line(
            number,
            remake,
            "finishline/line.py",
            "finishline/commands.py",
            "finishline/creation.py",
            "finishline/checkpointer.py",
        ) as steps:
            call(line)
        if not steps.reached:
            break
        assert line.set_total("p", 7).outcome is Outcome.UPDATED
        found, row = line.progress("p"), line._records.find("p")
        assert row is not None
        assert (found.total, row.total) == (7, 7), number
        assert row.done == found.done <= 1 if kind == "sqlite-journal" else row.done == 0, number
        line.delete("p")
    assert number > 10


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-journal"])
def test_a_deleted_project_that_an_older_dump_brings_back_gives_way_to_the_next_of_its_name(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    assert line.checkpointer is not None
    assert line._records is not None
    state = redis_server.client(1)

    def keep() -> dict[str, bytes]:
        raw: Any = Redis(port=redis_server.port, db=1)
        return {name: raw.dump(name) for name in state.scan_iter("smap:proj:p*")}

    for done in (3, 5):  # the second one was finished
        line.create("p", total=5)
        line.items_done("p", range(done))
        older = keep()
        line.delete("p")
        for act, expected in (
            (line.checkpointer.tick, Progress(Status.INITIALIZING, 8)),
            (lambda: line.set_total("p", 6), Progress(Status.INITIALIZING, 6)),
        ):
            line.create("p", total=8)
            for name, value in older.items():
                state.restore(name, 0, value, replace=True)
            state.delete("smap:checkpointer")
            act()
            row = line._records.find("p")
            assert row is not None
            found = replace(line.progress("p"), restored=None)  # without a journal it may say so: counts may be missing
            assert (found, row.done, row.completed_at) == (expected, 0, None)
            line.delete("p")


def test_only_a_deletion_waits_for_a_rebuild_in_progress(open_line: OpenLine, redis_server: RedisServer):
    line, other = open_line("sqlite-journal"), open_line("sqlite-journal")
    for name in ("p", "q"):
        line.create(name, total=10)
        line.item_done(name, 1)
    redis_server.client(1).flushdb()
    somebody = RedisLeases(line._server.client)
    lease = somebody.acquire("smap:proj:p:rebuild", Owner.current(), 30.0)  # this process lives: it is not taken over
    began = time.monotonic()
    assert other.progress("q").done == 1
    assert time.monotonic() - began < 20.0
    assert other.checkpointer is not None
    other.checkpointer.tick()
    assert redis_server.client(1).exists("smap:proj:p") == 0
    somebody.release(lease)
    assert other.progress("p").done == 1


def test_the_lease_of_a_process_that_was_killed_is_taken_over_at_once(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite-journal")
    line.create("p", total=10)
    line.item_done("p", 1)
    redis_server.client(1).flushdb()
    child = os.fork()
    if child == 0:
        RedisLeases(line._server.client).acquire("smap:proj:p:rebuild", Owner.current(), 3600)
        os._exit(0)
    os.waitpid(child, 0)
    assert redis_server.client(1).ttl("smap:proj:p:rebuild") > 3000
    assert line.item_done("p", 2).done == 2


def test_keys_of_a_deleted_project_are_not_counted_in_its_successor(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite")
    line.create("p", total=10)
    line.items_done("p", [1, 2])
    assert line._database is not None
    line._database.run(lambda tx: tx.execute("DELETE FROM projects"))  # as in a restored database
    assert line.create("p", total=5) == Progress(Status.INITIALIZING, 5)
    assert line.item_done("p", 1).done == 1


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-journal"])
def test_a_project_created_without_a_database_is_not_taken_over_by_one_with(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    bare, line = open_line("redis"), open_line(kind)
    bare.create("p", total=10)
    bare.items_done("p", [1, 2, 3])
    with pytest.raises(Refused, match="not in this database") as refusal:
        line.create("p", total=2)
    assert "delete it" in refusal.value.hint
    assert bare.progress("p") == Progress(Status.INITIALIZING, 10, 3)
    assert events(redis_server) == []
    assert line._records is not None
    assert line._records.find("p") is None
    assert bare.delete("p")
    assert line.create("p", total=2).total == 2


def test_a_project_of_another_database_is_left_alone(redis_server: RedisServer, tmp_path: Path):
    with (
        FinishLine(redis_server.url(1), f"sqlite:///{tmp_path}/a.db", checkpointer=False) as first,
        FinishLine(redis_server.url(1), f"sqlite:///{tmp_path}/b.db", checkpointer=False) as second,
    ):
        first.create("p", total=10)
        first.items_done("p", [1, 2, 3])
        with pytest.raises(Refused, match="with another"):
            second.create("p", total=1)
        assert first.progress("p") == Progress(Status.INITIALIZING, 10, 3)


def test_a_recorded_project_takes_its_total_from_its_record_alone(open_line: OpenLine):
    line, bare = open_line("sqlite"), open_line("redis")
    line.create("p", total=10)
    for call in (
        lambda: bare.set_total("p", 1),
        lambda: bare.finish_crawl("p"),
        lambda: bare.set_status("p", "FAILED"),
    ):
        with pytest.raises(Refused, match="in a database"):
            call()
    assert line.progress("p") == Progress(Status.INITIALIZING, 10)


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-journal"])
@pytest.mark.parametrize("delivered", [True, False], ids=["delivered", "undelivered"])
def test_a_server_restored_from_an_older_dump_is_brought_up_to_the_record(
    kind: str, delivered: bool, redis_factory: Callable[..., RedisServer], open_line: OpenLine
):
    server = redis_factory(save="3600 1000")
    line = open_line(kind, url=server.url(1))
    assert line.checkpointer is not None
    heard: list[str] = []
    relay = line.relay([CallableSink("listener", lambda event: heard.append(event.id))])
    line.create("p", total=10)
    line.items_done("p", range(5))
    line.checkpointer.tick()
    server.client().save()
    shutil.copy(server.directory / "dump.rdb", server.directory / "older.rdb")
    line.items_done("p", range(5, 9))
    assert line.item_failed("p", 9).completed
    if delivered:
        relay.tick()
        relay.tick()
    server.kill9()
    shutil.copy(server.directory / "older.rdb", server.directory / "dump.rdb")
    server.start()
    assert server.client(1).hget("smap:proj:p", "done") == "5"
    for _ in range(2):
        server.client(1).delete("smap:checkpointer")
        line.checkpointer.tick()
    assert line.progress("p") == Progress(Status.DONE, 10, 10, 1)
    relay.tick()
    relay.tick()
    assert len(set(heard)) == 1
    if kind == "sqlite-journal":
        assert line.items_done("p", range(10)).outcome is Outcome.DUPLICATE


@pytest.mark.parametrize("again", ["set_total", "set_status"])
def test_an_older_redis_catches_up_with_the_journal_after_repeated_settings(
    again: str, open_line: OpenLine, redis_server: RedisServer
):
    """Said again they have a later version, and a count that knows it is not taken by the older project."""
    line, state = open_line("sqlite-journal"), redis_server.client(1)
    assert line.checkpointer is not None
    line.create("p", total=10)
    line.set_status("p", "PROCESSING")
    line.items_done("p", range(5))
    raw = Redis.from_url(redis_server.url(1))
    older: Any = {name: raw.dump(name) for name in raw.keys("smap:proj:p*")}
    if again == "set_total":
        line.set_total("p", 10)
    else:
        line.set_status("p", "PROCESSING")
    assert line.items_done("p", range(5, 9)).done == 9
    line._journal.write("p", {"#9": (False, None)})  # its caller is killed before Redis hears of it
    for name, content in older.items():
        raw.restore(name, 0, content, replace=True)
    raw.close()
    for _ in range(2):
        state.delete("smap:checkpointer")
        line.checkpointer.tick()
    assert line.progress("p") == Progress(Status.DONE, 10, 10)


def test_a_finished_project_expired_in_redis_is_read_from_sql_only(open_line: OpenLine, redis_server: RedisServer):
    """Nobody relays, so its event was never delivered."""
    line = open_line("sqlite-journal")
    line.create("p", total=1)
    assert line.item_done("p", 1).completed
    state = redis_server.client(1)
    state.delete(*state.scan_iter("smap:proj:*"))  # a week later
    assert line._database is not None
    line._database.run(lambda tx: tx.execute("UPDATE projects SET completed_at = completed_at - ?", (TTL + 60,)))
    assert [line.progress("p") for _ in range(3)] == [Progress(Status.DONE, 1, 1, live=False)] * 3
    assert state.keys("smap:proj:*") == []
    assert line.item_done("p", 2).outcome is Outcome.COUNTED  # a straggler
    assert len(events(redis_server)) == 1


def test_sparse_numbers_cost_as_much_as_texts(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    state: Any = redis_server.client(1)
    for number in range(20):
        line.create(f"p{number}")
        line.item_done(f"p{number}", 66_000_000 + number)
        assert line.item_done(f"p{number}", str(66_000_000 + number)).outcome is Outcome.DUPLICATE
    used = sum(state.memory_usage(name, samples=0) for name in state.scan_iter("smap:proj:*"))
    assert used < 20 * 2_000


def test_a_number_is_one_item_whether_it_came_when_few_were_there_or_many(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    line.create("p")
    assert line.item_done("p", 100_000).counted == 1  # alone: a member
    assert line.items_done("p", range(10_000)).counted == 10_000
    assert line.items_done("p", [100_000, 100_001]).counted == 1  # now 100,001 is a bit
    line.create("q", total=1_000_000)
    assert line.item_done("q", 500_000).counted == 1  # expected: a bit
    line.set_total("q", 10)
    assert line.items_done("q", [500_000, 500_001]).counted == 1
    assert line.items_failed("q", [500_000, 500_001]).outcome is Outcome.DUPLICATE
    assert redis_server.client(1).scard("smap:proj:q:seen") == 1


def test_callers_that_were_not_heard_of_for_a_day_are_forgotten(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    line.create("p", total=10**6)
    state: Any = redis_server.client(1)
    for _ in range(30):
        with FinishLine(redis_server.url(1)) as short_lived:
            short_lived.item_done("p")
    callers = [field for field in state.hkeys("smap:proj:p:meta") if "." in field]
    assert len(callers) >= 30
    for _ in range(26):  # hours
        state.expire("smap:proj:p:meta", TTL + 3000)
        line.item_done("p")
    callers = [field for field in state.hkeys("smap:proj:p:meta") if "." in field]
    assert len(callers) == 1
    assert line.progress("p").done == 30 + 26


@pytest.mark.req("S0-20")
@pytest.mark.parametrize("kind", ["redis", "sqlite", "sqlite-journal"])
def test_the_end_of_a_crawl_without_a_total_is_refused_when_items_are_through(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p")
    line.items_done("p", [1, 2, 3])
    with pytest.raises(InvalidInput, match=r"3 items .* its total is 0"):
        line.finish_crawl("p")
    if line.checkpointer is not None:
        line.checkpointer.tick()
    assert line.progress("p").status is not Status.DONE
    assert line.set_total("p", 4).outcome is Outcome.UPDATED
    assert line.item_done("p", 4).completed


@pytest.mark.parametrize("bad", ["abc", b"abc", 7, None], ids=repr)
def test_one_item_is_not_taken_for_many(bad: Any, open_line: OpenLine):
    line = open_line()
    line.create("p")
    with pytest.raises(InvalidInput, match="not a collection"):
        line.items_done("p", bad)
    with pytest.raises(InvalidInput, match="not a collection"):
        line.items_failed("p", bad)
    assert line.progress("p").done == 0


def test_undelivered_events_are_never_trimmed_and_their_number_is_an_alert(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    state: Any = redis_server.client(1)
    for _ in range(10):
        state.eval("for n = 1, 10000 do redis.call('XADD', KEYS[1], '*', 'n', n) end", 1, "smap:events")
    alerts: list[str] = []
    with FinishLine(redis_server.url(1), alert=alerts.append) as line:
        for name in ("p", "q"):
            line.create(name, total=1)
            assert line.item_done(name, 1).completed
    assert state.xlen("smap:events") == 100_002
    assert len(alerts) == 1
    assert "100,001 events wait" in alerts[0]


def test_the_event_of_a_restored_project_keeps_its_id_and_shape(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    line.create("p", total=2)
    line.item_done("p", 1)
    assert line.item_failed("p", 2).completed
    [before] = events(redis_server)
    redis_server.client().flushall()
    line.checkpointer.tick()
    [after] = events(redis_server)
    assert (after["id"], json.loads(after["data"])) == (before["id"], {"total": 2, "succeeded": 1, "failed": 1})


def test_a_deleted_project_is_unknown_also_to_a_late_worker(open_line: OpenLine, tmp_path: Path):
    line, late = open_line("sqlite"), open_line("sqlite")
    line.create("p", total=2)
    late.item_done("p", 1)
    heard: list[Event] = []
    line.relay([CallableSink("x", heard.append)])
    assert line.delete("p")
    assert not line.delete("p")
    with pytest.raises(NotFound):
        late.item_done("p", 2)
