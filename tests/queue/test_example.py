"""examples/captions, used as a person would: one command, a browser, Ctrl-C."""

from __future__ import annotations

import http.cookiejar
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services.server import free_port
from tests.services.waiting import eventually

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "captions"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "captions", ignore=shutil.ignore_patterns(".work", "__pycache__")))


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=home, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


class Browser:
    def __init__(self, address: str) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def get(self, path: str = "/") -> str:
        with self._opener.open(self._address + path, timeout=20) as reply:
            return str(reply.read().decode())

    def post(self, path: str, **form: str) -> str:
        with self._opener.open(self._address + path, urllib.parse.urlencode(form).encode(), timeout=20) as reply:
            return str(reply.read().decode())


def processes_in(directory: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "cwd").readlink().is_relative_to(directory):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


@pytest.mark.req("S2-12", "S2-13", "S2-17", "S2-52")
def test_the_example_runs_in_one_command_and_ctrl_c_ends_all_of_it(
    home: Path, start: Callable[..., subprocess.Popen[str]]
):
    process = start("run.py", "--port", "0")
    assert process.stdout is not None
    said = process.stdout.readline()
    match = re.search(r"http://127\.0\.0\.1:\d+", said)
    assert match, said
    anna, root = Browser(match[0]), Browser(match[0])
    assert "Who are you?" in anna.get()
    anna.post("/sign-in", user="anna")
    assert "QUEUED" in anna.post("/ask", picture="<b>harbour</b>.jpg")
    assert "has an active task already" in anna.post("/ask", picture="another.jpg")
    root.post("/sign-in", user="root")
    page = eventually(lambda: page if "COMPLETED" in (page := anna.get()) else None, 60)
    assert "&lt;b&gt;harbour&lt;/b&gt;.jpg: a small boat at sea" in page
    assert "anna" in root.get()
    assert "resume" in root.post("/pause/low")
    assert len(processes_in(home)) >= 5, "the web, its workers, the supervisor, its workers, Redis"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 0
    assert not processes_in(home)


def test_the_fastapi_example_takes_a_task_and_its_worker_runs_it(
    home: Path, start: Callable[..., subprocess.Popen[str]]
):
    port = free_port()
    start("-m", "uvicorn", "fast:app", "--port", str(port), "--log-level", "error")
    start("-m", "headway", "worker", "--app", "fast:queue")
    address = f"http://127.0.0.1:{port}"

    def ask(path: str, method: str = "GET") -> str:
        call = urllib.request.Request(address + path, headers={"X-User": "anna"}, method=method)
        try:
            with urllib.request.urlopen(call, timeout=20) as reply:
                return str(reply.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode()}"
        except OSError:
            return ""

    task = eventually(lambda: re.search(r'"id":"(\w+)"', ask("/captions?picture=harbour.jpg", "POST")), 60)
    eventually(lambda: '"status":"COMPLETED"' in ask(f"/captions/{task[1]}"), 60)
    assert ask(f"/captions/{task[1]}/result") == '{"caption":"harbour.jpg: a small boat at sea"}'
    assert ask("/captions/nobodys").startswith("404")
