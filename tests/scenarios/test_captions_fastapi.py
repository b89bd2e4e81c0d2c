"""examples/captions_fastapi: uvicorn with two workers behind nginx, under a root path, with the application's own login.

The dashboard is mounted beside the application and knows its accounts. PostgreSQL, Redis, encryption keys, task workers.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import html
import http.client
import itertools
import json
import os
import random
import re
import signal
import threading
import time
import tomllib
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet, InvalidToken
from redis import Redis
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headway.web.api.actions import FORMS
from headway.web.auth.throttle import GUESSES
from headway.web.pages import dead, jobs, overview, queues, system
from tests.scenarios.deployment import Deployment
from tests.scenarios.history import (
    assert_nothing_held,
    assert_one_active_task_per_user,
    assert_tasks_ended_exactly_once,
    rows,
)
from tests.services import nginx
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.server import free_port
from tests.services.waiting import eventually
from tests.web.conftest import Answer, Web, news

UVICORN = "uvicorn shop:app --port $SHOP_PORT --workers 2 --root-path /shop --timeout-graceful-shutdown 10"
WORKER = "headway worker --app shop:queue --workers 2 --max-workers 4 --drain 10"
NGINX = "nginx -p . -c nginx.conf -e stderr"
NGINX_CONF = 'sed "s/@SHOP_PORT@/$SHOP_PORT/; s/@NGINX_PORT@/$NGINX_PORT/" nginx.conf.template > nginx.conf'
KEYS = "python keys.py"
SECRET = "the shop's secret, which a stranger does not know"

#: User id by account: two e-mail addresses, two integers.
USERS = {"anna@example.org": "anna@example.org", "carla@example.org": "carla@example.org", "bert": "7", "dora": "8"}
ACCOUNTS = (*USERS, "vera", "root")


class Shop:
    """The running example. Requests go through nginx unless they name `direct`."""

    def __init__(self, deployment: Deployment, database: str, redis: RedisServer) -> None:
        self.deployment, self.database, self.redis = deployment, database, redis
        environment = deployment.environment
        self.web = Web(f"http://127.0.0.1:{environment['NGINX_PORT']}", None)  # type: ignore[arg-type]  # it is not stopped
        self.direct = Web(f"http://127.0.0.1:{environment['SHOP_PORT']}", None)  # type: ignore[arg-type]  # by this
        self.accepted: dict[str, str] = {}  # picture by task id
        self.accepting = threading.Lock()

    def start(self) -> None:
        for command in (KEYS, NGINX_CONF, "mkdir temporary"):
            done = self.deployment.run(command)
            assert done.returncode == 0, done.stderr
        for name, command in {"web": UVICORN, "worker": WORKER, "nginx": NGINX}.items():
            self.deployment.start(name, command)
        eventually(lambda: (answer := self.try_to("/healthz")) and answer.status == 200, 90, "the shop answers")
        for name in ACCOUNTS:
            answer = self.web.post("/shop/login", {"name": name, "password": f"{name.partition('@')[0]}'s password"})
            assert answer.status == 200, answer.text
            self.web.tokens[name] = self.direct.tokens[name] = answer.json["token"]

    def try_to(self, path: str, method: str = "GET", **options: Any) -> Answer | None:
        """Return an answer of the application, or None while it or a store is away."""
        try:
            answer = self.web.ask(f"/shop{path}", method=method, **options)
        except (OSError, http.client.HTTPException):
            return None
        return None if answer.status in (502, 503, 504) else answer

    def ask(self, account: str, path: str, method: str = "GET", **options: Any) -> Answer:
        """Return the answer to a request that is repeated while the application or a store is away."""
        return eventually(lambda: self.try_to(path, method, token=account, **options), 60, f"{method} {path}")

    def order(self, account: str, seconds: float = 0.2, **fields: Any) -> str:
        """Order a caption and return the id of its task. A request whose answer was lost is repeated under its key."""
        picture, key = f"{uuid.uuid4().hex}.jpg", uuid.uuid4().hex
        body = {"picture": picture, "seconds": seconds, **fields}
        answer = self.ask(account, "/captions", "POST", body=body, Idempotency_Key=key)
        assert answer.status == 202, answer.text
        assert answer.json["user_id"] == USERS.get(account, f"{account}@example.org")
        with self.accepting:
            self.accepted[answer.json["id"]] = picture
        return str(answer.json["id"])

    def task(self, account: str, id: str) -> dict[str, Any]:
        answer = self.ask(account, f"/captions/{id}")
        assert answer.status == 200, answer.text
        return answer.json

    def until(self, account: str, id: str, *statuses: str, timeout: float = 90) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            task = self.task(account, id)
            assert task["status"] in statuses, task
            return task

        return eventually(reached, timeout, f"{account}: {statuses}")

    def caption(self, account: str, id: str) -> str:
        answer = self.ask(account, f"/captions/{id}/result")
        assert answer.status == 200, answer.text
        return str(answer.json["caption"])

    def completed(self, account: str, id: str, *, attempts: int = 0) -> None:
        """Wait for a task's end and compare its result with what its user ordered."""
        task = self.until(account, id, "COMPLETED")
        assert task["attempts"] >= attempts
        assert self.caption(account, id) == f"{self.accepted[id]}: a small boat at sea"

    @contextlib.contextmanager
    def socket(self, path: str, web: Web | None = None, **headers: str) -> Iterator[ClientConnection]:
        at = self.web if web is None else web
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        root = "" if at is self.direct else "/shop"
        with connect(f"ws://{at.host}{root}{path}", additional_headers=sent, open_timeout=30) as socket:
            yield socket

    def bearer(self, account: str) -> str:
        return f"Bearer {self.web.tokens[account]}"

    def keys(self) -> list[str]:
        return list(tomllib.loads((self.deployment.directory / "headway.toml").read_text())["queue_keys"])

    def web_workers(self) -> list[int]:
        """Return the pids of uvicorn's two processes that serve."""
        parent = self.deployment.processes["web"].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def kill_worker_of(self, id: str) -> None:
        """SIGKILL the worker that runs a task."""
        [(pid,)] = eventually(lambda: rows(self.database, "SELECT pid FROM task_workers WHERE task = ?", id), 30)
        os.kill(pid, signal.SIGKILL)

    def rotate_keys(self) -> None:
        assert self.deployment.run(KEYS).returncode == 0

    def wipe_redis(self) -> None:
        with self.redis.client() as client:
            client.flushall()

    def end(self) -> None:
        """End everything by one SIGTERM each, as a service manager would: a second one would abandon what runs."""
        ended = [self.deployment.processes[name] for name in ("web", "worker", "nginx")]
        for process in ended:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in ended] == [0, 0, 0], self.deployment.log("worker")[-3000:]
        self.deployment.assert_no_orphans()

    def check_history(self) -> dict[str, str]:
        """Check what is stored, without asking Headway. Return status by task id."""
        status = assert_tasks_ended_exactly_once(self.database, self.accepted)
        assert status.keys() == self.accepted.keys(), "a task exists that was not accepted"
        assert_one_active_task_per_user(self.database)
        assert_nothing_held(self.database)
        fernets = [Fernet(key) for key in self.keys()]
        for id, picture in self.accepted.items():
            [(payload, result)] = rows(self.database, "SELECT payload, result FROM tasks WHERE id = ?", id)
            assert picture in _decrypted(fernets, payload)
            assert (result is not None) == (status[id] == "COMPLETED")
            assert result is None or picture in _decrypted(fernets, result)
        everything = b"\n".join(_everything_in(self.redis))
        assert not re.search(rb"@example\.org|\.jpg|a small boat", everything), "Redis holds what only SQL may hold"
        for log in ("web", "worker"):
            text = self.deployment.log(log)
            assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:3000]
            assert ".jpg" not in text
        return status


