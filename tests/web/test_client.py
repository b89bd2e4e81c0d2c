"""The client: the same questions, the same answers, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from redis import Redis
from rq import Queue

from headway.client import AsyncClient, Client
from headway.config import Config
from headway.errors import HeadwayError, InvalidInput, NotFound, Refused, ServerRefused, Unavailable, UsageError
from headway.ledger import Ledger, NewItem
from headway.views.reading import Reader
from headway.views.shape import Document, plain
from headway.web.site import NAME
from tests.cli.test_json import CALLS
from tests.services.redis import RedisServer
from tests.services.waiting import eventually
from tests.web.conftest import Servers, Web, make_tokens
from tests.web.test_pages_of_the_dead import fail, failed

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def client(closed: Web) -> Iterator[Client]:
    with Client(closed.address, closed.tokens["admin"]) as opened:
        yield opened


@pytest.fixture
def reader(closed: Web) -> Iterator[Reader]:
    [address] = [part for part in closed.process.args if str(part).startswith("sqlite:")]  # type: ignore[union-attr]
    with Reader(Config(cli={"database": str(address)})) as opened:
        yield opened


def questions(kind: type) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: inspect.signature(function) for name, function in found if not name.startswith("_")}


def test_the_client_has_every_question_of_the_reader_with_the_same_arguments():
    here, there = questions(Reader), questions(Client)
    of_this_machine = {"recorded_project", "ping_database", "ping_redis", "has_backlog"}
    assert set(here) - set(there) == of_this_machine
    for name in set(here) - of_this_machine - {"task"}:
        assert list(there[name].parameters) == list(here[name].parameters), name


ASKED: dict[str, tuple[object, ...]] = {
    "jobs": (), "job": ("ads",), "runs": ("ads",), "items": ("ads",), "item": ("ads", "44"), "log_page": ("ads",),
    "dead": (), "dead_items": ("ads",), "dead_letters": ("ads",), "tasks": (), "task": ("t-failed",),
    "workers": (), "states_jobs": (), "states": ("nightly",), "relay": (), "activity": (), "audit": (),
    "projects": (), "item_map": ("ads",), "task_causes": (), "rq_causes": (), "performance": (), "causes": (),
    "search": ("44",), "oldest_tasks": ("normal",),
}  # fmt: skip


def settled(document: Document) -> dict[str, Any]:
    """Return the document without the size of the database, which grows whenever somebody writes."""
    found: dict[str, Any] = document.as_json()
    return found | ({"database": found["database"]["name"]} if "database" in found else {})


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_from_a_server_is_that_of_its_database(client: Client, reader: Reader, name: str):
    here: Document = getattr(reader, name)(*ASKED[name])
    there: Document = getattr(client, name)(*ASKED[name])
    assert type(there) is type(here)
    assert settled(there) == settled(here)  # which has milliseconds; beyond them a server says nothing


def test_what_is_long_is_read_to_its_end_over_pages(client: Client, reader: Reader):
    assert plain(list(client.log("ads"))) == plain(list(reader.log("ads")))
    assert len(client.log_page("ads", limit=7).log) == 7
    exported = [list(one.export_dead("ads", payload=True)) for one in (client, reader)]
    assert plain(exported[0]) == plain(exported[1])
    assert len(exported[0]) == 6


def test_a_page_of_more_than_a_server_gives_at_once_is_put_together(closed: Web, client: Client, reader: Reader):
    with Ledger(reader.database) as ledger:
        job = ledger.create("many")
        job.register([NewItem(idx, "{}", None, idx) for idx in range(2500)])
        found = client.items("many", limit=2200)
        assert [item.idx for item in found.items] == list(range(2200))
        assert found.next_after == 2199
        assert client.items("many", after=2199, limit=5000).next_after is None


def test_the_list_of_all_jobs_has_a_job_that_changes_while_its_pages_are_read(
    serve: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"sqlite:///{tmp_path}/jobs.db"
    with Ledger.open(url) as ledger:
        for number in range(5):
            ledger.create(f"job-{number}")
        token = make_tokens(url)["viewer"]
        web = serve("--database", url)
        monkeypatch.setattr("headway.client.client.PAGE", 2)
        with Client(web.address, token) as client:
            ask = client._connection.get

            def change_after(path: str, **asked: Any) -> Any:
                found = ask(path, **asked)
                if "before" not in asked or asked["before"] is None:
                    ledger.job("job-0").register([NewItem(0, "1")])
                return found

            monkeypatch.setattr(client._connection, "get", change_after)
            assert [job.id for job in client.jobs().jobs] == ["job-0", "job-4", "job-3", "job-2", "job-1"]


def test_an_error_comes_back_as_it_was_raised(closed: Web, client: Client):
    with pytest.raises(NotFound, match="no job 'asd'") as raised:
        client.job("asd")
    assert "Did you mean ads" in raised.value.hint
    with pytest.raises(UsageError, match="status"):
        client.items("ads", status="nonsense")
    with Client(closed.address, closed.tokens["viewer"]) as viewer, pytest.raises(Refused, match="not have the right"):
        viewer.forget("ads")
    with Client(closed.address, "hw_none") as nobody, pytest.raises(UsageError, match="no valid token"):
        nobody.jobs()


def test_an_action_through_the_client_is_in_the_activity_under_its_name(client: Client):
    assert client.pause("urgent", reason="upgrade").text == "The queue urgent is paused."
    assert client.resume("urgent").touched == 1
    newest = client.activity(limit=2).activity
    assert [(one.actor, one.action, one.detail["queue"]) for one in newest] == [
        ("the-admin", "queue.resume", "urgent"), ("the-admin", "queue.pause", "urgent"),
    ]  # fmt: skip


def test_alerts_are_seen_to_through_the_client(client: Client, reader: Reader):
    reader.database.write(
        "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) "
        "VALUES ('backlog', 'low', 'warning', 'many', 2, 2, 1, 1)"
    )
    (alert,) = [one for one in client.alerts().alerts if one.rule == "backlog"]
    assert client.acknowledge(alert.no).touched == 1
    assert client.mute("backlog", seconds=60, subject="low").touched == 1
    (alert,) = [one for one in client.alerts().alerts if one.rule == "backlog"]
    assert (alert.acknowledged_by, alert.muted) == ("the-admin", True)
    assert client.unmute("backlog", subject="low").touched == 1
    assert client.unmute("backlog", subject="low").touched == 0
    with pytest.raises(NotFound, match="no rule"):
        client.mute("nothing")
    reader.database.write("DELETE FROM alerts WHERE rule = 'backlog'")


def test_a_user_with_the_longest_name_may_ask_for_their_own_tasks(client: Client):
    """No task can be theirs, for a task's user has at most 128 characters; that is an answer and no error."""
    assert client.tasks(user_id="ä" * NAME).tasks == ()


