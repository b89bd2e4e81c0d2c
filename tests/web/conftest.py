"""A served application: a real process, real sockets, and the plainest of clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headway._sql import connect as open_database
from headway.finishline import FinishLine
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.states import Manager, open_store
from headway.web.auth import tokens
from tests.cli.conftest import _seeded as _seeded  # noqa: PLC0414
from tests.cli.conftest import ads as ads  # noqa: PLC0414 - the seeded ledger of the command line's tests
from tests.services.redis import RedisServer

ROLES = ("viewer", "operator", "admin", "user")


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def error(self) -> str:
        """The type of the error; the shape of every error is looked at on the way."""
        document = self.json
        assert document["schema"] == "headway.error/1", document
        assert set(document["error"]) == {"type", "message", "hint", "exit_code"}
        assert "Traceback" not in self.text
        return str(document["error"]["type"])

    @property
    def cookies(self) -> dict[str, str]:
        pairs = [value.partition(";")[0].partition("=") for value in self.headers.get_all("set-cookie") or []]
        return {name: value for name, _, value in pairs}


@dataclass
class Web:
    """A running server."""

    address: str
    process: subprocess.Popen[str]
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return urlsplit(self.address).netloc

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        token: str | None = None,
        body: Any = None,
        form: dict[str, str] | None = None,
        cookies: dict[str, str] | None = None,
        **headers: Any,
    ) -> Answer:
        """One request. ``token`` is a role whose token is sent, or a token."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        content: bytes | None = None
        if token is not None:
            sent["Authorization"] = f"Bearer {self.tokens.get(token, token)}"
        if cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        if form is not None:
            sent.setdefault("Content-Type", "application/x-www-form-urlencoded")
            content = urlencode(form).encode()
        elif body is not None or method == "POST":
            sent.setdefault("Content-Type", "application/json")
            content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        with closing(http.client.HTTPConnection(self.host, timeout=60)) as connection:
            connection.request(method, path, content, sent)
            response = connection.getresponse()
            return Answer(response.status, response.msg, response.read())

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.ask(path, method="POST", body=body, **options)

    @contextmanager
    def live(
        self, *, token: str | None = None, since: str = "", states: str = "", **headers: str
    ) -> Iterator[ClientConnection]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["Authorization"] = f"Bearer {self.tokens.get(token, token)}"
        address = f"ws://{self.host}/api/v1/live" + ("?" if since or states else "")
        address += urlencode({name: text for name, text in {"since": since, "states": states}.items() if text})
        with connect(address, additional_headers=sent, open_timeout=30) as socket:
            yield socket

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(30)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def until_closed(socket: ClientConnection) -> None:
    """Read until the server closes the connection."""
    while True:
        news(socket)


def answer_of(refused: InvalidStatus) -> tuple[int, str]:
    """Status and error of a live connection that was refused; the same as of any other request."""
    answer = Answer(refused.response.status_code, http.client.HTTPMessage(), bytes(refused.response.body or b""))
    return answer.status, answer.error


def news(socket: ClientConnection, timeout: float = 30) -> dict[str, Any]:
    """The next live message."""
    found = json.loads(socket.recv(timeout))
    assert isinstance(found, dict)
    return found


class Servers:
    """Starts `headway serve`, and ends what it started."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[str]] = []

    def __call__(
        self, *arguments: str, env: dict[str, str] | None = None, server: dict[str, float] | None = None
    ) -> Web:
        """On a free port, in `directory`; answered when it is ready. ``server``: other limits of `headway.web.server`."""
        limits = "".join(f"server.{name} = {value}; " for name, value in (server or {}).items())
        start = f"from headway.web import server; {limits}from headway.cli import main; main()"
        port = () if "--port" in arguments else ("--port", "0")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        process = subprocess.Popen(
            [sys.executable, *(("-c", start) if server else ("-m", "headway")), "serve", *port, *arguments],
            env=inherited | (env or {}),
            text=True,
            start_new_session=True,
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=(self._directory / "serve.log").open("w"),
        )
        self._processes.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, (self._directory / "serve.log").read_text()
        return Web(address, process)

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.close()


def make_tokens(url: str) -> dict[str, str]:
    """A token of each role; that of the role user is anna's, and ben has one too."""
    with open_database(url) as database:
        made = {role: tokens.create(database, f"the-{role}", role, by="test")[0] for role in ROLES[:3]}
        made["user"] = tokens.create(database, "anna", "user", by="test")[0]
        made["other"] = tokens.create(database, "ben", "user", by="test")[0]
    return made


def seed_queue(url: str) -> None:
    """Anna has a failed and a waiting task, ben a waiting one."""
    with TaskQueue(url) as queue:
        queue.handler("caption", retries=0, isolation="none")(lambda task, payload: 1 / payload)
        queue.submit("caption", 0, id="t-failed", user_id="anna")
        Worker(queue).run(burst=True)
        queue.submit("caption", 1, id="t-anna", user_id="anna")
        queue.submit("caption", 1, id="t-ben", user_id="ben")


def seed_states(url: str) -> None:
    store, _ = open_store(url, "nightly", 2)
    with Manager("nightly", 1, 2, store) as manager:
        manager.set_started("ingest", payload={"rows": 3})


@pytest.fixture
def database(ads: Path) -> str:
    """A job as people have it, tasks of two people, and states."""
    url = f"sqlite:///{ads}"
    seed_queue(url)
    seed_states(url)
    return url


def seed_project(redis: RedisServer) -> None:
    with FinishLine(redis.url(1), checkpointer=False) as line:
        line.create("crawl", 2)
        line.item_done("crawl", 1)


@pytest.fixture
def fresh(serve: Servers, database: str, redis_server: RedisServer) -> Web:
    """A server that asks for tokens, for a test that changes something."""
    seed_project(redis_server)
    made = make_tokens(database)
    web = serve("--database", database, "--redis", redis_server.url(0))
    web.tokens = made
    return web


def _module_server(directory: Path, seeded: Path, *, with_tokens: bool) -> Iterator[Web]:
    shutil.copy(seeded, directory / "headway.db")
    url = f"sqlite:///{directory}/headway.db"
    seed_queue(url)
    seed_states(url)
    made = make_tokens(url) if with_tokens else {}
    servers = Servers(directory)
    web = servers("--database", url, *(() if with_tokens else ("--no-auth",)))
    web.tokens = made
    yield web
    servers.close()


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, _seeded: Path) -> Iterator[Web]:
    """A server that asks for tokens, for tests that change nothing or only what is their own."""
    yield from _module_server(tmp_path_factory.mktemp("closed"), _seeded, with_tokens=True)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, _seeded: Path) -> Iterator[Web]:
    """A server that lets everybody in (``--no-auth``), for the same."""
    yield from _module_server(tmp_path_factory.mktemp("opened"), _seeded, with_tokens=False)