def _decrypted(fernets: list[Fernet], stored: str) -> str:
    assert stored.startswith("fernet:")
    for fernet in fernets:
        with contextlib.suppress(InvalidToken):
            return fernet.decrypt(stored.removeprefix("fernet:")).decode()
    raise AssertionError("no key decrypts it")


def _everything_in(server: RedisServer) -> Iterator[bytes]:
    """Return every key and value of Redis. RQ compresses what it stores of a job."""
    with Redis(port=server.port) as client:
        for key in client.keys("*"):
            yield key
            match client.type(key):
                case b"string":
                    found = [client.get(key)]
                case b"hash":
                    found = [part for pair in client.hgetall(key).items() for part in pair]
                case b"list":
                    found = client.lrange(key, 0, -1)
                case b"set":
                    found = list(client.smembers(key))
                case b"zset":
                    found = client.zrange(key, 0, -1)
                case other:
                    found = [repr(client.xrange(key)).encode()] if other == b"stream" else []
            for value in found:
                yield value
                with contextlib.suppress(zlib.error):
                    yield zlib.decompress(value)


@pytest.fixture
def shop(deploy: Callable[..., Deployment], postgres_url: str, redis_server: RedisServer) -> Shop:
    program = nginx.find()
    if program is None:
        pytest.skip("nginx is missing; install it: apt-get install nginx-light")
    deployment = deploy(
        "captions_fastapi", HEADWAY_DATABASE=postgres_url, HEADWAY_REDIS=redis_server.url(), SHOP_SECRET=SECRET,
        SHOP_PORT=str(free_port()), NGINX_PORT=str(free_port()),
    )  # fmt: skip
    deployment.environment["PATH"] += f"{os.pathsep}{Path(program).parent}"  # a user's PATH may lack it
    running = Shop(deployment, postgres_url, redis_server)
    running.start()
    return running


