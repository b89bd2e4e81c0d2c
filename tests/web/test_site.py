"""Reading off the loop: shared while it is under way, bounded, and never older than one's own change."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import web
from headway.config import Config
from headway.errors import Unavailable
from headway.finishline import FinishLine
from headway.views.queue import read_queues
from headway.views.reading import Reader
from headway.web.site import CHANGES, THREADS, WAITING, Site
from tests.services.redis import RedisServer


@pytest.fixture
def site() -> Iterator[Site]:
    config = Config(cli={"database": "sqlite:///:memory:"})
    made = Site("sqlite:///:memory:", None, config, Reader(config, create=True))
    yield made
    made.close()


class Question:
    """Counts who asked, and answers when it is let."""

    def __init__(self) -> None:
        self.asked, self.let, self._lock = 0, threading.Event(), threading.Lock()

    def __call__(self, *_: object) -> int:
        with self._lock:
            self.asked += 1
            number = self.asked
        assert self.let.wait(30)
        return number


def test_a_question_asked_by_many_at_once_is_asked_once(site: Site):
    question = Question()

    async def play() -> None:
        waiting = [asyncio.create_task(site.read(question, "jobs")) for _ in range(50)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one who stops waiting does not take the answer from the others
        await asyncio.sleep(0)
        question.let.set()
        assert await asyncio.gather(*waiting[1:]) == [1] * 49
        assert await site.read(question, "jobs") == 2

    asyncio.run(play())


def test_what_is_read_after_a_change_was_asked_after_it(site: Site):
    question = Question()

    async def play() -> None:
        before = asyncio.create_task(site.read(question, "jobs"))
        await asyncio.sleep(0)
        await site.change(int, "1")
        after = asyncio.create_task(site.read(question, "jobs"))
        await asyncio.sleep(0)
        question.let.set()
        assert sorted([await before, await after]) == [1, 2]

    asyncio.run(play())


@pytest.mark.req("S2-51")
def test_those_who_ask_for_more_than_there_is_room_for_are_told_at_once(site: Site):
    """So a crowd at the dashboard takes a few threads of its own process, and nothing of what runs tasks."""
    question = Question()

    async def play() -> None:
        waiting = [asyncio.create_task(site.read(question, number)) for number in range(THREADS + WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="overloaded"):
            await site.read(question, "one more")
        assert question.asked <= THREADS
        question.let.set()
        await asyncio.gather(*waiting)
        assert await site.read(question, "one more") > 0

    asyncio.run(play())


@pytest.mark.req("S2-51")
def test_above_the_backlog_many_readers_cost_the_database_one_read_until_something_changes(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/headway.db"
    config = Config(cli={"database": url, "web_backlog": 5})
    site = Site(url, None, config, Reader(config, create=True))
    counter = Question()
    counter.let.set()

    async def page(queue: str) -> None:
        def look() -> int:  # another function object for every request, as pages have it
            read_queues(site.reader.queue)
            return counter(queue)

        await site.view(look)

    async def read_often() -> int:
        before = counter.asked
        for _ in range(20):
            await page("normal")
        return counter.asked - before

    async def play() -> tuple[int, int, int]:
        quiet = await read_often()
        queue = site.reader.queue
        queue.handler("resize")(print)
        for number in range(6):
            queue.submit("resize", number, user_id=f"user {number}")
        site._load.clear()  # the backlog is counted again, without the wait for it
        loaded = await read_often()
        await site.change(int, "1")
        return quiet, loaded, await read_often()

    try:
        assert asyncio.run(play()) == (20, 1, 1)
    finally:
        site.close()


def test_who_only_looks_does_not_wait_for_those_who_wait_to_change_something(site: Site):
    """While somebody else keeps the store locked, every change waits for it, for half a minute."""
    stuck = Question()

    async def play() -> None:
        changes = [asyncio.create_task(site.change(stuck)) for _ in range(CHANGES + WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="overloaded"):
            await site.change(stuck)
        assert await asyncio.wait_for(site.read(int, "7"), 10) == 7
        stuck.let.set()
        assert len(await asyncio.gather(*changes)) == CHANGES + WAITING

    asyncio.run(play())


def test_a_change_that_did_not_begin_in_time_is_not_made_and_one_that_began_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.web.site.PATIENCE", 0.3)
    stuck, made = Question(), list[int]()

    async def play() -> None:
        begun = [asyncio.create_task(site.change(stuck)) for _ in range(CHANGES)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="Nothing was changed"):
            await site.change(made.append, 1)
        stuck.let.set()
        assert sorted(await asyncio.gather(*begun)) == [1, 2, 3, 4]
        await site.change(made.append, 2)

    asyncio.run(play())
    assert made == [2]


def test_an_error_reaches_everybody_who_asked_and_is_forgotten(site: Site):
    calls = []

    def fails() -> None:
        calls.append(1)
        raise Unavailable("away")

    async def play() -> None:
        for _ in range(2):
            with pytest.raises(Unavailable):
                await site.read(fails)

    asyncio.run(play())
    assert len(calls) == 2


def test_asking_how_far_a_project_is_takes_no_thread_however_many_ask(redis_server: RedisServer, tmp_path: Path):
    with FinishLine(redis_server.url(1), checkpointer=False) as line:
        line.create("crawl", 2)
    application = web.app(
        database=f"sqlite:///{tmp_path}/headway.db",
        redis=redis_server.url(0),
        users=lambda _: web.User("root", "admin"),
    )

    async def ask() -> int:
        scope = {
            "type": "http", "method": "GET", "path": "/api/v1/projects/crawl", "query_string": b"", "root_path": "",
            "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
        }  # fmt: skip
        said: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        await application(scope, receive, send)
        return int(said[0]["status"])

    async def play() -> None:
        assert await ask() == 200  # the first one opens the stores
        before = set(threading.enumerate())
        assert await asyncio.gather(*(ask() for _ in range(50))) == [200] * 50
        assert set(threading.enumerate()) <= before
        assert not [thread.name for thread in before if "AnyIO" in thread.name]
        await application.close()

    asyncio.run(play())


def test_the_application_is_made_by_the_same_name_whatever_was_imported_before():
    for name in sorted(module.name for module in pkgutil.walk_packages(web.__path__, "headway.web.")):
        importlib.import_module(name)
    made: list[object] = [web.app, web.with_flask, web.ticket]
    assert all(callable(one) for one in made)
