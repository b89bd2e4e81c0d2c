"""Asking how far a project is: one command, never a guess, and for servers one round trip for all who ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway import _sql
from headway.errors import InvalidInput, StoreCorrupt, Unavailable
from headway.events import CallableSink, Event
from headway.finishline import AsyncProgress, FinishLine, Progress, Status
from headway.finishline.async_progress import PIPELINE
from tests.finishline.conftest import OpenLine
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


def calls(server: RedisServer) -> dict[str, int]:
    stats = server.client().info("commandstats")
    return {name.removeprefix("cmdstat_"): facts["calls"] for name, facts in stats.items()}


@pytest.mark.req("S0-19")
def test_a_progress_query_is_one_hgetall(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    line.create("p", total=4)
    line.progress("p")
    redis_server.client().config_resetstat()
    line.progress("p")
    handshakes = ("info", "select", "client", "hello", "config", "config|resetstat", "ping")
    counted = {name: number for name, number in calls(redis_server).items() if name not in handshakes}
    assert counted == {"hgetall": 1}


@pytest.mark.req("S0-20", "S0-21")
@pytest.mark.parametrize(
    ("total", "done", "percent"),
    [(0, 0, 0.0), (0, 5, 0.0), (4, 1, 25.0), (3, 1, 33.33), (8, 8, 100.0), (2, 3, 100.0), (10**15, 1, 0.0)],
)
def test_percent_is_done_of_total_and_never_beyond_100(total: int, done: int, percent: float):
    told = Progress(Status.PROCESSING, total, done, 1).as_dict()
    assert told["percent"] == percent
    assert (told["total"], told["done"], told["errors"]) == (total, done, 1)


@pytest.mark.req("S0-21")
def test_the_answer_has_numbers_not_texts(open_line: OpenLine):
    line = open_line()
    line.create("p", total=4)
    line.item_failed("p", 1)
    told = line.progress("p").as_dict()
    assert told == {
        "status": "INITIALIZING", "total": 4, "done": 1, "errors": 1, "percent": 25.0, "live": True, "restored": None,
    }  # fmt: skip
    assert [type(told[name]) for name in ("total", "done", "errors")] == [int, int, int]


@pytest.mark.req("S0-22", "S0-23")
def test_an_unknown_and_an_expired_project_are_not_found_and_asking_creates_no_key(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    state = redis_server.client(1)
    assert line.progress("nobody").as_dict()["status"] == "NOT_FOUND"
    assert line.progress("nobody").percent == 0
    line.create("p", total=1)
    for name in state.scan_iter():
        state.pexpire(name, 1)
    eventually(lambda: line.progress("p").status is Status.NOT_FOUND)
    eventually(lambda: state.keys() == [])  # nothing was made by asking


@pytest.mark.req("S0-22")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_finished_project_is_answered_from_the_record_after_redis_let_it_go(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    line.create("p", total=1)
    line.item_failed("p", 1)
    heard: list[Event] = []
    relay = line.relay([CallableSink("listener", heard.append)])
    relay.tick()
    relay.tick()  # nothing is left to tell, so it is noted as told
    assert [event.job for event in heard] == ["p"]
    redis_server.client(1).flushdb()
    progress = line.progress("p")
    assert progress == Progress(Status.DONE, 1, 1, 1, live=False)
    assert redis_server.client(1).keys("smap:proj:*") == []


def test_more_done_than_the_total_is_logged_once(open_line: OpenLine, caplog: pytest.LogCaptureFixture):
    line = open_line()
    line.create("p", total=1)
    line.items_done("p", [1, 2, 3])
    assert line.progress("p").percent == line.progress("p").percent == 100.0
    assert caplog.text.count("more items are counted than the total") == 1


# ----------------------------------------------------------------------------------------------------------
# The reader for servers


@pytest.mark.req("S0-24", "S0-25")
def test_a_thousand_tasks_that_ask_at_once_are_answered_by_few_round_trips(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    for number in range(200):
        line.create(f"p{number}", total=number + 1)

    async def ask() -> list[Progress]:
        async with AsyncProgress(redis_server.url(1)) as reader:
            await reader.progress("p0")
            redis_server.client().config_resetstat()
            return await asyncio.gather(*(reader.progress(f"p{number % 250}") for number in range(1000)))

    answers = asyncio.run(ask())
    assert [answer.total for answer in answers] == [
        number % 250 + 1 if number % 250 < 200 else 0 for number in range(1000)
    ]
    assert {answer.status for answer in answers[200:250]} == {Status.NOT_FOUND}
    assert calls(redis_server)["hgetall"] == 250  # each project once
    # The server reads from a socket once per round trip, and once more for every 16 KB of a pipeline.
    assert redis_server.client().info("stats")["total_reads_processed"] < 25


@pytest.mark.req("S0-24", "S0-25")
def test_a_thousand_pollers_are_served_without_a_queue_building_up(open_line: OpenLine, redis_server: RedisServer):
    """The figure itself (p99 below 10 ms) is bench/finishline.py's; here they ask every second."""
    line = open_line()
    for number in range(100):
        line.create(f"p{number}", total=10)
    waits: list[float] = []

    async def client(reader: AsyncProgress, number: int) -> None:
        await asyncio.sleep(number / 1000)
        for _ in range(2):
            began = time.perf_counter()
            assert (await reader.progress(f"p{number % 100}")).total == 10
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(max(0.0, 1 - (time.perf_counter() - began)))

    async def crowd() -> None:
        async with AsyncProgress(redis_server.url(1)) as reader, asyncio.TaskGroup() as tasks:
            for number in range(1000):
                tasks.create_task(client(reader, number))

    asyncio.run(crowd())
    assert len(waits) == 2000
    assert sorted(waits)[1980] < 5.0