# ---------------------------------------------------------------------------------------------------------------------
# Users and their tasks


@pytest.mark.req("S2-13", "S2-15", "S2-20", "S2-23", "S2-24", "S2-27", "S2-28", "S2-31", "S2-58")
def test_users_get_their_captions_while_the_deployment_is_disturbed(shop: Shop, postgres_server: PostgresServer):
    anna, carla, bert, dora = USERS

    # Progress by two WebSockets through nginx: the application's own, and the dashboard's, which shows bert only his tasks.
    watched = {account: shop.order(account, seconds=2) for account in (anna, bert)}
    with (
        shop.socket(f"/captions/{watched[anna]}/live", Authorization=shop.bearer(anna)) as own,
        shop.socket("/headway/api/v1/live", Authorization=shop.bearer(bert)) as dashboard,
    ):
        busy = shop.ask(anna, "/captions", "POST", body={"picture": "another.jpg"})
        assert (busy.status, watched[anna] in busy.json["error"]) == (409, True), busy.text
        assert shop.ask(bert, f"/captions/{watched[anna]}").status == 404
        seen = list(_until_end(own))
        assert [task["percent"] for task in seen] == sorted(task["percent"] for task in seen)
        assert any(0 < task["percent"] < 100 for task in seen)
        assert (seen[-1]["status"], seen[-1]["percent"]) == ("COMPLETED", 100)
        shown: dict[str, Any] = {}
        while shown.get("status") != "COMPLETED":
            message = news(dashboard)
            tasks = (message.get("full") or message["delta"]).get("tasks", {})
            assert tasks.keys() <= {watched[bert]}
            shown = tasks.get(watched[bert], shown)
    for account, id in watched.items():
        shop.completed(account, id)

    # A cancel, a timeout and a killed worker at the same time.
    cancelled, late, orphaned = shop.order(anna, 20), shop.order(bert, 20, kind="preview"), shop.order(carla, 4)
    shop.until(carla, orphaned, "RUNNING")
    shop.kill_worker_of(orphaned)
    shop.until(anna, cancelled, "RUNNING")
    assert shop.ask(anna, f"/captions/{cancelled}", "DELETE").status == 200
    assert shop.until(bert, late, "FAILED")["error"] == "TimedOut: no result within 1 s"
    shop.until(anna, cancelled, "CANCELLED")
    shop.completed(carla, orphaned, attempts=1)
    # The service refused the first request of each worker, which cost no attempt: only the timeout is one.
    [(times, reason)] = rows(shop.database, "SELECT times, reason FROM task_delays")
    assert times >= 1
    assert reason == "the service answered 429"
    assert rows(shop.database, "SELECT attempts FROM tasks WHERE id = ?", late) == [(1,)]

    # Keys rotated while every process is idle: the next task is written with the new key, earlier results stay readable.
    shop.rotate_keys()
    first = {account: shop.order(account) for account in USERS}
    for account, id in first.items():
        shop.completed(account, id)
        [stored] = rows(shop.database, "SELECT payload, result FROM tasks WHERE id = ?", id)
        assert all(_decrypted([Fernet(shop.keys()[0])], text) for text in stored)
    assert shop.caption(anna, watched[anna])

    # Redis wiped and a web process killed while tasks run.
    running = {account: shop.order(account, 1) for account in USERS}
    shop.wipe_redis()
    os.kill(shop.web_workers()[0], signal.SIGKILL)
    for account, id in running.items():
        shop.completed(account, id)

    # PostgreSQL restarted while tasks run and others are ordered.
    running = {account: shop.order(account, 1) for account in (anna, bert)}
    postgres_server.restart(immediate=True)
    running |= {account: shop.order(account) for account in (carla, dora)}
    for account, id in running.items():
        shop.completed(account, id)
    eventually(lambda: len(shop.web_workers()) == 2, 60, "uvicorn replaced its killed process")

    # SIGTERM with a task running and both kinds of WebSocket open. The worker finishes the task first.
    last = shop.order(dora, 2)
    shop.until(dora, last, "RUNNING")
    with (
        shop.socket(f"/captions/{last}/live", Authorization=shop.bearer(dora)) as own,
        shop.socket("/headway/api/v1/live", Authorization=shop.bearer("vera")) as dashboard,
    ):
        assert news(own)["status"] == "RUNNING"
        assert news(dashboard)["full"]["tasks"][last]["user_id"] == "8"
        shop.end()
    assert rows(shop.database, "SELECT status, attempts FROM tasks WHERE id = ?", last) == [("COMPLETED", 0)], (
        shop.deployment.log("worker")
    )
    status = shop.check_history()
    assert status.pop(cancelled) == "CANCELLED"
    assert status.pop(late) == "FAILED"
    assert set(status.values()) == {"COMPLETED"}


