"""The application of examples/captions under a real Gunicorn: reload, shutdown, a supervisor that dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.errors import InvalidInput
from headway.queue.gunicorn import Guard, hooks
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "captions"


TASKS = 200


class Site:
    """A Gunicorn with the application, and an HTTP client for it.

    It has one web worker and one task worker unless the test asks for more: each process imports the application,
    which costs about a second of CPU time at every start and reload.
    """

    def __init__(
        self, directory: Path, database: str, redis_url: str, *, drain: float = 20.0, web: int = 1, tasks: int = 1
    ) -> None:
        shutil.copytree(EXAMPLE, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        self.shop, self.config = directory / "shop.py", directory / "gunicorn.conf.py"
        config = _replaced(self.config.read_text(), "drain=20.0", f"drain={drain}")
        self.config.write_text(
            _replaced(config, "workers=2, max_workers=4", f"workers={tasks}, max_workers={2 * tasks}")
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = directory / "gunicorn.log"
        environment = {
            **os.environ, "HEADWAY_DATABASE": database, "HEADWAY_REDIS": redis_url, "PYTHONUNBUFFERED": "1",
            "HEADWAY_TEST_SITE": str(self.port), "PYTHONDONTWRITEBYTECODE": "1", "DATABASE_URL": database,
            "FLASK_SECRET_KEY": "a secret that every process has",
        }  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "flask", "--app", "shop:create_app", "init-db"],
            cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gunicorn",
                    "shop:create_app()",
                    "--workers",
                    str(web),
                    "--bind",
                    f"127.0.0.1:{self.port}",
                ],
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

    def submit(self, user: str, seconds: float) -> str:
        """Submit a caption of five words that takes ``seconds``, and return its id."""
        status, task = self.ask("POST", "/captions", {"picture": "p", "seconds": seconds / 5}, user=user)
        assert status == 202, task
        return str(task["id"])

    def write_version(self, version: int) -> None:
        """Change the handler's code: from now on it returns its version."""
        text = (EXAMPLE / "shop.py").read_text()
        self.shop.write_text(_replaced(text, 'return store(task, f"', f'return store(task, f"v{version} '))

    def processes(self) -> dict[int, str]:
        """Return the supervisors and task workers that were started by this Gunicorn: pid -> command line."""
        mark = f"HEADWAY_TEST_SITE={self.port}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = _command(int(entry.name))
        return {
            pid: command
            for pid, command in found.items()
            if "headway worker" in command or "headway.run.fleet.slot" in command
        }

    def supervisors(self) -> set[int]:
        return {pid for pid, command in self.processes().items() if "headway worker" in command}


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


Sites = Callable[..., Site]


@pytest.fixture
def sites(tmp_path: Path, postgres_url: str, redis_server: RedisServer) -> Iterator[Sites]:
    made: list[Site] = []

    def start(**options: Any) -> Site:
        made.append(Site(tmp_path, postgres_url, f"redis://127.0.0.1:{redis_server.port}/0", **options))
        eventually(made[0].is_up, 120)
        return made[0]

    yield start
    for site in made:
        if site.process.poll() is None:
            site.process.terminate()
            try:
                site.process.wait(60)
            except subprocess.TimeoutExpired:
                site.process.kill()
                site.process.wait()


@pytest.fixture
def site(sites: Sites) -> Site:
    return sites()


@pytest.fixture
def queue(postgres_url: str) -> Iterator[TaskQueue]:
    with TaskQueue(postgres_url) as made:
        yield made


def caption(queue: TaskQueue, id: str) -> str:
    """Wait until the task has ended and return its result."""
    eventually(lambda: queue.get(id).is_final, 60)
    task = queue.get(id)
    assert (task.status, task.attempts) == (Status.COMPLETED, 0), task
    return str(queue.result(id)["caption"])


def is_running(queue: TaskQueue, id: str) -> bool:
    return queue.get(id).status is Status.RUNNING


def worker_pids(queue: TaskQueue) -> set[int]:
    return {pid for (pid,) in queue.database.all("SELECT pid FROM task_workers WHERE ended_at IS NULL")}


