"""Outboxes of every kind, receivers of every temper."""

from __future__ import annotations

import http.server
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway import _redis, _sql
from headway.events import Event, Outbox, RedisOutbox, SqlOutbox, append
from tests.services.redis import RedisServer


@dataclass
class Store:
    """A place where events are decided and wait. Every outbox it gives is one of its own, as in another process."""

    kind: str
    address: str
    decide: Callable[..., None]
    outbox: Callable[..., Outbox]
    #: Put in something that is no event.
    damage: Callable[[], None]
    closing: list[Callable[[], None]] = field(default_factory=list)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address of a database that is not made yet: see tests.core.databases."""
    match request.param:
        case "file":
            return f"sqlite:///{tmp_path}/ledger.db"
        case "memory":
            return "sqlite:///:memory:"
        case _:
            return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "redis":
        made = redis_store(request.getfixturevalue("redis_server"))
    else:
        address = (
            f"sqlite:///{tmp_path}/e.db"
            if request.param == "sqlite"
            else request.getfixturevalue("postgres_with_tables")
        )
        made = sql_store(request.param, address)
    yield made
    for close in made.closing:
        close()


def sql_store(kind: str, address: str) -> Store:
    database = _sql.connect(address)

    def decide(*events: Event) -> None:
        def work(tx: _sql.Tx) -> None:
            for one in events:
                append(tx, one)

        database.run(work)

    def damage() -> None:
        database.run(
            lambda tx: tx.execute(
                "INSERT INTO outbox (id, type, at, source, job, version, data) VALUES ('bad', 't', 1, 's', 'j', 1, '{')"
            )
        )

    return Store(kind, address, decide, partial(SqlOutbox, database), damage, [database.close])


def redis_store(server: RedisServer) -> Store:
    client: Any = _redis.connect(server.url(1), role="state")

    def decide(*events: Event) -> None:
        for one in events:
            fields = {"id": one.id, "type": one.type, "source": one.source, "job": one.job, "version": one.version}
            client.xadd("smap:events", {**fields, "at": one.at.timestamp(), "data": json.dumps(one.data)})

    def damage() -> None:
        client.xadd("smap:events", {"id": "bad", "type": "t", "job": "j"})

    return Store("redis", server.url(1), decide, partial(RedisOutbox, client), damage, [client.close])


class Receiver(http.server.BaseHTTPRequestHandler):
    """Answers as its server's script says: a status, or a function of the handler."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        answers = self.server.answers  # type: ignore[attr-defined]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if callable(answer):
            answer(self)
            return
        self.send_response(answer)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.requests.append(("GET", {}, b""))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Any]:
    """A web server of the test: `.requests` it got, `.answers` it gives (the last one for ever), `.url`."""
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    server.requests, server.answers = [], [204]
    server.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A verb that runs in this process configures headway's logger."""
    logger = logging.getLogger("headway")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Something to hang on until the test is over."""
    opened = threading.Event()
    yield opened
    opened.set()