def _until_end(socket: ClientConnection) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(ConnectionClosed):
        while True:
            yield news(socket)


# ---------------------------------------------------------------------------------------------------------------------
# Strangers


def forged(secret: str = "guessed", *, algorithm: str = "HS256", seconds: float = 3600, **claims: Any) -> str:
    """Return a JWT that names the administrator, in the format of the application."""
    said = {"sub": "root", "aud": "captions", "exp": time.time() + seconds, "role": "admin", **claims}
    body = f"{_base64({'alg': algorithm, 'typ': 'JWT'})}.{_base64(said)}"
    signature = hmac.digest(secret.encode(), body.encode(), "sha256") if algorithm == "HS256" else b""
    return f"{body}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def _base64(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def credentials(shop: Shop, installation: str) -> dict[str, dict[str, Any]]:
    """Return the headers that a stranger may send. The last two are guesses at Headway's own, which it counts."""
    header, claims, signature = shop.web.tokens["anna@example.org"].split(".")
    said = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    altered = f"{header}.{_base64(said | {'sub': 'root'})}.{signature}"
    return {
        "nothing": {},
        "headers of a proxy": {
            "X-Forwarded-User": "root", "X-Remote-User": "root", "X-User": "root", "X-Role": "admin",
            "X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1", "X-Forwarded-Prefix": "/shop",
            "X-Original-URL": "/headway/healthz", "X-Rewrite-URL": "/headway/healthz",
        },
        "another secret": {"Authorization": f"Bearer {forged()}"},
        "no signature": {"Authorization": f"Bearer {forged(algorithm='none')}"},
        "expired": {"Authorization": f"Bearer {forged(SECRET, seconds=-60)}"},
        "another audience": {"Authorization": f"Bearer {forged(SECRET, aud='elsewhere')}"},
        "no such account": {"Authorization": f"Bearer {forged(SECRET, sub='mallory')}"},
        "altered": {"Authorization": f"Bearer {altered}"},
        "Basic": {"Authorization": f"Basic {base64.b64encode(b'root:root').decode()}"},
        "cookies": {
            "Cookie": f"captions={forged()}; headway-session-{installation}={'a' * 43}; "
            f"headway-who-{installation}={'a' * 32}; headway-visitor-{installation}={'a' * 32}"
        },
        "a token": {"Authorization": f"Bearer hw_{'a' * 12}_{'b' * 43}"},
        "a ticket": {"Authorization": f"Bearer hwt_{_base64({'name': 'root', 'role': 'admin'})}.{'0' * 64}"},
    }  # fmt: skip


