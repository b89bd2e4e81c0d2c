"""`headway run --serve`: a page beside a run, which costs it nothing but a process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from headway.ledger import Ledger
from tests.services.waiting import eventually
from tests.web.conftest import Web, news

Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = """
import os, time

def slow(item):
    while not os.path.exists("free"):
        time.sleep(0.01)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(FUNCTIONS)
    (tmp_path / "items.txt").write_text("".join(f"{n}\n" for n in range(6)))
    return tmp_path


def started(spawn_cli: Spawn, *options: str, **environment: str) -> tuple[subprocess.Popen[str], Web, dict[str, str]]:
    """The run, its server, and the cookies of a browser that opened the link."""
    words = (
        "run",
        "jobs:slow",
        "-i",
        "items.txt",
        "-j",
        "ads",
        "-w",
        "2",
        "--progress",
        "plain",
        "--serve",
        *options,
    )
    run = spawn_cli(*words, env=environment)
    assert run.stderr is not None
    for line in run.stderr:
        if "Page: " in line:
            address, _, query = line.split("Page: ")[1].strip().partition("/enter?")
            assert query.startswith("next=/jobs/ads&ticket=")
            web = Web(address, run)
            return run, web, web.ask(f"/enter?{query}").cookies
    raise AssertionError("no address was printed")


def children(pid: int) -> list[int]:
    """Servers that this run started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if b"headway.web.run_page" in words and parent == pid:
            found.append(int(entry.name))
    return found


def test_a_run_has_a_page_that_is_told_the_last_state_and_ends_with_it(spawn_cli: Spawn, place: Path):
    run, web, cookies = started(spawn_cli)
    assert web.ask("/jobs/ads").status == 303
    assert "ads" in web.ask("/jobs/ads", cookies=cookies).text
    [server] = children(run.pid)
    mine = os.getpriority(os.PRIO_PROCESS, run.pid)
    assert os.getpriority(os.PRIO_PROCESS, server) == min(19, mine + 10)
    with web.live(Cookie="; ".join(f"{name}={value}" for name, value in cookies.items())) as live:
        known = news(live)["full"]["jobs"]["ads"]
        assert (known["done"], known["status"]) == (0, "processing")
        (place / "free").touch()
        with suppress(ConnectionClosed):
            while True:
                known = news(live)["delta"].get("jobs", {}).get("ads", known)
    assert (known["done"], known["status"]) == (6, "completed")
    assert run.wait(60) == 0
    assert not Path(f"/proc/{server}").exists()


def test_a_server_that_dies_ends_no_run_and_is_spoken_of_at_its_end(spawn_cli: Spawn, place: Path):
    run, web, _ = started(spawn_cli)
    assert web.ask("/healthz").status == 200
    [server] = children(run.pid)
    os.kill(server, signal.SIGKILL)
    # It is dead once it is a zombie of the run; at its low priority that may take longer than the rest of the run.
    eventually(lambda: " Z " in Path(f"/proc/{server}/stat").read_text())
    (place / "free").touch()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 0
    assert "The page failed during the run: it ended with -9" in errors
    with Ledger.open(f"sqlite:///{place}/headway.db", create=False) as ledger:
        assert ledger.job("ads").info().done == 6


def test_a_run_that_is_killed_takes_its_page_along(spawn_cli: Spawn, place: Path):
    run, web, _ = started(spawn_cli)
    assert web.ask("/healthz").status == 200
    [server] = children(run.pid)
    run.kill()
    (place / "free").touch()
    eventually(lambda: not Path(f"/proc/{server}").exists(), timeout=60)
