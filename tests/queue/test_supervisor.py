"""The supervisor: as many workers as there is work for, crashed ones replaced, all of them ended in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.core.lifecycle import Shutdown
from headway.errors import InvalidInput
from headway.queue.store import workers
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.app import load
from headway.queue.worker.supervisor import Plan, Supervisor
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
    monkeypatch.setattr("headway.queue.worker.supervisor.SHRINK_SECONDS", 0.2)
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
        "from headway.core.lifecycle import *; from headway.queue.worker.supervisor import *\n"
        "from headway.queue.worker.app import load\n"
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
        "from headway.core.lifecycle import *; from headway.queue.worker.supervisor import *\n"
        "from headway.queue.worker.app import load\n"
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


def turn_clock(queue: TaskQueue, seconds: float) -> None:
    """As if the database's clock had been set: what was written by it is so much nearer or further."""
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE leases SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE task_workers SET seen_at = seen_at - ?", (seconds,)))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskQueue]:
    """The queue of an application that workers can import as ``shop``."""
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, root / "src", root))))
    url = f"sqlite:///{tmp_path}/queue.db"
    Path("shop.py").write_text(f"from tests.queue.app import build\nqueue = build({url!r})\n")
    with app.build(url) as made:
        yield made


@pytest.mark.req("S2-15")
@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_a_shutdown_that_tells_every_process_at_once_lets_tasks_finish_too(shop: TaskQueue, isolation: str):
    task = shop.submit(f"log.{isolation}", {"file": "ran", "seconds": 1.5})
    command = [sys.executable, "-m", "headway", "worker", "--app", "shop:queue", "--drain", "30"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as supervisor:
        eventually(Path("ran").exists, 60)
        for pid in reversed(family(supervisor.pid)):  # as systemd does by default, and an init of a container
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: has_taken_signals(pid))  # noqa: B023 - looked at before the next
        assert supervisor.wait(60) == 0
    assert (shop.get(task.id).status, shop.get(task.id).attempts) == ("COMPLETED", 0)


def has_taken_signals(pid: int) -> bool:
    """Whether none is on its way to the process: two of the same would be one."""
    try:
        return "ShdPnd:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def test_a_worker_that_says_nothing_any_more_is_killed_and_replaced(shop: TaskQueue):
    queue, ahead, shutdown = shop, 0.0, Shutdown()
    plan = Plan("shop:queue", drain=1.0)
    supervisor = Supervisor(queue, plan, shutdown=shutdown, clock=lambda: time.monotonic() + ahead)
    supervisor.tick()
    [name] = supervisor.workers
    [[pid]] = eventually(lambda: queue.database.all("SELECT pid FROM task_workers"), 60)
    # As a handler in its process may do, or one that lets no other thread run. Within a transaction of ours: stopped within
    # one of its own, it would lock everybody out of the file.
    queue.database.run(lambda _: os.kill(pid, signal.SIGSTOP))
    turn_clock(queue, workers.WORKER_SECONDS + 5)
    queue.database.run(workers.mark_lost)
    supervisor.tick()
    assert supervisor.workers == [name]  # the store may have been away
    ahead = 30.0
    supervisor.tick()
    eventually(lambda: supervisor.tick() and name not in supervisor.workers)
    ahead = 60.0
    supervisor.tick()
    assert len(supervisor.workers) == 1
    shutdown.request()
    shutdown.request()
    supervisor.run()


def test_a_supervisor_counts_no_more_waiting_tasks_than_it_may_have_workers(crowd: TaskQueue):
    """It looks twice a second, whether ten wait or a million."""
    crowd.submit_many({"kind": "caption"} for _ in range(10))
    supervisor = Supervisor(crowd, Plan("none:none", workers=1, most=4), shutdown=Shutdown())
    assert supervisor.waiting() == 4
    crowd.pause("normal", reason="upgrade", by="anna")
    assert supervisor.waiting() == 0