def over(site: Site, id: str, **who: str) -> Any:
    _, task = site.ask("GET", f"/captions/{id}", **who)
    return task if task["status"] in ("COMPLETED", "FAILED", "CANCELLED") else None


@pytest.mark.req("S2-08", "S2-09", "S2-12", "S2-13", "S2-17", "S2-20", "S2-23", "S2-41", "S2-52")
def test_users_submit_look_and_cancel_and_administrators_go_first(sites: Sites):
    site = sites(web=4, tasks=2)
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


@pytest.mark.req("S2-14")
def test_a_reload_lets_running_tasks_finish_and_runs_the_next_ones_with_the_new_code(site: Site, queue: TaskQueue):
    reload_with_a_running_task(site, queue, "p: ", version=1)
    reload_with_a_running_task(site, queue, "v1 p: ", version=2)  # it meets what the first reload left


def reload_with_a_running_task(site: Site, queue: TaskQueue, old: str, *, version: int) -> None:
    before = eventually(lambda: worker_pids(queue), 60)
    running = site.submit("anna", seconds=5)
    eventually(lambda: is_running(queue, running), 60)
    site.write_version(version)
    site.process.send_signal(signal.SIGHUP)
    eventually(lambda: worker_pids(queue) and not worker_pids(queue) & before, 60)
    assert caption(queue, running).startswith(old), "the old worker finished it"
    eventually(lambda: len(site.supervisors()) == 1, 60)
    next_one = eventually(lambda: _accepted(site, f"bert{version}"), 60)
    assert caption(queue, next_one).startswith(f"v{version} p: ")


@pytest.mark.req("S2-14")
def test_a_reload_does_not_keep_new_tasks_waiting_for_the_old_workers(sites: Sites, queue: TaskQueue):
    site = sites(drain=55.0)
    running = site.submit("anna", seconds=55)
    eventually(lambda: is_running(queue, running), 60)
    site.process.send_signal(signal.SIGHUP)
    next_one = eventually(lambda: _accepted(site, "bert"), 60)
    caption(queue, next_one)
    assert is_running(queue, running)
    queue.cancel(running, by="anna")
    eventually(lambda: queue.get(running).is_final, 60)


