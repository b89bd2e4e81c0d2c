"""Access to `headway serve` on its own machine: the token file, one-time links, and strangers behind a reverse proxy."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_live

from headway import local_servers
from headway._sql import connect
from headway.client import Client
from headway.errors import UsageError
from headway.local_servers import LocalServer
from headway.web.auth import tokens
from headway.web.auth.gate import PUBLIC
from tests.services.nginx import FORWARDING, NginxServer
from tests.services.waiting import eventually
from tests.web.conftest import Servers, Web, answer_of, news

Run = Callable[..., "subprocess.CompletedProcess[str]"]
StartNginx = Callable[..., NginxServer]

LINK = re.compile(r"http://\S+/enter\?next=/\S*&ticket=hwl_[0-9a-f]{56}")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory for this test alone."""
    directory = tmp_path / "runtime"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    return directory


def printed_link(log: Path) -> str:
    found = LINK.search(log.read_text())
    assert found is not None, log.read_text()
    return found[0]


def path_of(link: str) -> str:
    parts = urlsplit(link)
    return f"{parts.path}?{parts.query}"


def free_listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


# ---- the link -------------------------------------------------------------------------------------------------------


def test_a_server_without_tokens_lets_nobody_in_but_by_its_one_time_link(serve: Servers, tmp_path: Path):
    web = serve()
    assert web.ask("/api/v1/jobs").status == 401
    assert web.ask("/").headers["Location"].startswith("/login")
    link = printed_link(tmp_path / "serve.log")
    entered = web.ask(path_of(link))
    assert entered.status == 200
    assert web.ask("/api/v1/jobs", cookies=entered.cookies).status == 200
    again = web.ask(path_of(link))
    assert again.status == 401
    assert not any("session" in name for name in again.cookies)
    assert "headway open" in again.text


def test_head_does_not_spend_a_link(serve: Servers, tmp_path: Path):
    web = serve()
    path = path_of(printed_link(tmp_path / "serve.log"))
    head = web.ask(path, method="HEAD")
    assert (head.status, head.headers["Allow"]) == (405, "GET, POST")
    assert not any("session" in name for name in head.cookies)
    assert web.ask(path).status == 200


def test_a_link_is_bound_to_its_server_and_its_time(monkeypatch: pytest.MonkeyPatch):
    with free_listener() as listener:
        server, other = local_servers.new_server(listener), local_servers.new_server(listener)
    ticket = server.link().rpartition("=")[2]
    assert local_servers.link_id(server.token, ticket) is not None
    assert local_servers.link_id(other.token, ticket) is None
    assert local_servers.link_id(server.token, ticket[:-1] + ("0" if ticket[-1] != "0" else "1")) is None
    later = ticket[:20] + f"{int(ticket[20:28], 16) + 1:08x}" + ticket[28:]
    assert local_servers.link_id(server.token, later) is None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + local_servers.LINK_SECONDS + 1)
    assert local_servers.link_id(server.token, ticket) is None


def test_a_link_opens_nothing_again_after_its_session_was_ended_and_cleared_away(serve: Servers, database: str):
    web = serve("--database", database)
    server = find(web)
    link = path_of(server.link())
    cookies = web.ask(link).cookies
    page = web.ask("/login", cookies=cookies)
    csrf = re.search(r'name="csrf" value="([^"]+)"', page.text)
    assert csrf is not None
    assert web.post("/logout", form={"csrf": csrf[1]}, cookies=cookies).status == 303
    with connect(database) as store:  # an hour and a half pass
        store.write("UPDATE web_visits SET expires_at = expires_at - 5400, created_at = created_at - 5400")
    assert web.ask(path_of(server.link())).status == 200  # which clears away what is over
    assert web.ask(link).status == 401