def test_the_reader_answers_from_sql_for_projects_missing_in_redis(
    open_line: OpenLine, redis_server: RedisServer, database_url: str
):
    line = open_line("sqlite-journal")
    line.create("p", total=2)
    line.item_done("p", 1)
    redis_server.client(1).flushdb()

    async def ask(database: str | _sql.Database) -> tuple[Progress, Progress]:
        async with AsyncProgress(redis_server.url(1), database) as reader:
            return await reader.progress("p"), await reader.progress("nobody")

    with _sql.connect(database_url) as database:
        for given in (database, database_url):
            known, unknown = asyncio.run(ask(given))
            assert known == Progress(Status.INITIALIZING, 2, 1, 0, live=False)
            assert unknown.status is Status.NOT_FOUND


@pytest.mark.parametrize("database", [17, Path("projects.db"), object(), "projects.db", ""])
def test_a_reader_and_a_line_refuse_an_invalid_database_at_creation(database: Any, redis_server: RedisServer):
    for make in (AsyncProgress, FinishLine):
        with pytest.raises(InvalidInput, match="database"):
            make(redis_server.url(1), database)


@pytest.mark.req("S0-29", "S0-32")
def test_the_reader_fails_at_once_while_redis_is_away(redis_server: RedisServer):
    async def ask() -> tuple[list[BaseException | Progress], float]:
        async with AsyncProgress(redis_server.url(1)) as reader:
            await reader.progress("p")
            redis_server.stop()
            with pytest.raises(Unavailable):
                await reader.progress("p")
            began = time.perf_counter()
            answers = await asyncio.gather(*(reader.progress("p") for _ in range(100)), return_exceptions=True)
            took = time.perf_counter() - began
            await asyncio.to_thread(redis_server.start)
            for _ in range(200):
                try:
                    assert (await reader.progress("p")).status is Status.NOT_FOUND
                    break
                except Unavailable:
                    await asyncio.sleep(0.02)
            else:
                pytest.fail("it did not recover")
            return answers, took

    answers, took = asyncio.run(ask())
    assert {type(answer) for answer in answers} == {Unavailable}
    assert took < 5.0


