"""User ids as applications have them: integers, UUIDs, e-mail addresses, names of identity providers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from html import unescape
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from starlette.testclient import TestClient

from headway.core.lifecycle import Shutdown
from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.queue.rq.source import RqSource
from headway.queue.task import Status, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.web import User, app, ticket
from tests.services.redis import RedisServer

Cli = Callable[..., subprocess.CompletedProcess[str]]


class Account(StrEnum):
    SERVICE = "svc:reports"


UID = UUID("0B0FBC5E-9B1F-4E0C-8E0A-000000000007")
#: What an application gives, and the text that is stored.
IDS = [
    (7, "7"),
    (0, "0"),
    (-1, "-1"),
    (2**63, str(2**63)),
    (UID, "0b0fbc5e-9b1f-4e0c-8e0a-000000000007"),
    ("anna@example.org", "anna@example.org"),
    ("auth0|5f7c8ec7c33c6c004bbafe82", "auth0|5f7c8ec7c33c6c004bbafe82"),
    ("CORP\\anna", "CORP\\anna"),
    ("Zoë Müller 日本", "Zoë Müller 日本"),
    ("""<b>"a', {b} %s ? ; -- &amp;/..\\""", """<b>"a', {b} %s ? ; -- &amp;/..\\"""),
    ("*", "*"),
    ("__x__", "__x__"),
    ("x" * 256, "x" * 256),
    (Account.SERVICE, "svc:reports"),
]
NAMES = [ascii(given)[:20] for given, _ in IDS]


@pytest.fixture(params=["database", "rq"])
def queue(request: pytest.FixtureRequest, database_url: str) -> Iterator[TaskQueue]:
    redis = request.getfixturevalue("redis_server").url(0) if request.param == "rq" else None
    with TaskQueue(database_url, redis) as made:
        made.handler("echo", isolation="none", retries=0)(lambda task, payload: [task.user_id, payload])
        yield made


@contextmanager
def site(url: str, name: Any, role: Any) -> Iterator[TestClient]:
    """The web application as this user of an application sees it."""
    with TestClient(app(database=url, users=lambda _: User(name, role), hosts=["testserver"])) as client:
        yield client


def work_off(queue: TaskQueue) -> None:
    source = RqSource(queue, queue.backend.redis_url, name="w1") if queue.backend.redis_url else None
    Worker(queue, name="w1", source=source, shutdown=Shutdown()).run(burst=True)


@pytest.mark.req("S2-20")
@pytest.mark.parametrize(("given", "stored"), IDS, ids=NAMES)
def test_every_call_knows_a_user_by_the_id_the_application_has(queue: TaskQueue, given: Any, stored: str):
    first = queue.submit("echo", 1, user_id=given)
    assert (first.user_id, type(first.user_id)) == (stored, str)
    for same in (given, stored):
        with pytest.raises(UserBusy, match=first.id):
            queue.submit("echo", 2, user_id=same)
        assert queue.get(first.id, user_id=same).id == first.id
        assert [task.id for task in queue.list(user_id=same)] == [first.id]
    with pytest.raises(NotFound):
        queue.get(first.id, user_id="somebody else")
    with pytest.raises(NotFound):
        queue.cancel(first.id, user_id=8)
    work_off(queue)
    assert queue.result(first.id, user_id=given) == [stored, 1]
    second = queue.submit("echo", 2, user_id=given)
    assert queue.cancel(second.id, user_id=given).message == f"cancelled by {stored}"


@pytest.mark.parametrize(
    ("given", "stored"), [pair for pair in IDS if pair[1] != "*"], ids=lambda value: ascii(value)[:20]
)
@pytest.mark.parametrize("scope", ["user", "partition"])
def test_a_limit_is_for_the_same_user(database_url: str, given: Any, stored: str, scope: str):
    with TaskQueue(database_url, per_user=None) as queue:
        queue.handler("echo", isolation="none")(lambda task, payload: payload)
        owner = "user_id" if scope == "user" else "partition"
        queue.limit(scope, given, concurrency=0)
        held, free = queue.submit_many([{"kind": "echo", owner: given}, {"kind": "echo", owner: "free"}])
        work_off(queue)
        assert [queue.get(task.id).status for task in (held, free)] == [Status.QUEUED, Status.COMPLETED]
        queue.limit(scope, stored)
        work_off(queue)
        assert queue.get(held.id).status is Status.COMPLETED


