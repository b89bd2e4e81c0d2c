"""The application inside another one: under a path, with that application's own users, beside Flask."""

from __future__ import annotations

import base64
import hmac
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from headway.errors import UsageError
from headway.web import User, ticket
from headway.web.auth.throttle import GUESSES
from headway.web.auth.tickets import Ticket, read
from tests.services.nginx import FORWARDING, NginxServer
from tests.services.waiting import eventually
from tests.web.conftest import Web, news, until_closed

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

def users(connection):
    return headway.web.User("vera", "viewer") if connection.cookies.get("who") else None

app = headway.web.with_flask(flask_app, database=DATABASE, users=users)
"""
SERVE = """
import os, uvicorn
from headway.web.server import listen
from hosting import app
listener = listen("127.0.0.1", 0)
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning", root_path=os.environ.get("ROOT_PATH", ""))).run(sockets=[listener])
"""

Host = Callable[..., Web]


@pytest.fixture
def host(tmp_path: Path, database: str) -> Iterator[Host]:
    """`host(source)`: a module with an application ``app``, served by uvicorn as any other."""
    processes: list[subprocess.Popen[str]] = []

    def start(source: str, *command: str, env: dict[str, str] | None = None) -> Web:
        (tmp_path / "hosting.py").write_text(f"DATABASE = {database!r}\n{source}")
        (tmp_path / "serving.py").write_text(SERVE)
        process = subprocess.Popen(
            command or [sys.executable, "serving.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            start_new_session=True,
            env={name: text for name, text in os.environ.items() if not name.startswith("HEADWAY_")} | (env or {}),
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


BRIDGE = """
import os
from flask import Flask, redirect, request
import headway.web

KEY = os.environ["HEADWAY_WEB_KEYS"]
flask_app = Flask("shop")

@flask_app.get("/my-tasks")
def my_tasks():  # whoever this application knows, by whatever it knows them
    return redirect("/headway/enter?next=/me&ticket=" + headway.web.ticket(request.args["who"], key=KEY))