#: Tried without nginx too, and with odd paths.
DIRECT = ("nothing", "another secret", "cookies")
GUESSED = ("a token", "a ticket")
#: What the dashboard shows to everybody, besides its style sheets and scripts: whether it is up.
PUBLIC = ("/headway/healthz", "/headway/readyz")
#: Paths that nginx, uvicorn and the application could read differently. Each of them would lead to what is protected.
TRICKS = (
    "/shop//headway/api/v1/tasks", "/shop/headway//api/v1/tasks", "/shop/headway/static/../api/v1/tasks",
    "/shop/headway/static/%2e%2e/api/v1/tasks", "/shop/headway/static/..%2fapi/v1/tasks", "/shop/headway/healthz/../tasks",
    "/shop/headway/%61pi/v1/tasks", "/shop/headway/login/../tasks", "/shop/./captions", "/shop/%2e/captions",
    "/shop/shop/headway/api/v1/tasks", "/shop/headway/shop/headway/api/v1/tasks", "/shop/headway/login%2f..%2ftasks",
    "/shop/healthz/../captions", "/shop/headway/readyz/..;/tasks", "/shop/headway/static/;/../../tasks",
    "/shop/headway/api/v1/tasks/", "/shop/headway/healthz?next=/tasks", "/shop/headway/favicon.ico/../tasks",
)  # fmt: skip


def operations(shop: Shop, values: dict[str, str]) -> list[tuple[str, str]]:
    """Return (method, path below /shop) of everything that needs a login: application, API, pages and forms."""
    own = shop.ask("root", "/openapi.json").json["paths"]
    api = shop.ask("root", "/headway/api/v1/openapi.json").json["paths"]
    found = [(method, path) for path, methods in own.items() for method in methods if path != "/login"]
    assert len(found) >= 5
    found += [(method, f"/headway{path}") for path, methods in api.items() for method in methods]
    assert len(found) > 35
    pages = {**overview.PAGES, **jobs.PAGES, **dead.PAGES, **queues.PAGES, **system.PAGES}
    found += [("get", f"/headway{path}") for path in (*pages, "/metrics", "/api/v1/openapi.json")]
    found += [("get", path) for path in crawl(shop) if path not in PUBLIC and "?" not in path]
    found += [("post", f"/headway/actions/{name}") for name in FORMS]
    found += [("get", "/openapi.json"), ("post", "/headway/logout")]
    filled: dict[tuple[str, str], None] = {}
    for method, path in found:
        concrete = re.sub(r"{(\w+)(:\w+)?}", lambda parameter: values[parameter[1]], path)
        filled[method.upper(), concrete] = None
    return list(filled)