def test_headway_open_prints_another_link_and_opens_the_browser(
    serve: Servers, headway_cli: Run, runtime: Path, tmp_path: Path
):
    answer = headway_cli("open")
    assert (answer.returncode, "headway serve" in answer.stderr) == (2, True)
    web = serve()
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    answer = headway_cli("open", env={"BROWSER": f"{browser} %s"})
    assert (answer.returncode, answer.stderr) == (0, "")
    link = answer.stdout.strip()
    eventually(lambda: (tmp_path / "opened").exists() and (tmp_path / "opened").read_text().strip() == link)
    assert web.ask(path_of(link)).status == 200
    other = serve()
    answer = headway_cli("open", "--link")
    assert answer.returncode == 2
    assert web.address in answer.stderr
    assert other.address in answer.stderr
    assert headway_cli("open", other.address, "--link").stdout.startswith(other.address)


# ---- the token file -------------------------------------------------------------------------------------------------


def find(web: Web) -> LocalServer:
    host, _, port = web.host.rpartition(":")
    found = local_servers.find(host, int(port))
    assert found is not None
    return found


def test_commands_and_clients_of_this_user_find_the_token_by_themselves(
    serve: Servers, database: str, headway_cli: Run, runtime: Path
):
    web = serve("--database", database)
    [path] = (runtime / "headway").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    answer = headway_cli("jobs", "--json", "--database", web.address)
    assert json.loads(answer.stdout)["jobs"][0]["id"] == "ads"
    port = web.host.rpartition(":")[2]
    for address in (web.address, f"http://localhost:{port}"):
        with Client(address) as client:
            assert client.pause("low", reason="upgrade").touched
            assert client.activity(limit=1).activity[0].actor == "local"
            client.resume("low")
    with Client(web.address, "hw_none") as client, pytest.raises(UsageError):  # a token that was given is used
        client.jobs()
    web.stop()
    assert list((runtime / "headway").iterdir()) == []


def test_a_client_follows_a_server_that_was_killed_and_started_again(serve: Servers, database: str, runtime: Path):
    web = serve("--database", database)
    with Client(web.address) as client:
        assert client.jobs().jobs
        stale = find(web)
        web.kill()
        again = serve("--database", database, "--port", web.host.rpartition(":")[2])
        assert client.jobs().jobs
    assert find(again).token != stale.token
    assert again.ask("/api/v1/jobs", token=stale.token).status == 401