def test_one_damaged_project_does_not_spoil_the_answers_about_the_others(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    line.create("good", total=2)
    redis_server.client(1).set("smap:proj:text", "x")
    redis_server.client(1).hset("smap:proj:half", "status", "DONE")

    async def ask() -> list[BaseException | Progress]:
        async with AsyncProgress(redis_server.url(1)) as reader:
            return await asyncio.gather(
                *(reader.progress(name) for name in ("text", "good", "half")), return_exceptions=True
            )

    text, good, half = asyncio.run(ask())
    assert isinstance(good, Progress)
    assert good.total == 2
    assert isinstance(text, StoreCorrupt)
    assert isinstance(half, StoreCorrupt)


def test_a_cancelled_task_does_not_cancel_the_query_of_others(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    line = open_line()
    line.create("p", total=2)
    proxy = tcp_proxy(redis_server.port)

    async def ask() -> Progress:
        async with AsyncProgress(f"redis://127.0.0.1:{proxy.port}/1") as reader:
            await reader.progress("p")
            proxy.delay(0.2)
            first = asyncio.create_task(reader.progress("p"))
            second = asyncio.create_task(reader.progress("p"))
            await asyncio.sleep(0.05)
            first.cancel()
            return await second

    assert asyncio.run(ask()).total == 2


def test_the_reader_checks_ids_as_everybody_does(redis_server: RedisServer):
    async def ask() -> None:
        async with AsyncProgress(redis_server.url(1)) as reader:
            await reader.progress("a:b")

    with pytest.raises(InvalidInput):
        asyncio.run(ask())


POISON = [{"total": b"\xff\xfe"}, {"restored": "1e300"}, {"restored": "nan"}, {"done": "1_000"}, {"status": b"\x80"}]


@pytest.mark.parametrize("poison", POISON, ids=repr)
def test_one_spoilt_hash_costs_its_own_asker_and_no_other(
    poison: dict[str, str | bytes], open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite")
    assert line.checkpointer is not None
    line.create("good", total=4)
    line.create("bad", total=4)
    line.create("good-too", total=4)
    redis_server.client(1).hset("smap:proj:bad", mapping=poison)  # type: ignore[arg-type]  # its stub knows texts only

    async def ask() -> list[Progress | BaseException]:
        async with AsyncProgress(redis_server.url(1)) as reader:
            asked = asyncio.gather(
                *(reader.progress(name) for name in ("good", "bad", "good-too")), return_exceptions=True
            )
            return list(await asyncio.wait_for(asked, 30))

    first, spoilt, last = asyncio.run(ask())
    assert isinstance(spoilt, StoreCorrupt)
    assert first == last == Progress(Status.INITIALIZING, 4)
    with pytest.raises(StoreCorrupt):
        line.progress("bad")
    line.item_done("good", 1)
    line.checkpointer.tick()  # the others are checkpointed
    assert line._records is not None
    row = line._records.find("good")
    assert row is not None
    assert row.done == 1


def test_an_unexpected_error_reaches_every_caller(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch):
    async def ask() -> None:
        async with AsyncProgress(redis_server.url(1)) as reader:
            monkeypatch.setattr(reader._client, "pipeline", None)
            with pytest.raises(TypeError):
                await asyncio.wait_for(reader.progress("p"), 30)

    asyncio.run(ask())


@pytest.mark.parametrize("steps", [1, 2])  # before the reader's own first step, and after it
def test_waiting_queries_fail_when_the_reader_ends_and_the_next_one_works(
    steps: int, open_line: OpenLine, redis_server: RedisServer
):
    open_line().create("p")

    async def ask() -> None:
        async with AsyncProgress(redis_server.url(1)) as reader:
            asked = [asyncio.ensure_future(reader.progress(f"p-{number}")) for number in range(2 * PIPELINE)]
            for _ in range(steps):
                await asyncio.sleep(0)
            assert reader._worker is not None
            reader._worker.cancel()  # as a loop does that ends
            done, waiting = await asyncio.wait(asked, timeout=30)
            assert not waiting
            assert all(task.cancelled() for task in done)
            assert (await reader.progress("p-1999")).status is Status.NOT_FOUND
            assert (await reader.progress("p")).status is Status.INITIALIZING

    asyncio.run(ask())


def test_a_reader_refuses_a_second_event_loop(open_line: OpenLine, redis_server: RedisServer):
    open_line().create("p")
    reader = AsyncProgress(redis_server.url(1))
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(reader.progress("p")).status is Status.INITIALIZING
    with pytest.raises(InvalidInput, match="another event loop"):
        asyncio.run(reader.progress("p"))
    assert loop.run_until_complete(reader.progress("p")).status is Status.INITIALIZING
    loop.run_until_complete(reader.close())
    loop.close()