def crawl(shop: Shop) -> list[str]:
    """Follow every link of the dashboard as the administrator; each leads to a page below /shop/headway."""
    seen, left = set(), ["/headway/"]
    while left:
        path = left.pop()
        seen.add(path)
        assert len(seen) < 500, "the pages lead to ever more pages"
        answer = shop.ask("root", path)
        assert answer.status in (200, 303), (path, answer.status, answer.text[:500])
        text = answer.text if answer.headers.get_content_type() == "text/html" else ""
        links = re.findall(r'(?:href|action|src)="(/[^"#]*)', text) + answer.headers.get_all("Location", [])
        for link in map(html.unescape, links):
            assert link.startswith("/shop/headway"), f"{path} leads to {link}"
            is_form = re.search(r"/(actions/\w+|login|logout)$", link) is not None
            below = link.removeprefix("/shop")
            if not is_form and below not in seen and below not in left:
                left.append(below)
    return sorted(path for path in seen if not path.startswith("/headway/static/"))


@pytest.mark.req("S2-27", "S2-62")
def test_a_stranger_gets_nothing_from_any_route(shop: Shop):
    account = "anna@example.org"
    task = shop.order(account)
    shop.completed(account, task)
    worker = shop.task(account, task)["worker"]
    installation = _pause_by_the_administrator(shop)
    waiting = shop.order(account)
    values = {"id": task, "item": "1", "job": "ads", "key": "1", "name": "normal", "no": "1", "rule": "backlog"}
    tried = operations(shop, values)
    secrets = (task, waiting, worker, shop.accepted[task], "anna@", "a small boat", "QUEUED", shop.keys()[0])
    before = _everything_stored(shop)

    def refused(answer: Answer, *statuses: int) -> None:
        assert answer.status in statuses, (answer.status, answer.text[:500])
        assert not [secret for secret in secrets if secret in answer.text], answer.text
        assert "session" not in str(answer.headers.get_all("set-cookie"))

    for (name, headers), web in itertools.product(credentials(shop, installation).items(), (shop.web, shop.direct)):
        if web is shop.direct and name not in DIRECT:
            continue
        root = "" if web is shop.direct else "/shop"
        # A guess at a token of Headway is counted: after ten of them its sender waits.
        statuses = (401, 429) if name in GUESSED else (401,)
        for method, path in tried:
            form = {"queue": "normal", "task": waiting} if "/actions/" in path or "/logout" in path else None
            answer = web.ask(root + path, method=method, form=form, **headers)
            assert answer.status in statuses, (name, method, root + path, answer.status)
            refused(answer, *statuses)
        for path in (f"/captions/{waiting}/live", "/headway/api/v1/live", "/headway/api/v1/live?states=ads"):
            with pytest.raises(InvalidStatus) as denied, shop.socket(path, web, **headers):
                raise AssertionError(f"{name}: {path} was opened")
            assert denied.value.response.status_code in (401, 403, 429)
            assert not [secret for secret in secrets if secret in str(denied.value.response.body)]
        for path in TRICKS if name in DIRECT else ():
            answer = web.ask(path.removeprefix("" if root else "/shop"), **headers)
            if (answer.status, answer.text) != (200, "ok\n"):  # one leads to the public /healthz
                refused(answer, 307, 400, 401, 404, 405, 429)
    for login in (
        {"name": "root", "password": "wrong"},
        {"name": "root", "password": ""},
        {"name": "", "password": ""},
    ):
        refused(shop.web.post("/shop/login", login), 401)
    door = shop.web.ask("/shop/headway/login")
    found = re.search(r'name="csrf" value="([^"]+)"', door.text)
    assert found is not None
    guess = shop.web.post("/shop/headway/login", form={"csrf": found[1], "token": "hw_a_b"}, cookies=door.cookies)
    refused(guess, 303, 429)
    ticket = credentials(shop, installation)["a ticket"]["Authorization"].removeprefix("Bearer ")
    refused(shop.web.ask(f"/shop/headway/enter?ticket={ticket}"), 401, 429)
    assert _everything_stored(shop) == before, "a stranger changed something"

    # The application's tokens are not locked out by any of it: in the header, as the cookie, or beside a session.
    for name in ACCOUNTS:
        for _ in range(GUESSES + 2):
            assert shop.web.ask("/shop/headway/api/v1/tasks", token=name).status == 200
    cookie = {"captions": shop.web.tokens["vera"]}
    assert shop.web.ask("/shop/headway/tasks", cookies=cookie).status == 200
    assert shop.web.ask("/shop/captions", cookies=cookie).status == 401  # the application itself takes the header only
    with shop.socket("/headway/api/v1/live", Authorization=shop.bearer(account)) as socket:
        assert news(socket)["full"]["tasks"][waiting]["status"] == "QUEUED"
    _users_see_their_own(shop, tried, secrets)
    _viewers_change_nothing(shop, tried)
    _resume_by_the_administrator(shop)
    shop.completed(account, waiting)
    shop.end()
    shop.check_history()


