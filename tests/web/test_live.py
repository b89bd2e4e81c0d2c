"""The live path: what changed, to everybody who may see it, and no more than that."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect as async_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from headway._sql import connect
from headway.ledger import Done, Ledger
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.states import Manager, delete_job, open_store
from headway.web.auth import tokens
from headway.web.auth.throttle import GUESSES
from headway.web.auth.tickets import read, ticket
from headway.web.live.updates import EACH, KEPT, WATCHED, Channel, Look
from headway.web.site import THREADS, WAITING
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.waiting import eventually
from tests.web.conftest import Servers, Web, answer_of, make_tokens, news, until_closed
from tests.web.test_auth import log_in


def until(socket: Any, wanted: Any, timeout: float = 30) -> dict[str, Any]:
    """The first message for which ``wanted`` holds."""
    found: dict[str, Any] = {}

    def look() -> bool:
        nonlocal found
        found = news(socket, timeout)
        return bool(wanted(found.get("delta", found.get("full"))))

    eventually(look, timeout)
    return found


# ---- a channel ------------------------------------------------------------------------------------------------------


def applied(state: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """What a page does with a message."""
    if "full" in message:
        return json.loads(json.dumps(message["full"]))  # type: ignore[no-any-return]
    for section, entries in message["delta"].items():
        for key, view in entries.items():
            if view is None:
                state.get(section, {}).pop(key, None)
            else:
                state.setdefault(section, {})[key] = view
    return state


LOOKS: list[dict[str, dict[str, Any]]] = [
    {"jobs": {"a": {"done": 1}}},
    {"jobs": {"a": {"done": 2}, "b": {"done": 0}}},
    {"jobs": {"b": {"done": 0}}},
    {"jobs": {"b": {"done": 0}}, "queues": {"low": {"paused": True}}},
    {"jobs": {}, "queues": {"low": {"paused": False}}},
]


@pytest.mark.parametrize("seen", range(len(LOOKS) + 1))
def test_whoever_comes_back_from_any_place_ends_at_the_same_content(seen: int):
    async def play() -> None:
        channel, state, number = Channel("e"), dict[str, Any](), None
        for place, look in enumerate(LOOKS):
            channel.publish(look)
            if place < seen:
                number, text = channel.since(number)
                state = applied(state, json.loads(text))
        _, text = channel.since(number)
        message = json.loads(text)
        assert ("full" in message) == (seen == 0)
        assert {name: entries for name, entries in applied(state, message).items() if entries} == {
            "queues": {"low": {"paused": False}}
        }

    asyncio.run(play())


def test_who_was_away_for_longer_than_is_remembered_gets_everything():
    async def play() -> None:
        channel = Channel("e")
        for count in range(KEPT + 5):
            channel.publish({"jobs": {"a": {"done": count}}})
        assert "full" in json.loads(channel.since(1)[1])
        assert "delta" in json.loads(channel.since(channel.number - KEPT)[1])
        assert "full" in json.loads(channel.since(channel.number + 1)[1])

    asyncio.run(play())


@pytest.mark.parametrize("seq", ["", "1", "other.1", "e.", "e.x", "e.-1", "e." + "9" * 40, "é.1"])
def test_a_number_of_another_life_of_the_server_is_no_place_in_this_one(seq: str):
    async def play() -> None:
        channel = Channel("e")
        for count in range(7):
            channel.publish({"jobs": {"a": {"done": count}}})
        assert channel.number_of(seq) is None
        assert channel.number_of("e.7") == 7
        assert channel.number_of("e.8") is None  # nobody was sent it

    asyncio.run(play())


# ---- a server -------------------------------------------------------------------------------------------------------


@pytest.mark.req("S2-24")
def test_a_page_is_sent_everything_and_then_what_changes(opened: Web):
    with opened.live() as socket:
        full = news(socket)["full"]
        assert full["jobs"]["ads"]["done"] == 40
        assert {key: view["dead"] for key, view in full["causes"].items()} == {"ads/1": 4, "ads/2": 2}
        assert full["store"] == {"database": {"error": None}}
        opened.post("/api/v1/queues/high/pause", {"reason": "upgrade"})
        delta = until(socket, lambda part: "high" in part.get("queues", {}))["delta"]
        assert "low" not in delta["queues"]
        assert delta["queues"]["high"]["reason"] == "upgrade"
        assert "jobs" not in delta
        opened.post("/api/v1/queues/high/resume")


def test_a_run_in_another_process_is_seen_with_its_rate(serve: Servers, ads: Path):
    web = serve("--no-auth", "--database", f"sqlite:///{ads}")
    with web.live() as socket, Ledger.open(f"sqlite:///{ads}") as ledger:
        news(socket)
        job = ledger.job("ads")
        hold = ledger.hold(job, {})
        until(socket, lambda part: part.get("jobs", {}).get("ads", {}).get("holder"))
        job.record([Done(idx) for idx in range(51, 60)], hold=hold)
        seen = until(socket, lambda part: part.get("jobs", {}).get("ads", {}).get("done") == 49)
        assert until(socket, lambda part: part.get("jobs", {}).get("ads", {}).get("rate") is not None) or seen
        ledger.release(hold, "interrupted")
        until(socket, lambda part: part.get("jobs", {}).get("ads", {}).get("holder", 1) is None)


@pytest.mark.req("S2-27")
def test_a_person_hears_of_their_own_tasks_and_of_nothing_else(fresh: Web, database: str):
    with fresh.live(token="user") as anna, fresh.live(token="other") as ben:
        seen = [news(anna), news(ben)]
        assert set(seen[0]["full"]) == {"store", "tasks"}
        assert set(seen[0]["full"]["tasks"]) == {"t-failed", "t-anna"}
        assert set(seen[1]["full"]["tasks"]) == {"t-ben"}
        fresh.post("/api/v1/tasks/t-anna/cancel", token="user")
        until(anna, lambda part: part.get("tasks", {}).get("t-anna", {}).get("status") == "CANCELLED")
        fresh.post("/api/v1/tasks/t-ben/cancel", token="other")
        heard = until(ben, lambda part: "t-ben" in part.get("tasks", {}))
        assert "anna" not in json.dumps(heard)


@pytest.mark.req("S2-28")
def test_the_last_word_of_a_task_is_heard_whether_it_succeeded_or_failed(serve: Servers, database: str):
    web = serve("--no-auth", "--database", database)
    with web.live() as socket, TaskQueue(database) as queue:
        news(socket)
        queue.handler("caption", retries=0, isolation="none")(lambda task, payload: 1 / payload)
        queue.submit("caption", 0, id="t-last", user_id="carl")
        Worker(queue).run(burst=True)
        ended: dict[str, str] = {}

        def both(part: dict[str, Any]) -> bool:
            ended.update({key: view["status"] for key, view in part.get("tasks", {}).items() if view})
            return {"t-anna", "t-ben", "t-last"} <= {id for id, status in ended.items() if status != "RUNNING"}

        until(socket, both)
        assert (ended["t-ben"], ended["t-last"]) == ("COMPLETED", "FAILED")


@pytest.mark.req("S2-24", "S2-25")
def test_the_percent_and_message_of_a_running_task_are_sent(serve: Servers, database: str):
    web = serve("--no-auth", "--database", database)
    with web.live() as socket, TaskQueue(database) as queue:
        news(socket)
        sent: list[tuple[float, str]] = []

        def caption(task: Any, payload: Any) -> None:
            task.progress(40, "two of five")
            until(socket, lambda part: sees(part.get("tasks", {}).get("t-shown")))

        def sees(view: dict[str, Any] | None) -> bool:
            if view and view["status"] == "RUNNING" and view["percent"]:
                sent.append((view["percent"], view["message"]))
            return bool(sent)

        queue.handler("caption", retries=0, isolation="none")(caption)
        queue.submit("caption", id="t-shown", priority="urgent", role="admin")
        Worker(queue).run(burst=True)
        assert sent == [(40, "two of five")]


@pytest.mark.req("S2-26")
def test_who_comes_back_goes_on_where_they_were_and_after_a_kill_begins_anew(serve: Servers, database: str):
    web = serve("--no-auth", "--database", database)
    port = web.host.rpartition(":")[2]
    with web.live() as socket:
        seq = news(socket)["seq"]
    with web.live() as other:  # so that somebody looks meanwhile
        news(other)
        web.post("/api/v1/queues/low/pause", {"reason": "r"})
        until(other, lambda part: part.get("queues", {}).get("low", {}).get("paused"))
        with web.live(since=seq) as socket:
            back = news(socket)
    assert back["delta"]["queues"]["low"]["reason"] == "r"
    assert "full" not in back
    web.kill()
    web = serve("--no-auth", "--database", database, "--port", port)
    with web.live(since=back["seq"]) as socket:
        again = news(socket)
    assert again["full"]["queues"]["low"]["reason"] == "r"


def test_a_connection_that_reads_nothing_delays_nobody(opened: Web):
    """Others hear of each change meanwhile, and it comes to the same content when it reads again."""
    with opened.live() as sleeper, opened.live() as reader:
        first = news(sleeper)
        for number in range(3):
            opened.post("/api/v1/queues/low/pause", {"reason": f"r{number}"})
            until(
                reader, lambda part, number=number: part.get("queues", {}).get("low", {}).get("reason") == f"r{number}"
            )
        state = applied({}, first)
        for _ in range(200):  # messages at most
            state = applied(state, news(sleeper))
            if state["queues"]["low"]["reason"] == "r2":
                break
        assert state["queues"]["low"]["reason"] == "r2"
        opened.post("/api/v1/queues/low/resume")


def test_a_look_takes_a_bounded_number_of_statements_for_any_number_of_pages_and_people(database: str):
    """Counted where SQLite executes them."""
    from headway.config import Config
    from headway.views.reading import Reader

    reader = Reader(Config(cli={"database": database}))
    look = Look(reader)
    statements: list[str] = []
    connection = reader.database._take()
    reader.database._give(connection)
    connection.set_trace_callback(statements.append)
    users = tuple(f"user-{number}" for number in range(1000))
    with Ledger(connect(database)) as ledger:
        for number in range(30):
            ledger.create(f"job-{number}")
    sections, theirs = look(everybody=True, users=users)
    assert len(sections["jobs"]) == 31
    assert len(theirs) == 1000
    commands = [text for text in statements if not text.startswith(("BEGIN", "ROLLBACK", "PRAGMA"))]
    assert 5 < len(commands) <= 19, commands  # and one for the tokens every other second
    connection.set_trace_callback(None)
    reader.close()


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_a_store_that_is_away_is_said_what_was_known_stays_and_nothing_is_opened(
    serve: Servers, postgres_url: str, postgres_server: PostgresServer, tcp_proxy: Callable[[int], TcpProxy], how: str
):
    proxy = tcp_proxy(postgres_server.port)
    made = make_tokens(postgres_url)
    web = serve("--database", postgres_url.replace(str(postgres_server.port), str(proxy.port)))
    with web.live(token=made["viewer"]) as socket:
        assert len(news(socket)["full"]["queues"]) == 4
        if how == "refused":
            proxy.refuse()
            proxy.cut()
        else:
            proxy.black_hole()
        said = until(socket, lambda part: part.get("store", {}).get("database", {}).get("error"))
        assert "queues" not in said["delta"]
        assert web.ask("/healthz").status == 200
        assert web.ask("/readyz").json == {"ready": False, "checks": {"database": "away"}}
        assert web.ask("/api/v1/jobs").status == 401
        assert web.ask("/api/v1/settings", token=made["viewer"]).status == 200  # who was known stays known
        assert web.ask("/api/v1/jobs", token=made["admin"]).status == 503  # nobody can say whether it is one
        with pytest.raises(InvalidStatus) as refused, web.live(token=made["admin"]):
            pass
        assert answer_of(refused.value) == (503, "Unavailable")
        if how == "refused":
            assert web.ask("/api/v1/jobs", token=made["viewer"]).error == "Unavailable"
        proxy.pass_through()
        until(socket, lambda part: part.get("store", {}).get("database", {"error": 1})["error"] is None, 60)
        eventually(lambda: web.ask("/readyz").status == 200)


@pytest.mark.req("S2-26")
def test_a_person_whose_last_page_was_away_for_a_while_is_told_everything_at_once(fresh: Web, database: str):
    """Nobody looked meanwhile, so nothing of what was remembered for them holds."""
    with fresh.live(token="user") as page:
        first = news(page)
        while int(news(page)["seq"].partition(".")[2]) < 3:
            pass
        last = news(page)["seq"]
    fresh.post("/api/v1/tasks/t-anna/cancel", token="user")
    with fresh.live(token="user", since=last) as page:
        back = news(page, 5)  # not when as many messages have gone by as there were before
    assert back["full"]["tasks"]["t-anna"]["status"] == "CANCELLED"
    assert back["seq"].partition(".")[0] != first["seq"].partition(".")[0]


def test_the_first_page_after_a_while_is_told_nothing_that_is_old(opened: Web):
    with opened.live() as page:
        news(page)
    eventually(lambda: "headway_web_live 0.0" in opened.ask("/metrics").text)
    opened.post("/api/v1/queues/low/pause", {"reason": "meanwhile"})
    with opened.live() as page:
        again = news(page)
    opened.post("/api/v1/queues/low/resume")
    assert again["full"]["queues"]["low"]["reason"] == "meanwhile"


def test_who_came_with_a_ticket_that_ended_cannot_stay_by_guessing(serve: Servers, database: str):
    """Too many wrong tokens from an address are not looked at; that one has ended is."""
    key = "k" * 32
    web = serve("--database", database, env={"HEADWAY_WEB_KEYS": key})
    with web.live(token=ticket("anna", "viewer", key=key, seconds=3)) as page:
        news(page)
        answers = [web.ask("/api/v1/jobs", token="hwt_guess.guess").status for _ in range(GUESSES + 1)]
        assert answers[-1] == 429
        assert web.ask("/api/v1/jobs", token=ticket("ben", "viewer", key=key)).status == 200  # it is no guess
        time.sleep(3)
        make_tokens(database)  # a reason to ask again who listens, before five minutes are over
        with pytest.raises(ConnectionClosed):
            until_closed(page)


def test_many_listeners_are_asked_about_again_and_those_who_ended_are_found(serve: Servers, database: str):
    """More people than questions the server takes at once."""
    with connect(database) as store:
        made = [tokens.create(store, f"p{number}", "viewer", by="test") for number in range(THREADS + WAITING + 20)]
    web = serve("--database", database)

    async def play() -> None:
        address, gate = f"ws://{web.host}/api/v1/live", asyncio.Semaphore(20)

        async def opened(text: str) -> Any:
            async with gate:
                headers = {"Authorization": f"Bearer {text}"}
                return await async_connect(address, additional_headers=headers, open_timeout=60, compression=None)

        pages = await asyncio.gather(*(opened(text) for text, _ in made))
        await asyncio.gather(*(page.recv() for page in pages))
        with connect(database) as store:
            for _, token in made[-3:]:
                tokens.revoke(store, token.id, by="test")

        async def read(page: Any) -> None:
            async for _ in page:
                pass

        reading = [asyncio.create_task(read(page)) for page in pages]
        for task in reading[-3:]:
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(task, 30)
        assert not any(task.done() for task in reading[:-3])
        for task in reading:
            task.cancel()
        for page in pages:
            page.transport.abort()

    asyncio.run(play())


def test_whoever_logs_out_ends_the_live_connections_of_that_login_in_every_process(serve: Servers, database: str):
    made = make_tokens(database)
    one, other = serve("--database", database), serve("--database", database)
    one.tokens = made
    csrf, cookies = log_in(one, "viewer")
    with other.live(Cookie="; ".join(f"{name}={value}" for name, value in cookies.items())) as socket:
        news(socket)
        assert one.post("/logout", form={"csrf": csrf}, cookies=cookies).status == 303
        with pytest.raises(ConnectionClosed):
            until_closed(socket)
    assert other.ask("/api/v1/jobs", cookies=cookies).status == 401


def test_one_person_cannot_take_the_connections_of_all(fresh: Web):
    with ExitStack() as sockets:
        for _ in range(EACH):
            news(sockets.enter_context(fresh.live(token="user")))
        with pytest.raises(InvalidStatus) as refused, fresh.live(token="user"):
            pass
        assert answer_of(refused.value) == (503, "Unavailable")
        with fresh.live(token="other") as page, fresh.live(token="viewer"):
            assert "t-ben" in news(page)["full"]["tasks"]


@pytest.mark.req("S1-63")
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "redis"])
def test_a_monitor_of_a_job_is_sent_the_states_of_all_its_tasks_and_tags(
    serve: Servers, database: str, kind: str, request: pytest.FixtureRequest
):
    """Whatever store keeps them. A job that is deleted and made again is shown as it is then."""
    store = database
    if kind == "postgresql":
        store = request.getfixturevalue("postgres_with_tables")
    elif kind == "redis":
        store = request.getfixturevalue("redis_server").url(1)
    web = serve("--no-auth", "--database", database, env={"HEADWAY_STATES": store})
    managers = [Manager("monitored", task, 2, open_store(store, "monitored", 2)[0]) for task in range(2)]
    managers[0].set_state("parse", status=10, payload={"large": "x"})
    with web.live(states="monitored") as page, web.live(states="monitored") as other:
        first = until(page, lambda part: part.get("states"))
        view = (first.get("full") or first["delta"])["states"]["monitored/0/parse"]
        assert (view["status"], view["version"]) == (10, 1)
        assert "payload" not in view
        assert "jobs" not in (first.get("full") or {})
        managers[1].set_state("embed", status=20)
        managers[0].set_state("parse", status=30)
        seen: dict[str, int] = {}

        def both(part: dict[str, Any]) -> bool:
            seen.update({key: entry["status"] for key, entry in part.get("states", {}).items() if entry})
            return seen == {"monitored/0/parse": 30, "monitored/1/embed": 20}

        until(page, both)
        until(other, lambda part: "monitored/1/embed" in part.get("states", {}))
        for manager in managers:
            manager.close()
        delete_job(store, "monitored")
        with Manager("monitored", 0, 2, open_store(store, "monitored", 2)[0]) as manager:
            manager.set_state("parse", status=5)
            until(page, lambda part: part.get("states", {}).get("monitored/0/parse", {}).get("status") == 5, 60)


def test_states_of_unknown_jobs_are_refused_and_take_no_place(closed: Web):
    for number in range(WATCHED + 2):
        with pytest.raises(InvalidStatus) as refused, closed.live(token="viewer", states=f"unknown-{number}"):
            pass
        assert answer_of(refused.value) == (404, "NotFound")
    with closed.live(token="viewer", states="nightly") as page:
        assert until(page, lambda part: part.get("states"))


def test_what_ended_on_live_connections_locks_nobody_out(serve: Servers, database: str):
    """Pages that come by a ticket or a token are asked about again; that it ended meanwhile is not a guess."""
    key, made = "k" * 32, make_tokens(database)
    web = serve("--database", database, env={"HEADWAY_WEB_KEYS": key})
    with ExitStack() as sockets:
        pages = [sockets.enter_context(web.live(token=made["viewer"])) for _ in range(GUESSES)]
        pages += [
            sockets.enter_context(web.live(token=ticket("anna", "viewer", key=key, seconds=8))) for _ in range(GUESSES)
        ]
        for page in pages:
            news(page)
        expired = ticket("anna", "viewer", key=key, seconds=8)
        eventually(lambda: read((key,), expired) is None)
        with connect(database) as store:
            tokens.revoke(store, made["viewer"].split("_")[1], by="test")
        for page in pages:
            with pytest.raises(ConnectionClosed):
                until_closed(page)
    assert web.ask("/api/v1/jobs", token="hw_000000000000_" + "A" * 43).status == 401
    assert web.ask("/api/v1/jobs", token=made["operator"]).status == 200


def test_a_person_of_an_application_monitors_no_job(fresh: Web):
    with fresh.live(token="user", states="nightly") as page:
        assert set(news(page)["full"]) == {"store", "tasks"}