def test_the_state_directory_takes_the_file_where_there_is_no_runtime_directory(
    serve: Servers, tmp_path: Path, headway_cli: Run
):
    env = {"XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    web = serve(env=env)
    assert len(list((tmp_path / "state" / "headway").iterdir())) == 1
    assert headway_cli("jobs", "--database", web.address, env=env).returncode == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory that not even root can write to")
def test_a_directory_that_cannot_be_written_ends_no_server_and_is_said(serve: Servers, tmp_path: Path):
    env = {"XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": "/proc"}
    web = serve(env=env)
    assert web.ask("/healthz").status == 200
    assert "the token file cannot be written" in (tmp_path / "serve.log").read_text()
    assert web.ask(path_of(printed_link(tmp_path / "serve.log"))).status == 200


@pytest.mark.parametrize("how", ["readable by others", "a link", "broken", "of another machine"])
def test_a_token_file_that_somebody_else_may_have_written_is_ignored(
    runtime: Path, how: str, monkeypatch: pytest.MonkeyPatch
):
    with free_listener() as listener:
        server = local_servers.new_server(listener)
    with local_servers.published(server) as problem:
        assert problem is None
        assert local_servers.find("127.0.0.1", server.port) == server
        assert local_servers.find("10.0.0.1", server.port) is None
        [path] = (runtime / "headway").iterdir()
        if how == "readable by others":
            path.chmod(0o640)
        elif how == "a link":
            path.rename(runtime / "elsewhere")
            path.symlink_to(runtime / "elsewhere")
        elif how == "broken":
            path.write_text("{")
        else:
            monkeypatch.setattr(socket, "gethostname", lambda: "another")
        assert local_servers.find("127.0.0.1", server.port) is None
        assert local_servers.servers() == []


def test_a_server_that_ends_leaves_the_file_of_its_successor(runtime: Path):
    with free_listener() as listener:
        first, second = local_servers.new_server(listener), local_servers.new_server(listener)
    with local_servers.published(first):
        successor = local_servers.published(second)
        successor.__enter__()
    assert local_servers.servers() == [second]
    successor.__exit__(None, None, None)
    assert local_servers.servers() == []


def test_a_server_with_tokens_prints_no_link_and_its_token_file_works(serve: Servers, database: str, tmp_path: Path):
    with connect(database) as store:
        tokens.create(store, "anna", "viewer", by="test")
    web = serve("--database", database)
    said = (tmp_path / "serve.log").read_text()
    assert "hwl_" not in said
    assert "Log in with a token" in said
    with Client(web.address) as client:
        assert client.jobs().jobs


# ---- behind a proxy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directives", ["", FORWARDING], ids=["bare", "forwarding"])
def test_a_stranger_behind_nginx_gets_nothing_on_any_route(fresh: Web, nginx_factory: StartNginx, directives: str):
    """The routes are those of the OpenAPI document and the pages, so a new one is tried without being named here."""
    proxy = nginx_factory(fresh.address, directives=directives)
    stranger = Web(proxy.address, fresh.process)
    paths = fresh.ask("/api/v1/openapi.json", token="admin").json["paths"]
    tried = 0
    for path, methods in paths.items():
        filled = re.sub(r"\{[a-z_]+\}", "1", path)
        for method in methods:
            assert stranger.ask(filled, method=method.upper()).status == 401, (method, path)
            tried += 1
    assert tried > 40
    for path in ("/", "/jobs", "/jobs/ads", "/dead", "/queues", "/tasks", "/workers", "/me", "/states", "/about"):
        answer = stranger.ask(path)
        assert (answer.status, answer.headers["Location"].startswith("/login")) == (303, True), path
    assert stranger.ask("/metrics").status == 401
    for path in PUBLIC:
        assert "ads" not in stranger.ask(path).text
    with pytest.raises(InvalidStatus) as refused, stranger.live():
        pass
    assert refused.value.response.status_code == 401 or directives == ""
    if directives:
        assert answer_of(refused.value) == (401, "Unauthenticated")
        with Web(proxy.address, fresh.process, fresh.tokens).live(token="viewer") as socket:
            assert "full" in news(socket)
    assert stranger.ask("/api/v1/jobs", token=fresh.tokens["viewer"]).status == 200


def test_a_server_without_tokens_behind_nginx_is_closed_too(serve: Servers, nginx_factory: StartNginx, tmp_path: Path):
    """Started as on a laptop, on loopback, with a proxy that somebody put in front: it sends Host: 127.0.0.1 by HTTP/1.1."""
    web = serve()
    stranger = Web(nginx_factory(web.address).address, web.process)
    assert stranger.ask("/api/v1/jobs").status == 401
    assert stranger.ask("/").headers["Location"].endswith("/login?next=/")
    assert stranger.post("/api/v1/queues/low/pause").status == 401


@pytest.mark.parametrize("kept", [False, True], ids=["nginx removes the path", "nginx keeps the path"])
def test_a_server_below_a_path_of_a_proxy_links_to_that_path(
    serve: Servers, nginx_factory: StartNginx, database: str, tmp_path: Path, kept: bool
):
    web = serve("--root-path", "/progress", "--database", database)
    upstream = web.address if kept else f"{web.address}/"
    proxy = Web(nginx_factory(upstream, location="/progress/", directives=FORWARDING).address, web.process)
    assert proxy.ask("/progress/").headers["Location"] == "/progress/login?next=/"
    cookies = web.ask(path_of(printed_link(tmp_path / "serve.log"))).cookies
    page = proxy.ask("/progress/", cookies=cookies)
    assert page.status == 200
    assert 'href="/progress/jobs"' in page.text
    style = re.search(r'href="(/progress/static/[^"]+)"', page.text)
    assert style is not None
    assert proxy.ask(style[1]).status == 200
    with connect_live(
        f"ws://{proxy.host}/progress/api/v1/live",
        additional_headers={"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())},
    ) as socket:
        assert "ads" in news(socket)["full"]["jobs"]
    assert web.ask("/progress/", cookies=cookies).status == 200


def test_a_root_path_that_is_none_is_refused(headway_cli: Run):
    answer = headway_cli("serve", "--root-path", "progress/", "--port", "0")
    assert answer.returncode == 2
    assert "--root-path /headway" in answer.stderr