@pytest.mark.parametrize(
    "given",
    [
        "",
        "x" * 257,
        "a\nb",
        "a\0b",
        "a\x1b[31m",
        "a\u2028b",
        "a\u202eb",
        "\ud800",
        True,
        1.5,
        b"anna",
        10**5000,
        ["anna"],
    ],
    ids=lambda value: ascii(value)[:20] if not isinstance(value, int) else "int",
)
@pytest.mark.parametrize("name", ["user_id", "partition"])
def test_what_cannot_be_a_user_id_is_refused_and_nothing_is_stored(tmp_path: Path, name: str, given: Any):
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.handler("echo")(lambda task, payload: payload)
        with pytest.raises(InvalidInput, match="cannot be a") as refused:
            queue.submit("echo", **{name: given})
        assert "256" in str(refused.value.hint)
        assert queue.list() == []


@pytest.mark.parametrize(
    "given", [True, 1.5, b"anna", 10**5000, "a\0b", "\ud800"], ids=lambda value: type(value).__name__
)
def test_a_lookup_by_something_else_is_one_error(tmp_path: Path, given: Any):
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.handler("echo")(lambda task, payload: payload)
        task = queue.submit("echo", user_id=1)
        for ask in (queue.get, queue.result, queue.cancel):
            with pytest.raises(InvalidInput):
                ask(task.id, user_id=given)
        with pytest.raises(InvalidInput):
            queue.list(user_id=given)
        with pytest.raises(InvalidInput):
            queue.limit("user", given, concurrency=1)


@pytest.mark.parametrize(("given", "stored"), IDS, ids=NAMES)
def test_pages_and_api_show_and_find_the_tasks_of_any_user(tmp_path: Path, given: Any, stored: str):
    url = f"sqlite:///{tmp_path}/headway.db"
    with TaskQueue(url, per_user=None) as queue:
        queue.handler("echo")(lambda task, payload: payload)
        theirs = [queue.submit("echo", n, user_id=given) for n in range(51)]
        other = queue.submit("echo", user_id="other user")
    with site(url, "ops", "operator") as client:
        listed = client.get("/tasks", params={"user_id": stored}).text
        assert theirs[-1].id in listed
        assert other.id not in listed
        older = unescape(listed.partition('">Older')[0].rpartition('href="')[2])
        older = client.get("/tasks" + older).text
        assert theirs[0].id in older, "the address of the next page names the same user"
        assert other.id not in older
        heading = client.get(f"/tasks/{theirs[0].id}").text.partition("<h1>")[2].partition("</h1>")[0]
        assert unescape(heading).strip() == f"echo for {stored}"
        assert "<b>" not in heading
        assert '<b>"' not in client.get("/queues").text
        found = client.get("/api/v1/tasks", params={"user": stored, "limit": 1}).json()
        assert [task["user_id"] for task in found["tasks"]] == [stored]


def test_the_command_line_finds_the_tasks_of_a_user(tmp_path: Path, headway_cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/headway.db"
    with TaskQueue(url) as queue:
        queue.handler("echo")(lambda task, payload: payload)
        task = queue.submit("echo", user_id="auth0|anna@example.org")
        queue.submit("echo", user_id=7)
    shown = headway_cli("tasks", "--user", "auth0|anna@example.org", "--json", env={"HEADWAY_DATABASE": url})
    assert task.id in shown.stdout
    assert shown.stdout.count('"id"') == 1
    limited = headway_cli("queue", "limit", "user", "7", "--concurrency", "0", env={"HEADWAY_DATABASE": url})
    assert limited.returncode == 0, limited.stderr


@pytest.mark.parametrize(("given", "stored"), [(7, "7"), (UID, str(UID)), ("auth0|x", "auth0|x")], ids=str)
def test_a_ticket_and_a_session_name_the_user_as_the_queue_does(tmp_path: Path, given: Any, stored: str):
    key = "k" * 32
    assert ticket(given, key=key)
    with pytest.raises(HeadwayError):
        ticket("a\nb", key=key)
    with pytest.raises(HeadwayError):
        ticket(True, key=key)
    url = f"sqlite:///{tmp_path}/headway.db"
    with TaskQueue(url) as queue:
        queue.handler("echo")(lambda task, payload: payload)
        task = queue.submit("echo", user_id=given)
    with site(url, given, "user") as client:
        assert task.id in client.get("/me").text
        assert client.get(f"/api/v1/tasks/{task.id}").json()["task"]["user_id"] == stored
    with site(url, "somebody else", "user") as client:
        assert client.get(f"/api/v1/tasks/{task.id}").status_code == 404


def test_the_key_of_a_user_in_redis_holds_no_part_of_the_id(database_url: str, redis_server: RedisServer):
    with TaskQueue(database_url, redis_server.url(0)) as queue:
        queue.handler("echo")(lambda task, payload: payload)
        queue.submit("echo", user_id="anna@example.org * [a-z]")
        assert not [key for key in redis_server.client(0).scan_iter() if "anna" in str(key)]
