"""The application inside another one: under a path, with that application's own users, beside Flask."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from tests.services.waiting import eventually
from tests.web.conftest import Web, news

STARLETTE = """
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
import headway.web

async def users(connection):
    name = connection.cookies.get("who")
    role = {"ada": "admin", "vera": "viewer"}.get(name, "user")
    return headway.web.User(name, role) if name else None

async def home(request):
    return PlainTextResponse("home")

ours = headway.web.app(database=DATABASE, users=users)
app = Starlette(routes=[Route("/", home), Mount("/ops/headway", ours)])
"""
FLASK = """
from flask import Flask
import headway.web

flask_app = Flask("shop")

@flask_app.get("/")
def home():
    return "home"

app = headway.web.with_flask(flask_app, database=DATABASE)
"""
SERVE = """
import sys, uvicorn
from headway.web.server import listen
from hosting import app
listener = listen("127.0.0.1", 0)
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""

Host = Callable[..., Web]


@pytest.fixture
def host(tmp_path: Path, database: str) -> Iterator[Host]:
    """`host(source)`: a module with an application ``app``, served by uvicorn as any other."""
    processes: list[subprocess.Popen[str]] = []

    def start(source: str, *command: str) -> Web:
        (tmp_path / "hosting.py").write_text(f"DATABASE = {database!r}\n{source}")
        (tmp_path / "serving.py").write_text(SERVE)
        process = subprocess.Popen(
            command or [sys.executable, "serving.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            start_new_session=True, env={name: text for name, text in os.environ.items() if not name.startswith("HEADWAY_")},
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        return Web("" if command else process.stdout.readline().strip(), process)

    yield start
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.req("S2-27")
def test_an_applications_own_users_see_what_their_role_lets_them(host: Host):
    web = host(STARLETTE)
    assert web.ask("/").text == "home"
    assert web.ask("/ops/headway/api/v1/jobs").status == 401  # near, and nobody: the application knows who is who
    assert web.ask("/ops/headway/jobs").status == 401  # and has a login of its own
    assert web.ask("/ops/headway/api/v1/jobs", cookies={"who": "vera"}).json["jobs"][0]["id"] == "ads"
    anna = web.ask("/ops/headway/api/v1/tasks", cookies={"who": "anna"}).json
    assert {task["user_id"] for task in anna["tasks"]} == {"anna"}
    assert web.ask("/ops/headway/api/v1/tasks/t-ben", cookies={"who": "anna"}).status == 404
    assert web.ask("/ops/headway/healthz").text == "ok\n"


def test_a_change_by_an_applications_user_needs_the_token_of_our_own_form(host: Host):
    web = host(STARLETTE)
    path = "/ops/headway/api/v1/queues/low/pause"
    assert web.post(path, cookies={"who": "ada"}).error == "Forbidden"
    page = web.ask("/ops/headway/login", cookies={"who": "ada"})
    found = re.search(r'name="csrf" value="([^"]+)"', page.text)
    assert found is not None
    assert "Path=/ops/headway" in page.headers["set-cookie"]
    cookies = {"who": "ada", **page.cookies}
    assert web.post(path, cookies=cookies, X_CSRF_Token=found[1]).json["touched"] == 1
    answer = web.post("/ops/headway/actions/resume", form={"csrf": found[1], "queue": "low"}, cookies=cookies)
    assert (answer.status, answer.headers["Location"]) == (303, "/ops/headway/")


ODD_USERS = """
import headway.web

def users(connection):
    kind = connection.cookies.get("who")
    return {
        "number": headway.web.User(42, "user"), "none": headway.web.User("", "user"), "role": headway.web.User("a", "root"),
        "nul": headway.web.User("a\\0", "user"), "long": headway.web.User("a" * 5000, "viewer"), "text": "anna",
        "anna": headway.web.User("anna", "user"),
    }[kind]

app = headway.web.app(database=DATABASE, users=users)
"""


def test_a_name_that_is_none_is_refused_and_costs_nobody_else_anything(host: Host):
    """Of all people one question is asked: an odd name in it would be everybody's error."""
    web = host(ODD_USERS)
    with web.live(Cookie="who=anna") as anna:
        assert "t-anna" in news(anna)["full"]["tasks"]
        for kind in ("number", "none", "role", "nul", "long", "text"):
            answer = web.ask("/api/v1/tasks", cookies={"who": kind})
            assert (answer.status, answer.error) == (500, "ConfigError"), kind
            assert "users function" in answer.json["error"]["message"]
            with pytest.raises(InvalidStatus), web.live(Cookie=f"who={kind}"):
                pass
        assert news(anna).get("delta", {}).get("store") is None


def test_a_live_connection_works_below_a_path(host: Host):
    from websockets.sync.client import connect

    web = host(STARLETTE)
    with connect(f"ws://{web.host}/ops/headway/api/v1/live", additional_headers={"Cookie": "who=ben"}) as socket:
        assert set(news(socket)["full"]["tasks"]) == {"t-ben"}


def test_flask_and_headway_in_one_application(host: Host):
    web = host(FLASK)
    assert web.ask("/").text == "home"
    assert web.ask("/headway/api/v1/jobs").json["jobs"][0]["id"] == "ads"
    assert web.ask("/headwayx").status == 404
    assert web.ask("/headway/healthz").text == "ok\n"


@pytest.mark.req("S2-24")
def test_flask_and_headway_in_one_gunicorn(host: Host, database: str, tmp_path: Path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gunicorn = shutil.which("gunicorn", path=str(Path(sys.executable).parent))
    assert gunicorn is not None
    bind = f"127.0.0.1:{port}"
    web = host(FLASK, gunicorn, "-k", "asgi", "--workers", "2", "--bind", bind, "--no-control-socket", "hosting:app")
    web.address = f"http://{bind}"

    def up() -> bool:
        try:
            return web.ask("/").text == "home"
        except OSError:
            return False

    eventually(up, 60)
    from websockets.sync.client import connect

    with connect(f"ws://{bind}/headway/api/v1/live") as live:
        assert news(live)["full"]["jobs"]["ads"]["done"] == 40