def test_everything_that_failed_is_seen_and_retried_through_the_client(serve: Servers, database: str):
    with Client(serve("--database", database).address) as client:
        (cause,) = client.task_causes().causes
        assert (cause.kind, cause.type, cause.dead, cause.example) == ("caption", "ZeroDivisionError", 1, "t-failed")
        found = client.performance(range="1h")
        assert [(one.name, one.done, one.failed, one.success) for one in found.performance if one.what == "tasks"] == [
            ("caption", 0, 1, 0.0)
        ]
        assert found.queues["normal"].looked_at == 1
        client.cancel_task("t-anna")  # a user has one active task
        with pytest.raises(NotFound, match="this cause"):
            client.retry_tasks(cause=cause.no + 1)
        assert client.retry_tasks(cause=cause.no, reason="repaired").text.startswith("1 task requeued.")
        assert client.retry_tasks().touched == 0
        picture = client.item_map("ads").map
        assert picture is not None
        assert sum(cell.dead for cell in picture.marks.values()) == 6
        assert picture.marks[44].dead == 1
        assert client.retry_all_dead(reason="new model").text.startswith("6 dead letters of 1 job pending again.")
        assert client.retry_all_dead().touched == 0
        told = [(one.action, one.detail.get("reason")) for one in client.activity(limit=2).activity]
        assert told == [("retry", "new model"), ("task.retry", "repaired")]