app = headway.web.with_flask(flask_app, database=DATABASE)
"""


@pytest.mark.req("S2-27")
def test_an_application_lets_its_own_users_in_by_tickets(host: Host):
    """As docs/reference/http-api.md says it. What the browser keeps is a session; the ticket opens nothing a second time."""
    web = host(BRIDGE, env={"HEADWAY_WEB_KEYS": KEYS[1]})
    assert web.ask("/headway/api/v1/tasks").status == 401  # with a key it is open to nobody, near or not
    there = web.ask("/my-tasks?who=anna").headers["Location"]
    entered = web.ask(there)
    assert (entered.status, entered.headers["Referrer-Policy"]) == (200, "no-referrer")
    assert "url=/headway/me" in entered.text
    assert "ticket" not in entered.text
    cookie = entered.headers.get_all("set-cookie")[-1]  # type: ignore[index]  # there is one
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    again = web.ask(there)
    assert again.status == 401
    assert not any("session" in name for name in again.cookies)
    mine = web.ask("/headway/api/v1/tasks", cookies=entered.cookies).json["tasks"]
    assert {task["user_id"] for task in mine} == {"anna"}
    assert web.ask("/headway/api/v1/tasks/t-ben", cookies=entered.cookies).status == 404
    with connect(f"ws://{web.host}/headway/api/v1/live", additional_headers={"Cookie": "; ".join(
        f"{name}={value}" for name, value in entered.cookies.items())}) as live:  # fmt: skip
        assert set(news(live)["full"]["tasks"]) == {"t-failed", "t-anna"}
        page = web.ask("/headway/login", cookies=entered.cookies)
        found = re.search(r'name="csrf" value="([^"]+)"', page.text)
        assert found is not None
        assert web.post("/headway/logout", form={"csrf": found[1]}, cookies=entered.cookies).status == 303
        with pytest.raises(ConnectionClosed):
            until_closed(live)
    assert web.ask("/headway/api/v1/tasks", cookies=entered.cookies).status == 401
    assert web.ask(there).status == 401  # nor after the session ended
    assert web.ask("/headway/api/v1/jobs", token=ticket("ben", key=KEYS[1])).status == 403


def test_a_ticket_opens_once_whether_by_enter_or_as_bearer(host: Host):
    """In every process of the installation, and for every kind of use after the first."""
    one, other = (host(BRIDGE, env={"HEADWAY_WEB_KEYS": KEYS[1]}) for _ in range(2))
    path = "/headway/api/v1/tasks/t-ben"
    sent = ticket("ben", key=KEYS[1])
    assert one.ask(path, token=sent).status == 200
    assert [web.ask(path, token=sent).status for web in (one, other)] == [401, 401]
    assert one.ask(f"/headway/enter?ticket={sent}").status == 401
    entered = ticket("ben", key=KEYS[1])
    assert one.ask(f"/headway/enter?ticket={entered}", method="HEAD").status == 405
    assert one.ask(f"/headway/enter?ticket={entered}").status == 200
    assert [web.ask(path, token=entered).status for web in (one, other)] == [401, 401]
    answers = [one.ask(path, token=sent).status for _ in range(GUESSES + 2)]
    assert set(answers) == {401}  # a ticket that was used is not a guess
    assert one.ask(path, token=ticket("ben", key=KEYS[1])).status == 200


def test_an_expired_ticket_is_refused_and_is_not_a_guess(host: Host):
    web = host(BRIDGE, env={"HEADWAY_WEB_KEYS": KEYS[1]})
    expired = forged(good(-1), KEYS[1])
    assert {web.ask("/headway/api/v1/tasks", token=expired).status for _ in range(GUESSES + 2)} == {401}
    assert {web.ask(f"/headway/enter?ticket={expired}").status for _ in range(GUESSES + 2)} == {401}
    wrong = [web.ask("/headway/api/v1/tasks", token=forged(good(), KEYS[0])).status for _ in range(GUESSES + 1)]
    assert wrong == [401] * GUESSES + [429]


def test_another_site_cannot_exchange_a_session_by_a_link_to_enter(host: Host):
    """A browser withholds the strict session cookie when another site leads here; by the other cookie we notice."""
    web = host(BRIDGE, env={"HEADWAY_WEB_KEYS": KEYS[1]})
    anna = web.ask(f"/headway/enter?ticket={ticket('anna', key=KEYS[1])}").cookies
    [strict] = [name for name in anna if "session" in name]
    for sent in (anna, {name: value for name, value in anna.items() if name != strict}):
        mallory = ticket("mallory", key=KEYS[1])
        asked = web.ask(f"/headway/enter?next=/me&ticket={mallory}", cookies=sent)
        assert asked.status == 200
        assert "Continue as mallory" in asked.text
        assert strict not in asked.cookies
        form = {"ticket": mallory, "next": "/me"}
        assert web.post("/headway/enter", form=form, cookies=anna, Origin="https://evil.example").status == 403
        chosen = web.post("/headway/enter", form=form, cookies=anna, Origin=web.address)
        assert (chosen.status, strict in chosen.cookies) == (200, True)
        again = web.ask(f"/headway/enter?ticket={ticket('anna', key=KEYS[1])}", cookies=sent)
        assert strict in again.cookies  # the same user comes again, and is not asked
    assert web.ask("/headway/api/v1/tasks/t-anna", cookies=anna).status == 200


JWT = "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbm5hIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize("header", [JWT, "Basic YW5uYTpwdw==", "Bearer", "Digest x", "Bearer é"])
def test_credentials_that_are_not_ours_fall_through_and_are_not_counted(host: Host, header: str):
    """The application's own JWT and a proxy's Basic are sent with every request, also with those to us."""
    web = host(STARLETTE)
    path, sent = "/ops/headway/api/v1/tasks", header.encode()
    for _ in range(GUESSES + 2):
        assert web.ask(path, Authorization=sent).status == 401
    assert web.ask(path, cookies={"who": "anna"}, Authorization=sent).status == 200


def test_a_session_is_known_beside_credentials_that_are_not_ours(host: Host):
    web = host(BRIDGE, env={"HEADWAY_WEB_KEYS": KEYS[1]})
    cookies = web.ask(f"/headway/enter?ticket={ticket('anna', key=KEYS[1])}").cookies
    assert web.ask("/headway/api/v1/tasks/t-anna", cookies=cookies, Authorization=JWT).status == 200
    answer = web.post("/headway/api/v1/tasks/t-anna/cancel", cookies=cookies, Authorization=JWT)
    assert (answer.status, answer.error) == (
        403,
        "Forbidden",
    )  # the cookie vouches for it, so the form's token is needed


KEYS = ("a" * 40, "b" * 40)


def forged(said: object, key: str = KEYS[0]) -> str:
    """A text that is signed well, whatever it says."""
    body = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
    return f"hwt_{body}.{hmac.new(key.encode(), f'ticket:{body}'.encode(), 'sha256').hexdigest()}"


def good(seconds: float = 200, **changed: object) -> dict[str, object]:
    """What a ticket says that is good now, with changes."""
    return {"id": "0" * 32, "name": "anna", "role": "user", "aud": "headway", "exp": time.time() + seconds} | changed


def test_a_ticket_says_what_it_was_made_with_and_an_older_key_still_opens():
    assert read(KEYS, forged(good())) == Ticket("0" * 32, User("anna", "user"))
    for key in KEYS:
        found = read(KEYS, ticket("anna", "viewer", key=key))
        assert found is not None
        assert found.user == User("anna", "viewer")


@pytest.mark.parametrize(
    "text", ["", "hwt_", "hwt_.", "hw_x_y", "hwt_" + "a" * 9000, "hwt_é." + "0" * 64, "hwt_\ud800.\ud800"]
)
def test_a_text_that_is_no_ticket_is_nobodys(text: str):
    assert read(KEYS, text) is None


def test_a_ticket_that_was_changed_or_signed_by_another_is_nobodys():
    text = forged(good())
    assert read(KEYS, text) is not None
    for other in (text[:-1], text + "0", text.upper(), forged(good(), "c" * 40)):
        assert read(KEYS, other) is None
    assert read((), text) is None


@pytest.mark.parametrize("said", [[], 7, None, {}])
def test_a_ticket_that_is_no_object_of_ours_is_nobodys(said: object):
    assert read(KEYS, forged(said)) is None


@pytest.mark.parametrize("seconds", [-1, 3600])
def test_a_ticket_that_ended_or_lasts_too_long_is_nobodys(seconds: float):
    assert read(KEYS, forged(good(seconds))) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("aud", "another"), ("exp", "9999999999"), ("exp", math.nan), ("exp", True), ("role", "root"), ("role", ["user"]),
        ("name", ""), ("name", 7), ("name", "a\0"), ("id", "short"), ("id", None),
    ],
)  # fmt: skip
def test_a_ticket_with_one_odd_word_is_nobodys(name: str, value: object):
    assert read(KEYS, forged(good(**{name: value}))) is None  # type: ignore[arg-type]  # the names are those of the ticket


@pytest.mark.parametrize(
    "options",
    [{"key": "short"}, {"seconds": 0}, {"seconds": 301}, {"seconds": float("nan")}, {"role": "root"}, {"name": ""}],
)
def test_a_ticket_that_no_server_would_take_is_not_made(options: dict[str, Any]):
    with pytest.raises(UsageError):
        ticket(**{"name": "anna", "key": KEYS[0], **options})


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
        for kind in ("none", "role", "nul", "long", "text"):
            answer = web.ask("/api/v1/tasks", cookies={"who": kind})
            assert (answer.status, answer.error) == (500, "ConfigError"), kind
            assert "users function" in answer.json["error"]["message"]
            with pytest.raises(InvalidStatus), web.live(Cookie=f"who={kind}"):
                pass
        assert news(anna).get("delta", {}).get("store") is None


def test_a_live_connection_works_below_a_path(host: Host):
    web = host(STARLETTE)
    with connect(f"ws://{web.host}/ops/headway/api/v1/live", additional_headers={"Cookie": "who=ben"}) as socket:
        assert set(news(socket)["full"]["tasks"]) == {"t-ben"}


def test_flask_and_headway_in_one_application(host: Host):
    web = host(FLASK)
    assert web.ask("/").text == "home"
    assert web.ask("/headway/api/v1/jobs").status == 401
    assert web.ask("/headway/api/v1/jobs", cookies={"who": "vera"}).json["jobs"][0]["id"] == "ads"
    assert web.ask("/headwayx").status == 404
    assert web.ask("/headway/healthz").text == "ok\n"


@pytest.mark.parametrize("root", ["/shop", "/headway"])
def test_flask_and_headway_below_a_path_of_a_proxy(host: Host, nginx_factory: Callable[..., NginxServer], root: str):
    """nginx strips the path, and uvicorn's --root-path says what it was."""
    inner = host(FLASK, env={"ROOT_PATH": root})
    web = Web(nginx_factory(f"{inner.address}/", location=f"{root}/", directives=FORWARDING).address, inner.process)
    vera = {"who": "vera"}
    assert web.ask(f"{root}/").text == "home"
    assert web.ask(f"{root}/headway/api/v1/jobs", cookies=vera).json["jobs"][0]["id"] == "ads"
    assert f'href="{root}/headway/jobs"' in web.ask(f"{root}/headway/", cookies=vera).text
    assert web.ask(f"{root}/headway", cookies=vera).status == 200
    assert web.ask(f"{root}/headwayx").status == 404
    with connect(f"ws://{web.host}{root}/headway/api/v1/live", additional_headers={"Cookie": "who=vera"}) as socket:
        assert "ads" in news(socket)["full"]["jobs"]


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
    with connect(f"ws://{bind}/headway/api/v1/live", additional_headers={"Cookie": "who=vera"}) as live:
        assert news(live)["full"]["jobs"]["ads"]["done"] == 40
