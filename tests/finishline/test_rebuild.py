"""Redis loses what it holds: with a journal all of it comes back, else the last checkpoint, and that is said."""

from __future__ import annotations

import logging
import random
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.core.retry import RetryPolicy
from headway.errors import NotFound, Unavailable
from headway.events import CallableSink, Event
from headway.finishline import FinishLine, Outcome, Status
from headway.telemetry import metrics
from tests.finishline.conftest import OpenLine, events
from tests.finishline.lines import at_functions, at_line
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

QUICK = RetryPolicy(retries=300, base=0.02, cap=0.1)

journals = pytest.mark.parametrize("kind", ["sqlite-journal", "postgres-journal"])


def counts(server: RedisServer, project: str = "p") -> dict[str, str]:
    state: Any = server.client(1)
    fields: dict[str, str] = state.hgetall(f"smap:proj:{project}")
    return fields


def no_immortal_key(server: RedisServer) -> bool:
    state = server.client(1)
    return all(state.ttl(name) > 0 for name in state.scan_iter("smap:proj:*"))


@pytest.mark.req("S0-33")
@journals
@pytest.mark.parametrize("wake", ["count", "progress", "checkpointer", "create", "total"])
def test_a_wiped_project_with_a_journal_is_rebuilt_exactly_by_any_call(
    kind: str, wake: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p")
    line.set_status("p", Status.CRAWLING)
    line.set_total("p", 10)
    line.items_done("p", [1, 2, "three", "https://example.org/an/item/with/a/long/name"])
    line.item_failed("p", 5, error="token=abcdef123456 was refused")
    line.item_done("p")
    before = counts(redis_server)
    redis_server.client().flushall()
    assert line.checkpointer is not None
    ways: dict[str, Callable[[], object]] = {
        "count": lambda: line.item_done("p", 1),  # a duplicate still
        "progress": lambda: line.progress("p"),
        "checkpointer": line.checkpointer.tick,
        "create": lambda: line.create("p"),
        "total": lambda: line.set_total("p", 10),
    }
    ways[wake]()
    assert counts(redis_server) == before
    assert line.item_failed("p", "three").outcome is Outcome.DUPLICATE
    assert line.items_done("p", [7, 8, 9, 10]).outcome is Outcome.COUNTED  # it is CRAWLING still
    assert line.finish_crawl("p").completed
    assert len(events(redis_server)) == 1
    assert no_immortal_key(redis_server)


@journals
def test_only_an_undelivered_completion_is_announced_again_after_a_loss(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    assert line.checkpointer is not None
    for name in ("told", "untold"):
        line.create(name, total=1)
        assert line.item_done(name, 1).completed
        if name == "told":
            heard: list[Event] = []
            relay = line.relay([CallableSink("listener", heard.append)])
            relay.tick()
            relay.tick()
    redis_server.client().flushall()
    line.checkpointer.tick()
    assert [event["job"] for event in events(redis_server)] == ["untold"]
    relay.tick()
    assert [event.job for event in heard] == ["told", "untold"]
    assert counts(redis_server, "untold")["status"] == "DONE"
    assert line.progress("told").status is Status.DONE


@pytest.mark.req("S0-33")
def test_without_a_journal_the_last_checkpoint_is_restored_and_marked(
    open_line: OpenLine, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    line = open_line("sqlite")
    assert line.checkpointer is not None
    line.create("p", total=10)
    line.items_done("p", [1, 2, 3])
    line.item_failed("p", 4)
    line.checkpointer.tick()
    line.item_done("p", 5)  # after the checkpoint
    assert line.progress("p").restored is None
    redis_server.client().flushall()
    with caplog.at_level(logging.WARNING):
        progress = line.progress("p")
    assert (progress.done, progress.errors, progress.total) == (4, 1, 10)
    assert progress.restored is not None
    assert "rebuilt from its last checkpoint" in caplog.text


def test_a_project_that_comes_back_older_than_its_journal_is_raised_by_identity(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    line.create("p", total=4)
    line.items_done("p", [1, "two"])
    state = redis_server.client(1)
    snapshot = [(name, _dump(redis_server, name)) for name in state.scan_iter("smap:proj:p*")]
    line.set_total("p", 3)
    line.item_failed("p", 3)
    assert line.progress("p").status is Status.DONE
    for name, image in snapshot:  # as a restart from an old RDB file does
        _restore(redis_server, name, image)
    assert counts(redis_server) == {"status": "INITIALIZING", "total": "4", "done": "2", "errors": "0"}
    line.checkpointer.tick()
    state.delete("smap:checkpointer")
    line.checkpointer.tick()
    assert counts(redis_server) == {"status": "DONE", "total": "3", "done": "3", "errors": "1"}
    assert line.item_done("p", 3).outcome is Outcome.DUPLICATE


def _dump(server: RedisServer, name: str) -> Any:
    from redis import Redis

    return Redis(port=server.port, db=1).dump(name)


def _restore(server: RedisServer, name: str, image: Any) -> None:
    from redis import Redis

    Redis(port=server.port, db=1).restore(name, 600_000, image, replace=True)


def test_without_a_journal_an_older_state_is_raised_to_the_checkpoint_and_never_lowered(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite")
    assert line.checkpointer is not None
    line.create("p", total=10)
    line.items_done("p", range(5))
    line.checkpointer.tick()
    state = redis_server.client(1)
    state.hset("smap:proj:p", "done", 2)
    for _ in range(2):
        state.delete("smap:checkpointer")
        line.checkpointer.tick()
    assert counts(redis_server)["done"] == "5"
    state.hset("smap:proj:p", "done", 8)  # Redis knows more than the record: that is the usual case
    state.delete("smap:checkpointer")
    line.checkpointer.tick()
    assert counts(redis_server)["done"] == "8"
    assert line._records is not None
    row = line._records.find("p")
    assert row is not None
    assert row.done == 8


def test_a_count_that_reached_sql_and_not_redis_is_made_up_for(open_line: OpenLine, redis_server: RedisServer):
    """Its caller was killed between the two. It was never acknowledged, but the item is through."""
    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    line.create("p", total=2)
    line.item_done("p", 1)
    line._journal.write("p", {"#2": (False, None)})
    for _ in range(2):
        redis_server.client(1).delete("smap:checkpointer")
        line.checkpointer.tick()
    assert counts(redis_server) == {"status": "DONE", "total": "2", "done": "2", "errors": "0"}
    assert len(events(redis_server)) == 1
    redelivered = line.item_done("p", 2)
    assert (redelivered.outcome, redelivered.done) == (Outcome.DUPLICATE, 2)


def test_many_threads_that_find_a_project_missing_rebuild_it_once_and_count_right(
    open_line: OpenLine, redis_server: RedisServer, each_thread: Callable[..., list[Any]]
):
    lines = [open_line("sqlite-journal") for _ in range(2)]
    lines[0].create("p", total=116)
    lines[0].items_done("p", range(100))
    redis_server.client().flushall()
    answers = each_thread(lambda number: lines[number % 2].item_done("p", 100 + number), 16)
    assert {answer.outcome for answer in answers} <= {Outcome.COUNTED, Outcome.COMPLETED}
    assert counts(redis_server) == {"status": "DONE", "total": "116", "done": "116", "errors": "0"}
    assert len(events(redis_server)) == 1
    assert redis_server.client(1).keys("smap:proj:p:*:*") == []  # nothing is left aside


def test_a_wipe_at_any_line_of_rebuilding_loses_no_identity(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite-journal")
    line.create("p", total=5)
    line.items_done("p", [1, 2, "three"])
    for number in range(1_000):
        redis_server.client().flushall()
        with at_line(number, redis_server.client().flushall, "finishline/rebuild.py") as steps:
            assert line.item_done("p", 1).outcome is Outcome.DUPLICATE
        assert line.progress("p").done == 3
        if not steps.reached:
            break
    assert number > 30
    assert line.items_done("p", [1, 2, "three", 4, 5]).counted == 2


def test_an_expired_live_project_comes_back_with_the_next_count(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite-journal")
    line.create("p", total=3)
    line.items_done("p", [1, 2])
    state = redis_server.client(1)
    state.delete(*state.scan_iter("smap:proj:p*"))  # seven quiet days
    assert line.item_done("p", 3).completed


def test_a_deleted_project_is_not_brought_back(open_line: OpenLine, redis_server: RedisServer):
    line, other = open_line("sqlite-journal"), open_line("sqlite-journal")
    line.create("p", total=3)
    other.item_done("p", 1)
    line.delete("p")
    assert line.checkpointer is not None
    line.checkpointer.tick()
    with pytest.raises(NotFound):
        other.item_done("p", 2)
    assert redis_server.client(1).keys("smap:proj:*") == []


def test_changes_are_ordered_by_the_record_even_when_redis_hears_of_them_in_another_order(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite")
    assert line._records is not None
    line.create("p", total=1)
    late = line._records.change("p", total=5, status=None, crawled=None)  # committed, not yet told to Redis
    assert late is not None
    line.set_total("p", 7)
    arguments = [late.version, late.total, late.status.value, int(late.crawled), late.epoch]
    line._commands.send("set_total", "finishline/change", "p", arguments)
    assert counts(redis_server)["total"] == "7"


def test_callers_that_wait_share_one_transaction(
    open_line: OpenLine, each_thread: Callable[..., list[Any]], tmp_path: Path
):
    line = open_line("sqlite-journal")
    line.create("p", total=1000)
    before = metrics.histogram("headway_journal_group").count
    another = sqlite3.connect(tmp_path / "projects.db")
    another.execute("BEGIN IMMEDIATE")  # nobody else can commit
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(each_thread, lambda number: line.item_done("p", number), 32)
        try:
            eventually(lambda: len(line._journal._waiting) >= 31)  # one is at it, all the others wait
        finally:
            another.close()
        assert sorted(answer.done for answer in answers.result()) == list(range(1, 33))
    assert metrics.histogram("headway_journal_group").count - before <= 2


def test_two_callers_with_one_item_get_the_same_verdict(open_line: OpenLine, each_thread: Callable[..., list[Any]]):
    line = open_line("sqlite-journal")
    line.create("p", total=1000)
    for item in range(20):
        each_thread(lambda number, item=item: (line.item_done, line.item_failed)[number]("p", item), 2)
    progress = line.progress("p")
    assert line._database is not None
    [[failed]] = line._database.all("SELECT sum(failed) FROM project_counts")
    assert (progress.done, progress.errors) == (20, failed)


def test_errors_are_kept_in_the_journal_without_secrets(open_line: OpenLine):
    line = open_line("sqlite-journal")
    line.create("p", total=2)
    line.item_failed("p", 1, error="login failed, password=hunter22hunter")
    assert line._database is not None
    [[error]] = line._database.all("SELECT error FROM project_counts")
    assert error.startswith("login failed")
    assert "hunter22" not in error


@pytest.mark.req("S0-14", "S0-33")
@pytest.mark.parametrize("kind", ["sqlite-journal", "postgres-journal"])
def test_a_decision_that_redis_forgot_and_makes_again_is_answered_to_one_call(
    kind: str, redis_factory: Callable[..., RedisServer], open_line: OpenLine
):
    """Two servers stand for one that lost what it had decided: each of them sees the last item come for the first time."""
    before, after = redis_factory(), redis_factory()
    old, new = open_line(kind, url=before.url(1)), open_line(kind, url=after.url(1))
    old.create("p", total=2)
    assert old.item_done("p", 1).outcome is Outcome.COUNTED
    assert new.item_done("p", 2).outcome is Outcome.COMPLETED
    late = old.item_done("p", 2)
    assert (late.outcome, late.done) == (Outcome.COUNTED, 2)
    assert old.progress("p").status is new.progress("p").status is Status.DONE
    assert {event["id"] for event in events(before)} == {event["id"] for event in events(after)}


@pytest.mark.req("S0-14", "S0-33")
def test_it_stays_with_that_call_when_redis_falls_silent_while_sql_is_asked(
    redis_factory: Callable[..., RedisServer], open_line: OpenLine, tcp_proxy: Callable[[int], TcpProxy]
):
    before, after = redis_factory(), redis_factory()
    proxy = tcp_proxy(before.port)
    old = open_line("sqlite-journal", url=f"redis://127.0.0.1:{proxy.port}/1")
    new = open_line("sqlite-journal", url=after.url(1))
    old.create("p", total=2)
    assert old.item_done("p", 1).outcome is Outcome.COUNTED
    assert new.item_done("p", 2).outcome is Outcome.COMPLETED
    proxy.drop_replies(to=b"HGETALL")
    assert old.item_done("p", 2).outcome is Outcome.COUNTED


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-journal"])
def test_the_completion_of_a_deleted_project_does_not_affect_its_successor(kind: str, open_line: OpenLine):
    line, other = open_line(kind), open_line(kind)
    line.create("p", total=1)

    def make_anew() -> None:
        other.delete("p")
        other.create("p", total=1)

    with at_functions("finishline/rebuild.py", claim_completion=make_anew):
        assert line.item_done("p", 1).outcome is Outcome.COMPLETED
    assert line.item_done("p", 1).outcome is Outcome.COMPLETED


@pytest.mark.req("S0-14", "S0-33")
def test_a_call_that_completed_by_rebuilding_learns_it_after_another_wipe(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite-journal")
    line.create("p", total=2)
    line.item_done("p", 1)
    wipe = redis_server.client().flushall
    wipe()
    with at_functions("telemetry/measurements.py", gauge=wipe):  # SQL has heard of it, and the count comes next
        assert line.item_done("p", 2).outcome is Outcome.COMPLETED


# ----------------------------------------------------------------------------------------------------------
# A server that is killed under load

SURVIVALS = {
    "append-only": ({"appendonly": "yes"}, "redis"),
    "journal": ({}, "sqlite-journal"),
    "journal-postgres": ({}, "postgres-journal"),
}


def load_and_kill(
    line: FinishLine, server: RedisServer, blow: Callable[[], object], *, items: int, seed: int
) -> set[int]:
    """Four threads count ``items`` items, each one twice; meanwhile ``blow`` strikes. Returns what was acknowledged."""
    acknowledged: set[int] = set()
    completed: list[int] = []
    work = [number for number in range(items) for _ in range(2)]
    random.Random(seed).shuffle(work)
    half = threading.Event()

    def worker() -> None:
        while work:
            try:
                number = work.pop()
            except IndexError:
                return
            if len(work) < items:
                half.set()
            call = line.item_failed if number % 5 == 0 else line.item_done
            answer = call("p", number)
            acknowledged.add(number)
            if answer.completed:
                completed.append(number)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    half.wait(30)
    blow()
    for thread in threads:
        thread.join(60)
    assert len(completed) <= 1
    return acknowledged


@pytest.mark.req("S0-37", "S0-33")
@pytest.mark.parametrize("way", list(SURVIVALS))
def test_kill_9_of_the_server_under_load_loses_nothing_acknowledged(
    way: str, redis_factory: Callable[..., RedisServer], open_line: OpenLine
):
    config, kind = SURVIVALS[way]
    server = redis_factory(**config)
    line = open_line(kind, url=server.url(1), retry=QUICK)
    line.create("p", total=200)

    def blow() -> None:
        server.kill9()
        server.start()

    acknowledged = load_and_kill(line, server, blow, items=200, seed=3)
    assert acknowledged == set(range(200))
    assert eventually(lambda: line.progress("p")).status is Status.DONE
    assert counts(server) == {"status": "DONE", "total": "200", "done": "200", "errors": "40"}
    assert len({event["id"] for event in events(server)}) == len(events(server)) == 1


@pytest.mark.req("S0-33")
def test_flushall_under_load_loses_nothing_of_a_journal(redis_server: RedisServer, open_line: OpenLine):
    line = open_line("sqlite-journal")
    line.create("p", total=300)
    strikes = 0

    def blow() -> None:
        nonlocal strikes
        for _ in range(5):
            redis_server.client().flushall()
            strikes += 1

    acknowledged = load_and_kill(line, redis_server, blow, items=300, seed=4)
    assert acknowledged == set(range(300))
    assert line.progress("p").status is Status.DONE
    assert counts(redis_server) == {"status": "DONE", "total": "300", "done": "300", "errors": "60"}
    assert len(events(redis_server)) == 1
    assert no_immortal_key(redis_server)


@pytest.mark.faults
@pytest.mark.parametrize("way", list(SURVIVALS))
def test_a_hundred_kills_of_the_server(
    way: str, redis_factory: Callable[..., RedisServer], open_line: OpenLine, tmp_path: Path
):
    config, kind = SURVIVALS[way]
    server = redis_factory(**config)
    line = open_line(kind, url=server.url(1), retry=QUICK)
    for cycle in range(100):
        line.create("p", total=40)

        def blow() -> None:
            server.kill9()
            server.start()

        load_and_kill(line, server, blow, items=40, seed=cycle)
        progress = eventually(lambda: _ask(line))
        assert (progress.status, progress.done, progress.errors) == (Status.DONE, 40, 8)
        assert [event["job"] for event in events(server)] == ["p"]
        line.delete("p")
        server.client(1).delete("smap:events")


def _ask(line: FinishLine) -> Any:
    try:
        return line.progress("p")
    except Unavailable:
        return None


@pytest.mark.faults
def test_a_hundred_wipes_under_load(redis_server: RedisServer, open_line: OpenLine):
    line = open_line("sqlite-journal")
    for cycle in range(100):
        line.create("p", total=60)
        load_and_kill(line, redis_server, lambda: redis_server.client().flushall(), items=60, seed=cycle)
        assert line.progress("p").status is Status.DONE
        assert counts(redis_server) == {"status": "DONE", "total": "60", "done": "60", "errors": "12"}
        assert len(events(redis_server)) == 1
        line.delete("p")
        redis_server.client(1).delete("smap:events")


def test_creating_a_project_that_is_there_reads_nothing_of_its_journal(open_line: OpenLine, redis_server: RedisServer):
    """Every worker of a fleet may say so when it starts, and a journal may have millions of items."""
    line = open_line("sqlite-journal")
    line.create("p", total=1_000)
    line.items_done("p", [*range(100), *map("page-{}".format, range(100))])
    client: Any = redis_server.client(1)

    def remembered() -> list[int]:
        stats = client.info("commandstats")
        return [stats[f"cmdstat_{command}"]["calls"] for command in ("setbit", "sadd")]

    before = remembered()
    assert line.create("p").done == 200
    assert remembered() == before
    client.flushall()
    assert line.create("p").done == 200
    assert line.items_done("p", [99, 100, "page-99"]).counted == 1


@journals
def test_creating_a_project_succeeds_while_redis_is_wiped(kind: str, open_line: OpenLine, redis_server: RedisServer):
    line = open_line(kind)
    wipe = redis_server.client().flushall
    with at_functions("finishline/rebuild.py", install=wipe):  # between the lease and the script that needs it
        assert line.create("once", total=3).status is Status.INITIALIZING
    assert counts(redis_server, "once")["total"] == "3"

    for number in range(0, 150, 5):
        with at_line(number, wipe, "finishline"):
            assert line.create(f"p{number}", total=3).total == 3
        assert line.item_done(f"p{number}", 1).done == 1


def test_creating_a_project_succeeds_although_every_lease_is_lost(open_line: OpenLine, redis_server: RedisServer):
    """Redis is wiped each time before the script runs: the project is recorded, and the next count puts it in place."""
    line = open_line("sqlite-journal")
    over = threading.Event()

    def wipe() -> None:
        client = redis_server.client()
        while not over.is_set():
            client.flushall()

    wiping = threading.Thread(target=wipe)
    wiping.start()
    try:
        for number in range(30):
            assert line.create(f"p{number}", total=2).total == 2
    finally:
        over.set()
        wiping.join()
    assert [line.item_done(f"p{number}", 1).done for number in range(30)] == [1] * 30