def test_a_cause_of_rq_is_seen_and_requeued_through_the_client_as_far_as_it_was_seen(
    serve: Servers, database: str, redis_server: RedisServer
):
    redis = Redis.from_url(redis_server.url(0))
    alike = fail(redis, "img-01 has no digits", "img-02 has no digits")
    env = {"HEADWAY_WATCH_REDIS": redis_server.url(0), "HEADWAY_WATCH_QUEUES": "digits"}
    with Client(serve("--database", database, env=env).address) as client:
        found = client.rq_causes()
        (cause,) = found.causes
        assert (found.queues, found.total, found.looked_at) == (("digits",), 2, 2)
        assert (cause.queue, cause.type, cause.message, cause.jobs) == ("digits", "Boom", "{id} has no digits", 2)
        time.sleep(0.002)  # RQ's clock has milliseconds
        [later] = fail(redis, "img-03 has no digits")
        assert client.requeue_cause(cause.id, until=cause.last_seen, reason="repaired").touched == 2
        assert failed(redis) == {later}
        assert client.requeue_cause(cause.id).touched == 1
        assert sorted(Queue("digits", connection=redis).get_job_ids()) == sorted([*alike, later])
        with pytest.raises(NotFound, match="has this cause now"):
            client.requeue_cause(cause.id)
        assert [one.action for one in client.activity(limit=4).activity] == ["rq.requeued", "rq.requeue"] * 2
        redis_server.stop()
        with pytest.raises(Unavailable):
            client.rq_causes()


@pytest.mark.parametrize("until", ["yesterday", "2026-11-16T12:00:00", True, [], {}, "9" * 400])
def test_a_time_that_is_none_requeues_nothing(closed: Web, until: object):
    answer = closed.post("/api/v1/rq-causes/0123456789ab/requeue", {"until": until}, token="admin")
    assert (answer.status, answer.error) == (400, "UsageError")


def test_the_reason_of_every_change_is_in_the_activity(serve: Servers, database: str):
    """An action that is added to the API is tried here without being named."""
    web = serve("--no-auth", "--database", database)
    with Ledger.open(database) as ledger:
        ledger.database.write(
            "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) "
            "VALUES ('backlog', 'low', 'warning', 'many', 2, 2, 1, 1)"
        )
        ledger.hold(ledger.job("ads"), {"workers": 2, "mode": "process"})
        given = {"seconds": 60, "workers": 3}
        told = 0
        for path, methods in web.ask("/api/v1/openapi.json").json["paths"].items():
            if "post" not in methods or path.endswith("/forget"):
                continue
            filled = path.replace("{no}", "1").replace("{rule}", "backlog").replace("{name}", "low")
            filled = filled.replace("{id}", "t-failed" if path.startswith("/api/v1/tasks/") else "ads")
            name = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            fields = web.ask("/api/v1/openapi.json").json["components"]["schemas"][name]["properties"]
            body = {"reason": f"of {path}", **{key: value for key, value in given.items() if key in fields}}
            ledger.database.write("UPDATE alerts SET acknowledged_by = NULL")
            answer = web.post(filled, body)
            if answer.status == 200 and answer.json["touched"]:
                newest = json.loads(web.ask("/api/v1/activity?limit=1").body)["activity"][0]
                assert newest["detail"]["reason"] == f"of {path}", path
                told += 1
        assert told >= 9


def test_a_run_is_controlled_through_the_client(client: Client, reader: Reader):
    with Ledger(reader.database) as ledger:
        job = ledger.create("steered")
        hold = ledger.hold(job, {"workers": 2, "mode": "process"})
        client.pause_run("steered", reason="quiet")
        assert client.job("steered").paused_by == "the-admin"
        client.resume_run("steered")
        client.scale_run("steered", 7)
        client.stop_run("steered", now=True)
        asked = job.asked(hold.run)
        assert (asked.paused, asked.workers, asked.stopping, asked.actor) == (False, 7, 2, "the-admin")
        ledger.release(hold, "stopped")
        ledger.forget("steered", actor="test")


def test_many_ask_at_once_in_an_event_loop(closed: Web):
    async def play() -> None:
        async with AsyncClient(closed.address, closed.tokens["viewer"]) as client:
            found = await asyncio.gather(*(client.ask(Client.job, "ads") for _ in range(20)))
            assert {sheet.job.done for sheet in found} == {40}
            with pytest.raises(NotFound):
                await client.ask(Client.task, "nobody")

    asyncio.run(play())


# ---- odd servers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["", "ftp://x", "http://", "https://[half", "http://x:99999", "https://u:p@x", "https://tok@x", "http://x/?a=1"],
)
def test_what_is_no_address_of_a_server_is_refused_and_no_password_is_repeated(address: str):
    with pytest.raises(InvalidInput) as raised:
        Client(address)
    assert "u:p" not in str(raised.value)


class Odd(http.server.BaseHTTPRequestHandler):
    """Answers as no server of headway does."""

    protocol_version = "HTTP/1.1"
    seen: list[str | None] = []  # noqa: RUF012 - one server, one test

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        kind = self.path.rpartition("/")[2].partition("?")[0]
        if kind == "jobs":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/elsewhere")  # type: ignore[index]
            self._end(b"")
        elif kind == "queues":
            self.send_response(200)
            self._end(b"<html>")
        elif kind == "workers":
            self.send_response(200)
            self._end(json.dumps({"workers": [{"name": "w"}]}).encode())
        else:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True

    def _end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


