"""The supervisor: as many workers as there is work for, crashed ones replaced, all of them ended in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.errors import InvalidInput
from headway.lifecycle import Shutdown
from headway.queue.app import load
from headway.queue.supervisor import Plan, Supervisor
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status
from tests.queue import app
from tests.queue.test_worker import ended
from tests.services.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an application in it, as a user has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "src"))))
    url = f"sqlite:///{tmp_path}/queue.db"
    Path("shop.py").write_text(f"from tests.queue.app import build\nqueue = build({url!r})\nempty = 7\n")
    return tmp_path


@pytest.fixture
def queue(home: Path) -> Iterator[TaskQueue]:
    with app.build(f"sqlite:///{home}/queue.db") as made:
        yield made


@pytest.fixture
def supervise(queue: TaskQueue) -> Iterator[Callable[..., Supervisor]]:
    made: list[tuple[Supervisor, Shutdown]] = []

    def start(**plan) -> Supervisor:
        shutdown = Shutdown()
        supervisor = Supervisor(queue, Plan("shop:queue", drain=2.0, **plan), shutdown=shutdown)
        made.append((supervisor, shutdown))
        return supervisor

    yield start
    for supervisor, shutdown in made:
        shutdown.request()
        supervisor.run()  # ends what runs


def alive(queue: TaskQueue) -> list[str]:
    rows = queue.database.all("SELECT name FROM task_workers WHERE ended_at IS NULL AND state <> 'lost' ORDER BY name")
    return [name for (name,) in rows]


def pid_of(queue: TaskQueue, name: str) -> int:
    row = queue.database.one("SELECT pid FROM task_workers WHERE name = ?", (name,))
    assert row is not None
    return int(row[0])


def test_workers_are_started_work_and_are_seen(queue: TaskQueue, supervise: Callable[..., Supervisor]):
    supervisor = supervise(workers=2)
    supervisor.tick()
    eventually(lambda: sorted(supervisor.workers) == alive(queue), 30)
    tasks = [queue.submit("echo.fork", n) for n in range(4)]
    eventually(lambda: all(ended(queue, task.id) for task in tasks), 30)


@pytest.mark.req("S2-31")
def test_a_worker_that_is_killed_is_replaced(queue: TaskQueue, supervise: Callable[..., Supervisor]):
    supervisor = supervise(workers=1)
    supervisor.tick()
    [name] = eventually(lambda: alive(queue), 30)
    os.kill(pid_of(queue, name), signal.SIGKILL)
    eventually(lambda: supervisor.tick() and set(supervisor.workers) - {name}, 30)
    eventually(lambda: set(supervisor.workers) <= set(alive(queue)), 30)


def test_workers_that_crash_at_once_are_not_started_again_and_again(
    queue: TaskQueue, supervise: Callable[..., Supervisor]
):
    Path("shop.py").write_text("raise SystemExit(3)")
    supervisor = supervise(workers=1)
    starts: set[str] = set()

    def look() -> bool:
        supervisor.tick()
        starts.update(supervisor.workers)
        return False

    with pytest.raises(AssertionError, match="not within"):
        eventually(look, 3.0)
    assert 2 <= len(starts) <= 5


@pytest.mark.req("S2-16", "S2-49")
def test_workers_are_added_under_load_up_to_the_limit_and_leave_again(
    queue: TaskQueue, supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.queue.supervisor.SHRINK_SECONDS", 0.2)
    supervisor = supervise(workers=1, most=3)
    for n in range(6):
        queue.submit("sleep.fork", 0.5, id=f"t{n}")
    most = 0

    def grown() -> bool:
        nonlocal most
        supervisor.tick()
        most = max(most, len(set(supervisor.workers)))  # each has a name of its own
        return most == 3

    eventually(grown, 60)
    eventually(lambda: supervisor.tick() and all(ended(queue, f"t{n}") for n in range(6)), 60)
    eventually(lambda: supervisor.tick() and len(supervisor.workers) == 1, 60)
    assert most == 3


@pytest.mark.req("S2-15")
def test_a_supervisor_that_is_told_to_end_ends_its_workers_and_loses_nothing(home: Path, queue: TaskQueue):
    program = (
        "from headway.lifecycle import *; from headway.queue.supervisor import *; from headway.queue.app import load\n"
        "shutdown = Shutdown()\n"
        "with on_signals(shutdown), load('shop:queue') as queue:\n"
        "    Supervisor(queue, Plan('shop:queue', workers=2, drain=1.0), shutdown=shutdown).run()\n"
    )
    long = queue.submit("sleep.fork", 50)
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        eventually(lambda: queue.get(long.id).status is Status.RUNNING, 30)
        eventually(lambda: len(alive(queue)) == 2, 30)
        pids = [pid_of(queue, name) for name in alive(queue)]
        process.terminate()
        assert process.wait(30) == 0
    assert (queue.get(long.id).status, queue.get(long.id).attempts) == (Status.QUEUED, 0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_workers_of_a_supervisor_that_was_killed_end_by_themselves(home: Path, queue: TaskQueue):
    program = (
        "from headway.lifecycle import *; from headway.queue.supervisor import *; from headway.queue.app import load\n"
        "Supervisor(load('shop:queue'), Plan('shop:queue', workers=1), shutdown=Shutdown()).run()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        [name] = eventually(lambda: alive(queue), 30)
        pid = pid_of(queue, name)
        process.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), 30)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shop", "does not name a queue"),
        ("nowhere:queue", "cannot be imported: ModuleNotFoundError"),
        ("ending:queue", "cannot be imported: SystemExit"),
        ("shop:nothing", "is not a queue but NoneType"),
        ("shop:empty", "is not a queue but int"),
    ],
)
def test_an_application_that_has_no_queue_is_refused(home: Path, spec: str, message: str):
    (home / "ending.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(InvalidInput, match=message):
        load(spec)