def _everything_stored(shop: Shop) -> dict[str, Any]:
    """Return what a request could change."""
    return {
        "tasks": rows(shop.database, "SELECT id, status, cancel_by FROM tasks ORDER BY id"),
        "queues": rows(shop.database, "SELECT * FROM task_queues ORDER BY 1"),
        "workers": rows(shop.database, "SELECT name, wanted FROM task_workers WHERE wanted IS NOT NULL"),
        **{
            table: rows(shop.database, f"SELECT count(*) FROM {table}")
            for table in ("audit", "web_tokens", "web_sessions", "web_visits", "alert_mutes", "task_settings")
        },
    }


def _users_see_their_own(shop: Shop, tried: list[tuple[str, str]], secrets: tuple[str, ...]) -> None:
    """Another user asks for everything. No answer says more of anna than the id that its own path names."""
    for method, path in tried:
        answer = shop.web.ask(f"/shop{path}", method=method, token="bert")
        assert answer.status in (200, 303, 400, 403, 404, 415, 422), (method, path, answer.status, answer.text)
        told = [secret for secret in secrets[:6] if secret in answer.text and secret not in path]
        assert not told, (method, path, told)


def _viewers_change_nothing(shop: Shop, tried: list[tuple[str, str]]) -> None:
    page = shop.web.ask("/shop/headway/login", token="vera")
    [form] = re.findall(r'name="csrf" value="([^"]+)"', page.text)
    for method, path in tried:
        if method == "POST" and path.startswith("/headway/api/"):
            answer = shop.web.post(f"/shop{path}", token="vera", cookies=page.cookies, X_CSRF_Token=form)
            assert answer.error == "Forbidden", (path, answer.text)


def _pause_by_the_administrator(shop: Shop) -> str:
    """Pause a queue through the API. Return the name of the installation in its cookies."""
    page = shop.web.ask("/shop/headway/queues", token="root")
    form = re.findall(r'name="csrf" value="([^"]+)"', page.text)[0]
    sent = {"token": "root", "cookies": page.cookies}
    path = "/shop/headway/api/v1/queues/normal/pause"
    assert shop.web.post(path, **sent).status == 403  # another site's page may have sent it: it lacks the form's token
    assert shop.web.post(path, **sent, X_CSRF_Token=form).json["touched"] == 1
    assert rows(shop.database, "SELECT actor FROM audit WHERE action = ?", "queue.pause") == [("root@example.org",)]
    [visitor] = [name for name in page.cookies if "visitor" in name]
    return visitor.rpartition("-")[2]


