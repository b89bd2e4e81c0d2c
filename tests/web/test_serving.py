"""`headway serve` as a process: its start, its end, and what it says about a store it cannot use."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from websockets.exceptions import ConnectionClosed

from headway.ledger import Ledger
from tests.services.waiting import eventually
from tests.web.conftest import Servers, Web, news, until_closed

Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_server_that_is_told_to_end_closes_its_connections_and_ends_well(serve: Servers, number: signal.Signals):
    web = serve("--no-auth")
    with web.live() as live:
        news(live)
        web.process.send_signal(number)
        with pytest.raises(ConnectionClosed):
            until_closed(live)
        assert live.close_code == 1012  # the server restarts or ends: come back later
    assert web.process.wait(30) == 0


def test_the_database_is_made_private_and_a_job_that_starts_later_is_seen(serve: Servers, tmp_path: Path):
    web = serve("--no-auth")
    assert (tmp_path / "headway.db").stat().st_mode & 0o777 == 0o600
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        ledger.create("later")
    assert [job["id"] for job in web.ask("/api/v1/jobs").json["jobs"]] == ["later"]


def test_a_store_that_cannot_be_used_is_a_clear_error_at_the_start(headway_cli: Run, tmp_path: Path):
    (tmp_path / "bad.db").write_bytes(b"this is no database" * 100)
    answer = headway_cli("serve", "--port", "0", "--database", "sqlite:///bad.db")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "Traceback" not in answer.stderr
    assert (tmp_path / "bad.db").read_bytes() == b"this is no database" * 100


def raw(web: Web, text: bytes) -> bytes:
    """What comes back for these bytes."""
    host, port = web.host.split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "text",
    [
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /api/v1/jobs HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /api/v1/queues/low/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /api/v1/queues/low/pause HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /api/v1/live HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b'GET //evil.example/%2e%2e HTTP/1.1\r\nHost: localhost\r\nCookie: \x7f;;=;a="\r\n\r\n',
    ],
)  # fmt: skip
def test_bytes_that_are_no_request_of_ours_leave_the_server_as_it_was(opened: Web, text: bytes):
    answer = raw(opened, text)
    assert b" 500 " not in answer.split(b"\r\n")[0]
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert b"Traceback" not in answer
    assert opened.ask("/api/v1/jobs").status == 200


def test_a_client_that_goes_in_the_middle_leaves_nothing_behind(opened: Web):
    for _ in range(20):
        connection = http.client.HTTPConnection(opened.host)
        connection.request("GET", "/api/v1/jobs")
        connection.close()
        with opened.live():
            pass

    def none_left() -> bool:
        return "headway_web_live 0.0" in opened.ask("/metrics").text

    eventually(none_left)


def test_a_connection_that_never_finishes_the_head_of_a_request_is_closed(serve: Servers, tmp_path: Path):
    """One that says nothing, one that stops in the middle, one that goes on for ever; before any request and after one."""
    web = serve(
        "--no-auth", "--database", f"sqlite:///{tmp_path}/h.db", server={"HEAD_SECONDS": 0.3, "HEAD_BYTES": 20_000}
    )
    host, port = web.host.split(":")
    whole = f"GET /healthz HTTP/1.1\r\nHost: {web.host}\r\n\r\n".encode()

    def opened(text: bytes) -> socket.socket:
        connection = socket.create_connection((host, int(port)), timeout=30)
        connection.sendall(text)
        return connection

    with web.live() as live:
        for text in (b"", b"GET / HT", whole + b"GET /healthz HTTP/1.1\r\nX: "):
            with opened(text) as connection:
                assert (b"ok\n" in read_all(connection)) == (b"HTTP/1.1\r\nHost" in text)
        with opened(b"GET / HTTP/1.1\r\n") as connection, contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x" * 100 + b": y\r\n")
            assert not read_all(connection)
        assert "full" in news(live)  # it is older than that, and open


def test_a_connection_that_never_takes_what_it_asked_for_is_closed(serve: Servers, tmp_path: Path):
    """More of it than the buffers between the two can keep; nobody has to be known for that."""
    web = serve("--no-auth", "--database", f"sqlite:///{tmp_path}/h.db", server={"UNREAD_SECONDS": 1})
    host, port = web.host.split(":")
    found = re.search(r"/static/app[.]\w+[.]js", web.ask("/").text)
    assert found is not None
    question = f"GET {found[0]} HTTP/1.1\r\nHost: {web.host}\r\n\r\n".encode()

    def sockets() -> set[str]:
        files = Path(f"/proc/{web.process.pid}/fd")
        return {found for name in os.listdir(files) if (found := _link(files / name)).startswith("socket:")}

    with socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before = sockets()
        greedy.connect((host, int(port)))
        greedy.sendall(question * 500)
        eventually(lambda: sockets() - before)
        theirs = sockets() - before
        eventually(lambda: not theirs & sockets())
    assert web.ask("/healthz").status == 200


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # it was closed meanwhile
        return ""


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while some := connection.recv(4096):
            found += some
    return found


def test_a_server_takes_the_descriptors_that_it_may_have(serve: Servers, tmp_path: Path):
    """Its pages are not limited by what a shell gives its commands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        web = serve("--no-auth", "--database", f"sqlite:///{tmp_path}/h.db")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(web.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_file_that_was_moved_away_is_never_shown_as_fine_and_is_when_it_is_back(serve: Servers, database: str):
    """What is open lives on for this process and for nobody else: each look at it says so, not one in ten."""
    web = serve("--no-auth", "--database", database)
    path = Path(database.removeprefix("sqlite:///"))
    files = [path, Path(f"{path}-wal"), Path(f"{path}-shm")]

    def statuses() -> set[int]:
        return {web.ask(asked).status for asked in ("/readyz", "/api/v1/jobs", "/", "/api/v1/queues")}

    with web.live() as live:
        assert "full" in news(live)
        for file in files:
            file.rename(f"{file}-away")
        eventually(lambda: statuses() == {503})
        assert {status for _ in range(8) for status in statuses()} == {503}
        assert any("store" in news(live).get("delta", {}) for _ in range(10))
        for file in files:
            Path(f"{file}-away").rename(file)
        eventually(lambda: statuses() == {200})


def answer_to(web: Web, text: bytes) -> bytes:
    """What comes back on a connection of its own, to its end."""
    host, port = web.host.split(":")
    found = b""
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(text)
        while some := connection.recv(65_536):
            found += some
    return found


def test_head_answers_as_get_does_without_the_body_and_a_wrong_method_is_told_the_right_one(opened: Web):
    for path in ("/", "/jobs", "/api/v1/jobs", "/api/v1/queues", "/metrics", "/healthz"):
        answer = opened.ask(path, method="HEAD")
        assert (answer.status, answer.body) == (200, b""), path
        assert answer.headers["Content-Type"] == opened.ask(path).headers["Content-Type"]
    assert opened.ask("/api/v1/jobs", method="OPTIONS").headers["Allow"] == "GET"
    refused = opened.ask("/actions/retry")
    assert (refused.status, refused.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize("target", ["*", "/x", "//x/y", "/%2f", "/actions/", "/jobs/", "/static/", "/api/v1"])
def test_an_odd_target_is_not_found_and_never_a_failure_of_the_server(opened: Web, target: str):
    for method in ("GET", "OPTIONS", "DELETE"):
        if target != "*" or method == "OPTIONS":
            text = f"{method} {target} HTTP/1.1\r\nHost: {opened.host}\r\nConnection: close\r\n\r\n"
            assert answer_to(opened, text.encode()).split(b" ")[1] in (b"404", b"405", b"415")


def test_a_body_in_chunks_is_taken_and_one_without_an_end_is_too_large(opened: Web):
    head = (
        f"POST /api/v1/queues/low/resume HTTP/1.1\r\nHost: {opened.host}\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()
    assert b"The queue low" in answer_to(opened, head + b'7\r\n{"reaso\r\n6\r\nn":""}\r\n0\r\n\r\n')
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    assert b" 413 " in answer_to(opened, head + chunk * 32).split(b"\r\n")[0]
