"""The application of examples/captions under a real Gunicorn: workers, threads, preload, HUP, TERM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "captions"


TASKS = 200


class Site:
    """A Gunicorn with the application, and who asks it."""

    def __init__(self, directory: Path, database: str, redis_url: str) -> None:
        for name in ("shop.py", "gunicorn.conf.py"):
            shutil.copy(EXAMPLE / name, directory / name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = directory / "gunicorn.log"
        environment = {**os.environ, "HEADWAY_DATABASE": database, "HEADWAY_REDIS": redis_url, "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gunicorn", "shop:app", "--workers", "4", "--bind", f"127.0.0.1:{self.port}"],
                cwd=directory,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def ask(
        self, method: str, path: str, body: Any = None, *, user: str = "anna", role: str = "user"
    ) -> tuple[int, Any]:
        call = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-User": user, "X-Role": role, "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(call, timeout=20) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
                return error.code, json.loads(said) if error.headers.get_content_type() == "application/json" else said

    def is_up(self) -> bool:
        try:
            return self.ask("GET", "/queues")[0] == 200
        except OSError:
            return False


@pytest.fixture
def site(tmp_path: Path, postgres_url: str, redis_server: RedisServer) -> Iterator[Site]:
    site = Site(tmp_path, postgres_url, f"redis://127.0.0.1:{redis_server.port}/0")
    try:
        eventually(site.is_up, 60)
        yield site
    finally:
        if site.process.poll() is None:
            site.process.terminate()
            try:
                site.process.wait(60)
            except subprocess.TimeoutExpired:
                site.process.kill()
                site.process.wait()


def over(site: Site, id: str, **who: str) -> Any:
    _, task = site.ask("GET", f"/captions/{id}", **who)
    return task if task["status"] in ("COMPLETED", "FAILED", "CANCELLED") else None


@pytest.mark.req("S2-08", "S2-09", "S2-12", "S2-13", "S2-17", "S2-20", "S2-23", "S2-41", "S2-52")
def test_users_submit_look_and_cancel_and_administrators_go_first(site: Site):
    began = time.monotonic()
    status, task = site.ask("POST", "/captions", {"picture": "p1", "seconds": 3})
    took = time.monotonic() - began
    assert (status, task["status"], task["queue"]) == (202, "QUEUED", "normal")
    assert took < 10, "15 s of work are not waited for"
    assert site.ask("POST", "/captions", {"picture": "p2"})[0] == 409
    assert site.ask("GET", f"/captions/{task['id']}", user="bert")[0] == 404
    assert site.ask("DELETE", f"/captions/{task['id']}", user="bert")[0] == 404
    eventually(lambda: site.ask("GET", f"/captions/{task['id']}")[1]["percent"] > 0, 60)
    assert site.ask("DELETE", f"/captions/{task['id']}")[0] == 200
    eventually(lambda: over(site, task["id"]), 60)
    status, admins = site.ask("POST", "/captions", {"picture": "p3", "seconds": 0.01}, user="root", role="admin")
    assert (status, admins["queue"]) == (202, "high")
    done = eventually(lambda: over(site, admins["id"], user="root", role="admin"), 60)
    assert (done["status"], done["message"]) == ("COMPLETED", "saw sea"), "it read the application's own settings"
    assert site.ask("POST", "/captions", {"wrong": 1})[0] == 400
    assert site.ask("POST", "/captions", {"picture": "x" * 300_000}, user="cora")[0] == 400


@pytest.mark.req("S2-13", "S2-14", "S2-16")
def test_every_task_runs_once_across_a_hup_of_gunicorn(site: Site, postgres_url: str):
    cut: list[int] = []

    def submit(n: int) -> str:
        for _ in range(40):
            try:
                status, task = site.ask("POST", "/captions", {"picture": f"p{n}", "seconds": 0.001}, user=f"u{n}")
            except OSError:
                continue  # this connection was cut by the reload
            if status == 202:
                return str(task["id"])
            assert status == 409, "accepted before, and the answer was lost"
        raise AssertionError("never accepted")

    with ThreadPoolExecutor(8) as callers:
        futures = [callers.submit(submit, n) for n in range(TASKS)]
        eventually(lambda: sum(future.done() for future in futures) > TASKS // 4, 60)
        site.process.send_signal(signal.SIGHUP)
        ids = [future.result() for future in futures]
    with TaskQueue(postgres_url) as queue:
        eventually(lambda: not queue.list(status=Status.QUEUED) and not queue.list(status=Status.RUNNING), 100)
        rows = queue.database.all("SELECT user_id, status, attempts FROM tasks")
        assert {status for _, status, _ in rows} == {"COMPLETED"}
        again = {user for user, count in Counter(user for user, *_ in rows).items() if count > 1}
        assert again <= {f"u{n}" for n in cut}
        assert len({user for user, _, _ in rows}) == len(set(ids)) == TASKS
        runs = queue.database.all("SELECT job, count(*) FROM outbox WHERE type = 'task.completed' GROUP BY job")
        assert all(count == 1 for _, count in runs)


@pytest.mark.req("S2-05", "S2-15", "S2-16")
def test_there_is_one_supervisor_it_is_replaced_when_it_dies_and_ends_with_gunicorn(site: Site, postgres_url: str):
    def supervisors() -> set[int]:
        return {pid for pid, parent in _children() if parent == site.process.pid and "headway worker" in _command(pid)}

    [first] = eventually(supervisors, 60)
    os.kill(first, signal.SIGKILL)
    [second] = eventually(lambda: supervisors() - {first}, 60)
    with TaskQueue(postgres_url) as queue:
        eventually(lambda: queue.database.all("SELECT 1 FROM task_workers WHERE ended_at IS NULL"), 60)
        site.process.terminate()
        assert site.process.wait(60) == 0
        assert not Path(f"/proc/{second}").exists()
        eventually(
            lambda: not [pid for (pid,) in queue.database.all("SELECT pid FROM task_workers") if _is_ours(pid)], 60
        )


def _is_ours(pid: int) -> bool:
    return "headway.queue.supervisor" in _command(pid)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _children() -> list[tuple[int, int]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                match = re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())
            except OSError:
                continue
            found.append((int(entry.name), int(match[1]) if match else 0))
    return found