def _resume_by_the_administrator(shop: Shop) -> None:
    """Resume it by the form of a page, as a browser with the cookie of the login does."""
    cookies = {"captions": shop.web.tokens["root"]}
    page = shop.web.ask("/shop/headway/queues", cookies=cookies)
    form = re.findall(r'name="csrf" value="([^"]+)"', page.text)[0]
    fields = {"csrf": form, "queue": "normal", "next": "/shop/headway/queues"}
    done = shop.web.post(
        "/shop/headway/actions/resume", form=fields, cookies=cookies | page.cookies, Origin=shop.web.address
    )
    assert (done.status, done.headers["Location"]) == (303, "/shop/headway/queues")


# ---------------------------------------------------------------------------------------------------------------------
# The long profile


class Disturbances:
    """What may happen to the deployment at any time."""

    def __init__(self, shop: Shop, postgres: PostgresServer, chance: random.Random) -> None:
        self._shop, self._postgres, self._chance = shop, postgres, chance

    def one(self) -> None:
        self._chance.choice(
            [
                self._kill_a_task_worker, self._kill_a_web_process, self._restart_redis, self._shop.wipe_redis,
                self._replace_the_workers, self._shop.rotate_keys, self._try_as_a_stranger, self._restart_postgres,
            ]
        )()  # fmt: skip

    def _kill_a_task_worker(self) -> None:
        query = "SELECT pid FROM task_workers WHERE ended_at IS NULL ORDER BY name"
        living = eventually(lambda: rows(self._shop.database, query), 60, "a worker has started")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._chance.choice(living)[0], signal.SIGKILL)

    def _kill_a_web_process(self) -> None:
        os.kill(self._chance.choice(eventually(self._shop.web_workers, 60)), signal.SIGKILL)

    def _restart_redis(self) -> None:
        self._shop.redis.kill9()
        self._shop.redis.start()

    def _restart_postgres(self) -> None:
        self._postgres.restart(immediate=self._chance.random() < 0.5)

    def _replace_the_workers(self) -> None:
        self._shop.deployment.stop("worker")
        self._shop.deployment.start("worker", WORKER)

    def _try_as_a_stranger(self) -> None:
        for path in ("/captions", "/headway/api/v1/tasks", "/headway/tasks"):
            answer = self._shop.ask(forged(), path)
            assert answer.status == 401, answer.text


class Users:
    """Users who order one caption after the other, and cancel some of them."""

    def __init__(self, shop: Shop, chance: random.Random) -> None:
        self._shop, self._over = shop, threading.Event()
        self.problems: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._use, args=(account, random.Random(chance.random()))) for account in USERS
        ]
        for thread in self._threads:
            thread.start()

    def _use(self, account: str, choice: random.Random) -> None:
        shop = self._shop
        try:
            while not self._over.is_set():
                id = shop.order(account, choice.uniform(0, 1.5), kind=choice.choice(["caption", "caption", "preview"]))
                if choice.random() < 0.2:
                    assert shop.ask(account, f"/captions/{id}", "DELETE").status in (200, 400, 409)
                shop.until(account, id, "COMPLETED", "FAILED", "CANCELLED", timeout=180)
        except BaseException as error:  # noqa: BLE001 - the test shows it
            self.problems.append(error)

    def go_on(self, orders: int) -> None:
        """Wait until users have ordered that many more captions."""
        enough = len(self._shop.accepted) + orders
        eventually(lambda: bool(self.problems) or len(self._shop.accepted) >= enough, 180, "users order captions")

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(240)


@pytest.mark.faults
def test_no_task_is_lost_in_minutes_of_random_disturbances(
    shop: Shop, postgres_server: PostgresServer, chance: random.Random
):
    disturbances, users = Disturbances(shop, postgres_server, chance), Users(shop, chance)
    end = time.monotonic() + float(os.environ.get("HEADWAY_SCENARIO_SECONDS") or 600)
    try:
        while time.monotonic() < end and not users.problems:
            disturbances.one()
            users.go_on(chance.randrange(1, 6))
    finally:
        users.close()
    assert not users.problems, users.problems
    shop.end()
    assert "COMPLETED" in shop.check_history().values()