@pytest.mark.req("S2-13", "S2-14", "S2-16")
def test_every_task_runs_once_across_reloads_in_quick_succession(sites: Sites, queue: TaskQueue):
    site = sites(web=4, tasks=2)

    def submit(n: int) -> None:
        def is_accepted() -> bool:
            try:
                status, _task = site.ask("POST", "/captions", {"picture": f"p{n}", "seconds": 0.001}, user=f"u{n}")
            except OSError:
                return False  # the reload closed this connection
            assert status in (202, 409)  # 409: accepted before, but the reload cut off the answer
            return status == 202

        eventually(is_accepted, 100)

    with ThreadPoolExecutor(8) as callers:
        futures = [callers.submit(submit, n) for n in range(TASKS)]
        for count, future in enumerate(as_completed(futures)):
            future.result()
            if count in (TASKS // 5, TASKS // 4, TASKS // 3):
                site.process.send_signal(signal.SIGHUP)
    eventually(lambda: not queue.list(status=Status.QUEUED) and not queue.list(status=Status.RUNNING), 100)
    rows = queue.database.all("SELECT user_id, status, attempts FROM tasks")
    assert {(status, attempts) for _, status, attempts in rows} == {("COMPLETED", 0)}
    assert {user for user, _, _ in rows} == {f"u{n}" for n in range(TASKS)}
    runs = queue.database.all("SELECT job, count(*) FROM outbox WHERE type = 'task.completed' GROUP BY job")
    assert all(count == 1 for _, count in runs)
    eventually(lambda: len(site.supervisors()) == 1, 60)


@pytest.mark.req("S2-15")
@pytest.mark.parametrize(
    ("number", "reloaded"),
    [(signal.SIGTERM, True), (signal.SIGINT, False), (signal.SIGQUIT, False)],
    ids=["TERM after HUP", "INT", "QUIT"],
)
def test_gunicorn_exits_after_running_tasks_have_finished(
    site: Site, queue: TaskQueue, number: signal.Signals, reloaded: bool
):
    eventually(lambda: worker_pids(queue), 60)
    if reloaded:
        before = worker_pids(queue)
        site.process.send_signal(signal.SIGHUP)
        eventually(lambda: worker_pids(queue) and not worker_pids(queue) & before, 60)
    running = eventually(lambda: _accepted(site, "anna", seconds=5), 60)
    eventually(lambda: is_running(queue, running), 60)
    site.process.send_signal(number)
    site.process.wait(60)
    task = queue.get(running)
    assert (task.status, task.attempts) == (Status.COMPLETED, 0)
    assert site.processes() == {}


@pytest.mark.req("S2-15")
def test_a_task_that_runs_longer_than_the_drain_returns_to_its_queue_uncharged(sites: Sites, queue: TaskQueue):
    site = sites(drain=0.5)
    running = site.submit("anna", seconds=50)
    eventually(lambda: is_running(queue, running), 60)
    site.process.terminate()
    site.process.wait(60)
    task = queue.get(running)
    assert (task.status, task.attempts) == (Status.QUEUED, 0)
    assert site.processes() == {}


@pytest.mark.req("S2-15")
def test_a_signal_to_every_process_at_once_lets_running_tasks_finish(site: Site, queue: TaskQueue):
    running = site.submit("anna", seconds=5)
    eventually(lambda: is_running(queue, running), 60)
    for pid in site.processes():  # as systemd does with KillMode=control-group
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    site.process.terminate()
    site.process.wait(60)
    task = queue.get(running)
    assert (task.status, task.attempts) == (Status.COMPLETED, 0)
    assert site.processes() == {}


@pytest.mark.req("S2-15")
def test_gunicorn_that_exits_at_a_reload_of_an_invalid_file_lets_running_tasks_finish(site: Site, queue: TaskQueue):
    running = site.submit("anna", seconds=5)
    eventually(lambda: is_running(queue, running), 60)
    site.config.write_text("workers = (")
    site.process.send_signal(signal.SIGHUP)
    assert site.process.wait(60) != 0
    assert queue.get(running).status is Status.COMPLETED
    assert site.processes() == {}


@pytest.mark.req("S2-05", "S2-16")
@pytest.mark.parametrize("reloaded", [False, True])
def test_a_supervisor_that_dies_is_replaced_by_one(site: Site, reloaded: bool):
    [first] = eventually(site.supervisors, 60)
    if reloaded:
        site.process.send_signal(signal.SIGHUP)
        eventually(lambda: len(site.supervisors()) == 1 and first not in site.supervisors(), 60)
    [killed] = site.supervisors()
    os.kill(killed, signal.SIGKILL)
    [next_one] = eventually(lambda: site.supervisors() - {killed}, 60)
    assert site.supervisors() == {next_one}


def test_a_drain_that_is_not_a_number_of_seconds_is_refused():
    with pytest.raises(InvalidInput, match="drain must be 0 to 86,400 seconds"):
        hooks("shop:headway", drain=-1)


def _accepted(site: Site, user: str, seconds: float = 0.01) -> str | None:
    """Submit unless a reload closes the connection."""
    try:
        return site.submit(user, seconds)
    except OSError:
        return None


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def test_the_supervisor_beside_gunicorn_does_not_keep_its_port(tmp_path: Path):
    seen = tmp_path / "seen"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.set_inheritable(True)  # as Gunicorn's are: it hands them down to its successor
        mine = os.readlink(f"/proc/self/fd/{listening.fileno()}")
        guard = Guard()
        command = ["/bin/sh", "-c", f"ls -l /proc/self/fd > {seen}.new; mv {seen}.new {seen}; sleep 60"]
        guard.deploy(command, drain=0.0)
        eventually(seen.exists)
        guard.stop()
    assert mine not in seen.read_text()
