"""`headway demo`: one command, something true and lively to see, and nothing left of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from headway import local_servers
from tests.services.waiting import eventually
from tests.web.conftest import Web

Spawn = Callable[..., "subprocess.Popen[str]"]


def begun_with(variable: str) -> list[str]:
    """The commands of all processes that inherited this variable."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_everything_moves_is_seen_over_http_and_is_gone_afterwards(spawn_cli: Spawn, tmp_path: Path):
    mark = f"OF_THIS_TEST={tmp_path}"
    demo = spawn_cli("demo", env={"TMPDIR": str(tmp_path), "OF_THIS_TEST": str(tmp_path)}, stderr=subprocess.DEVNULL)
    assert demo.stdout is not None
    web = Web(demo.stdout.readline().strip(), demo)
    host, _, port = web.host.rpartition(":")
    server = local_servers.find(host, int(port))
    assert server is not None
    ask = partial(web.ask, token=server.token)
    assert web.ask("/api/v1/jobs").status == 401
    job = "/api/v1/jobs/reindex-invoices-1"

    def resumed_after_a_kill() -> bool:
        runs = ask(f"{job}/runs").json.get("runs", [])
        return len(runs) == 2 and runs[0]["outcome"] == "lost" and runs[1]["kept"] >= 60

    eventually(resumed_after_a_kill, timeout=120)
    done = ask(job).json["job"]["done"]
    eventually(lambda: ask(job).json["job"]["done"] > done, timeout=60)

    def tasks_are_done() -> bool:
        done = [int(queue["completed"]) for queue in ask("/api/v1/queues").json["queues"]]
        return sum(done) >= 2

    eventually(tasks_are_done, timeout=60)
    assert len({task["user_id"] for task in ask("/api/v1/tasks").json["tasks"]}) > 1
    assert ask("/api/v1/states/nightly").json["states"]
    [project] = ask("/api/v1/projects").json["projects"]
    assert (project["project_id"], project["total"]) == ("crawl-1", 2000)
    for path in ("/", "/jobs/reindex-invoices-1", "/queues", "/workers", "/states/nightly"):
        assert ask(path).status == 200, path
    eventually(lambda: "docjobs.py" in ask("/dead").text, timeout=60)
    shown = ask("/dead").text
    assert "in fetch" in shown
    assert "raise UpstreamTimeout(" in shown
    assert "No frame of your own code" not in shown
    assert len(begun_with(mark)) > 5
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 0
    eventually(lambda: not begun_with(mark), timeout=10)
    assert not list(tmp_path.glob("headway-demo-*"))


@pytest.mark.parametrize("port", ["used", "free"])
def test_it_ends_by_itself_and_a_port_in_use_is_said(
    headway_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, port: str, opened: Web
):
    number = opened.host.split(":")[1] if port == "used" else "0"
    answer = headway_cli("demo", "--seconds", "0.2", "--port", number, env={"TMPDIR": str(tmp_path)})
    if port == "used":
        assert answer.returncode != 0
        assert f"Port {number} of 127.0.0.1 is in use" in answer.stderr
    else:
        assert (answer.returncode, answer.stdout[:17]) == (0, "http://127.0.0.1:")
        assert f"Open the dashboard: {answer.stdout.strip()}/enter?next=/&ticket=hwl_" in answer.stderr
    assert not list(tmp_path.glob("headway-demo-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children that their parent has ended")
def test_killed_it_leaves_no_process_behind(spawn_cli: Spawn, tmp_path: Path):
    mark = f"OF_THIS_TEST={tmp_path}"
    demo = spawn_cli("demo", env={"TMPDIR": str(tmp_path), "OF_THIS_TEST": str(tmp_path)}, stderr=subprocess.DEVNULL)
    assert demo.stdout is not None
    assert demo.stdout.readline().startswith("http://")
    eventually(lambda: len(begun_with(mark)) > 5, timeout=60)
    demo.kill()
    demo.wait(30)
    eventually(lambda: not begun_with(mark), timeout=60)