@pytest.fixture
def odd() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_an_odd_server_gets_a_clear_error_and_no_second_look_at_the_token(odd: str):
    with Client(odd, "secret", timeout=10) as client:
        with pytest.raises(ServerRefused, match="answered 302"):
            client.jobs()
        assert Odd.seen == ["Bearer secret"]  # the redirection was not followed
        with pytest.raises(ServerRefused, match="not like a Headway server"):
            client.queues()
        with pytest.raises(HeadwayError, match="shape"):
            client.workers()
        with pytest.raises(Unavailable, match="cannot be reached"):
            client.relay()


def test_a_server_that_is_away_is_said(closed: Web):
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
        Client("http://127.0.0.1:1").jobs()


# ---- the command line -----------------------------------------------------------------------------------------------

#: Verbs with --json that ask a machine, not its records.
LOCAL = {"config", "run", "token list", "progress"}


def reading_calls() -> list[tuple[str, tuple[str, ...]]]:
    calls = [(path, arguments) for path, every in CALLS.items() if path not in LOCAL for arguments in every[:1]]
    return [(path, tuple(word.replace("t-waiting", "t-anna") for word in arguments)) for path, arguments in calls]


@pytest.mark.parametrize(("path", "arguments"), reading_calls(), ids=str)
def test_every_reading_verb_works_against_a_server(
    closed: Web,
    path: str,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A verb that is added to the command line with --json is tried here without being named."""
    from headway.cli import invoke

    [address] = [str(part) for part in closed.process.args if str(part).startswith("sqlite:")]  # type: ignore[union-attr]
    answers = []
    for database in (closed.address, address):
        monkeypatch.setenv("HEADWAY_DATABASE", database)
        monkeypatch.setenv("HEADWAY_TOKEN", closed.tokens["admin"])
        code = invoke([*path.split(), *arguments, "--json"])
        document = json.loads(capsys.readouterr().out)
        for changing in ("findings", "queues", "at", "checked_at", "rules"):  # differ from moment to moment
            document.pop(changing, None)
        if "database" in document:
            document["database"].pop("bytes")
        answers.append((code, document))
    assert answers[0] == answers[1]


def test_a_verb_that_changes_says_that_it_needs_the_database(closed: Web, capsys: pytest.CaptureFixture[str]):
    from headway.cli import invoke

    for words in ("retry ads --yes", "forget ads --yes", "queue pause low", "task cancel t-anna --yes", "purge --yes"):
        assert invoke([*words.split(), "--database", closed.address]) == 2, words
        assert "needs the database itself" in capsys.readouterr().err


def test_the_command_line_says_what_is_missing_without_a_token_or_a_server(
    closed: Web, headway_cli: Run, tmp_path: Path
):
    answer = headway_cli("jobs", "--database", closed.address, env={"XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": "none"})
    assert (answer.returncode, "headway token create" in answer.stderr) == (2, True)
    answer = headway_cli("jobs", "--database", "http://127.0.0.1:1")
    assert (answer.returncode, "cannot be reached" in answer.stderr) == (6, True)
    assert list(tmp_path.iterdir()) == []


def test_progress_of_a_project_comes_from_the_server(fresh: Web, headway_cli: Run):
    env = {"HEADWAY_DATABASE": fresh.address, "HEADWAY_TOKEN": fresh.tokens["viewer"]}
    found = headway_cli("progress", "crawl", "--json", env=env)
    assert json.loads(found.stdout)["done"] == 1
    assert headway_cli("progress", "nobody", env=env).returncode == 2


@pytest.mark.parametrize("token", ["a\nb", "zwölf", "hw_€", "\ud800", "two words", "x" * 5000])
def test_what_cannot_be_a_token_is_refused_and_not_repeated(token: str):
    with pytest.raises(InvalidInput) as refused:
        Client("http://127.0.0.1:1", token)
    assert token not in str(refused.value)


@pytest.mark.parametrize("address", ["https://a..b", f"http://{'a' * 300}"])
def test_a_name_that_no_host_has_is_refused(address: str):
    with pytest.raises(InvalidInput, match="is not the address of a server"):
        Client(address)


def test_an_item_whose_key_is_an_address_is_found(serve: Servers, tmp_path: Path):
    key = "https://shop.example/a b/?c=d%2F"
    with Ledger.open(f"sqlite:///{tmp_path}/keys.db") as ledger:
        job = ledger.create("crawl")
        job.register([NewItem(0, "{}", key)])
    web = serve("--database", f"sqlite:///{tmp_path}/keys.db")
    with Client(web.address) as client:
        assert client.item("crawl", key).item.key == key


def test_an_answer_that_comes_in_drops_is_not_waited_for_without_end():
    class Dripping(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(300):  # half a minute; the socket is never silent for as long as the limit
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    gone.wait(0.1)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    gone = threading.Event()
    with http.server.HTTPServer(("127.0.0.1", 0), Dripping) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            with Client(f"http://127.0.0.1:{server.server_port}", timeout=1.0) as client, pytest.raises(Unavailable):
                client.jobs()
            assert thread.is_alive()  # it was left before it had ended
        finally:
            gone.set()
            thread.join()


class Tired(http.server.BaseHTTPRequestHandler):
    """Closes each connection after one answer and does not say so, as a server does with what is idle for some seconds."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b'{"schema": "headway.acted/1", "action": "queue.resume", "text": "", "touched": 1, "queues": []}'
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        self.close_connection = True

    do_POST = do_GET  # noqa: N815 - its name there

    def log_message(self, *_: object) -> None:
        pass


class TiredServer(http.server.ThreadingHTTPServer):
    """Counts the connections that it has closed."""

    closed = 0

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed += 1


def test_a_change_is_made_on_a_new_connection_when_the_server_closed_the_kept_one():
    """Who changes something once a minute must not be told each time that the server is away."""
    server = TiredServer(("127.0.0.1", 0), Tired)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Client(f"http://127.0.0.1:{server.server_port}", timeout=10) as client:
            for asked in range(1, 4):
                assert client.resume("low").touched == 1
                eventually(lambda asked=asked: server.closed == asked)  # type: ignore[misc]  # of this round
    finally:
        server.shutdown()
        server.server_close()


class Slow(Tired):
    """Answers questions about queues when it is let."""

    asked, let = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("/queues"):
            self.asked.set()
            self.let.wait(60)
        super().do_GET()


def test_a_forked_child_asks_while_its_parent_waits_for_an_answer():
    """The parent's lock stays locked in the child for ever, and what comes on the parent's connection is not for the child."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Client(f"http://127.0.0.1:{server.server_port}") as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.queues)
        assert Slow.asked.wait(30)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # one that hangs is killed
            os._exit(int(client.resume("low").touched != 1))
        _, status = os.waitpid(child, 0)
        Slow.let.set()
        assert (os.waitstatus_to_exitcode(status), waiting.result(30).queues) == (0, ())
    server.shutdown()
    server.server_close()


def test_a_forked_child_asks_in_an_event_loop_of_its_own_and_the_parent_goes_on():
    """The threads of the parent's pool are not there in the child: what is given to them is never done."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tired)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = AsyncClient(f"http://127.0.0.1:{server.server_port}")

    async def ask() -> list[tuple[object, ...]]:
        return [answer.queues for answer in await asyncio.gather(*(client.ask(Client.queues) for _ in range(8)))]

    assert asyncio.run(ask()) == [()] * 8  # every thread has begun
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # one that hangs is killed
        os._exit(int(asyncio.run(ask()) != [()] * 8))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert asyncio.run(ask()) == [()] * 8
    asyncio.run(client.close())
    server.shutdown()
    server.server_close()


class Dying(http.server.BaseHTTPRequestHandler):
    """Dies in the middle: of the head, of a body whose length it said, of one in chunks; or says less than it announced."""

    how = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b'{"schema": "headway.jobs/1", "jobs": [], "next": null}'
        if self.how == "head":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-")
        elif self.how == "length":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body) + 9, body))
        elif self.how == "chunks":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body))
        elif self.how == "nothing":
            pass
        self.close_connection = True

    do_POST = do_GET  # noqa: N815 - its name there

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("how", ["head", "length", "chunks", "nothing"])
def test_an_answer_that_breaks_off_is_no_answer(how: str):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Dying,), {"how": how}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Client(f"http://127.0.0.1:{server.server_port}", timeout=10) as client:
            for _ in range(2):  # also on the second try: nothing of the first is left over
                with pytest.raises(Unavailable):
                    client.jobs()
                with pytest.raises(Unavailable):
                    client.resume("low")
    finally:
        server.shutdown()
        server.server_close()
