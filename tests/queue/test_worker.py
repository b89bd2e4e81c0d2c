"""Workers: every kind of handler costs only itself, and whatever is killed, nothing is lost or recorded twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headway.core.lifecycle import Shutdown
from headway.queue import TaskCancelled, TaskTimeout
from headway.queue.handlers import Isolation
from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.task import Status, Task
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.nursery import Forked
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

ISOLATIONS = ("fork", "none")


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


def drain(queue: TaskQueue, **settings) -> None:
    """Work off all that waits, in this process."""
    Worker(queue, settings=Settings(**settings)).run(burst=True)


def drained(queue: TaskQueue, id: str) -> Task | None:
    drain(queue)
    return ended(queue, id)


def ended(queue: TaskQueue, id: str) -> Task | None:
    task = queue.get(id)
    return task if task.is_final else None


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_handler_gets_its_task_and_payload_and_its_result_is_kept(queue: TaskQueue, isolation: str):
    task = queue.submit(f"echo.{isolation}", {"n": [1, "ü"]})
    drain(queue)
    assert queue.get(task.id).status is Status.COMPLETED
    [[result]] = queue.database.all("SELECT result FROM tasks")
    assert result == '{"n":[1,"ü"]}'


@pytest.mark.req("S2-34", "S2-62")
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ("give-up", "GiveUp: never"),
        ("exit", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("generator-exit", "GeneratorExit"),
        ("foreign", "Foreign: foreign"),
        ("hostile", "Hostile"),
        ("result", "ResultRefused: the handler returned set, which is not JSON"),
        ("nan", "ResultRefused"),
        ("large", "ResultRefused: the handler returned 300,002 bytes"),
        ("password=canary", "ValueError: password="),
    ],
)
def test_whatever_a_handler_raises_costs_its_own_task_only(queue: TaskQueue, isolation: str, payload: str, error: str):
    odd = queue.submit(f"raise.{isolation}", payload)
    fine = queue.submit(f"echo.{isolation}", 1)
    drain(queue)
    failed = queue.get(odd.id)
    assert failed.status is Status.FAILED
    assert (failed.error or "").startswith(error)
    assert "canary" not in (failed.error or "")
    stored = queue.database.all(
        "SELECT a.error FROM task_attempts a JOIN tasks t ON t.no = a.task WHERE t.id = ?", (odd.id,)
    )
    assert stored[-1] == (failed.error,), "each run keeps its own error"
    assert queue.get(fine.id).status is Status.COMPLETED


@pytest.mark.parametrize(
    ("kind", "payload", "error"),
    [
        ("exit.fork", 7, "exited with status 7"),
        ("exit.fork", 0, "exited with status 0"),
        ("kill.fork", None, "was killed by SIGKILL"),
        ("close.fork", None, "without a result"),
    ],
)
def test_a_process_that_ends_without_a_word_is_charged_with_what_happened(
    queue: TaskQueue, kind: str, payload: object, error: str
):
    task = queue.submit(kind, payload)
    fine = queue.submit("echo.fork", 1)
    drain(queue)
    assert error in (queue.get(task.id).error or "")
    assert queue.get(fine.id).status is Status.COMPLETED


def test_a_process_left_behind_by_a_handler_holds_up_nothing_and_is_ended(queue: TaskQueue):
    task = queue.submit("orphan.fork")
    drain(queue)
    assert queue.get(task.id).status is Status.COMPLETED
    left = queue.result(task.id)
    eventually(lambda: not _lives(left))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.req("S2-48")
def test_a_task_that_uses_too_much_memory_is_ended_with_its_cause(queue: TaskQueue):
    task = queue.submit("hog.fork")
    drain(queue, memory_limit=200 * 2**20)
    failed = queue.get(task.id)
    assert (failed.status, failed.error) == (
        Status.FAILED,
        "MemoryLimit: the task's process used more than 200 MB",
    )
    [[outcome]] = queue.database.all("SELECT outcome FROM task_attempts")
    assert outcome == "memory"


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_task_that_takes_too_long_is_ended(queue: TaskQueue, isolation: str):
    task = queue.submit(f"quick.{isolation}", 600)
    fine = queue.submit(f"echo.{isolation}", 1)
    drain(queue)
    failed = queue.get(task.id)
    assert (failed.status, failed.error) == (Status.FAILED, "TimedOut: no result within 1 s")
    assert queue.get(fine.id).status is Status.COMPLETED


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_timeout_is_raised_in_the_handler_whose_finally_blocks_run(
    queue: TaskQueue, isolation: Isolation, tmp_path: Path
):
    def handle(task, payload) -> None:
        try:
            time.sleep(60)
        except TaskTimeout as error:
            (tmp_path / "raised").write_text(str(error))
            raise
        finally:
            time.sleep(1.2)  # longer than the worker takes to look again
            (tmp_path / "cleaned up").touch()

    queue.handler("cleanup", timeout=1, retries=0, isolation=isolation)(handle)
    task = queue.submit("cleanup")
    drain(queue)
    assert queue.get(task.id).error == "TimedOut: no result within 1 s"
    assert (tmp_path / "raised").read_text() == "no result within 1 s"
    assert (tmp_path / "cleaned up").exists()
    assert queue.database.all("SELECT outcome FROM task_attempts") == [("timeout",)]


def test_a_timeout_is_recorded_whatever_the_handler_raises_then(queue: TaskQueue):
    @queue.handler("cleanup", timeout=0.2, retries=0)
    def handle(task, payload) -> None:
        try:
            time.sleep(60)
        finally:
            raise ValueError("while cleaning up")

    task = queue.submit("cleanup")
    drain(queue)
    assert queue.get(task.id).error == "TimedOut: no result within 0.2 s"


@pytest.mark.parametrize("kind", ["deaf.fork", "stubborn"])
def test_a_process_that_goes_on_after_its_timeout_is_killed_after_the_grace(queue: TaskQueue, kind: str):
    @queue.handler("stubborn", timeout=0.2, retries=0)
    def stubborn(task, payload) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(BaseException):
                time.sleep(60)

    task = queue.submit(kind)
    fine = queue.submit("echo.fork", 1)
    drain(queue, cancel_grace=0.5)
    assert (queue.get(task.id).error or "").startswith("TimedOut: ")
    assert queue.get(fine.id).status is Status.COMPLETED


def test_a_cancelled_handler_in_a_process_of_its_own_that_goes_on_gets_task_cancelled(queue: TaskQueue, tmp_path: Path):
    @queue.handler("stubborn", retries=0)
    def goes_on(task, payload) -> None:
        (tmp_path / "began").touch()
        try:
            time.sleep(60)
        except TaskCancelled:
            (tmp_path / "raised").touch()
            raise

    task = queue.submit("stubborn")
    with ThreadPoolExecutor(1) as beside:
        cancelled = beside.submit(
            lambda: eventually((tmp_path / "began").exists, 30) and queue.cancel(task.id, by="anna")
        )
        drain(queue, cancel_grace=0.5)
        cancelled.result()
    assert (tmp_path / "raised").exists()
    assert queue.get(task.id).status is Status.CANCELLED


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_progress_that_rounding_errors_put_beyond_its_bounds_is_accepted(queue: TaskQueue, isolation: Isolation):
    @queue.handler("sum", retries=0, isolation=isolation)
    def sum_up(task, payload) -> None:
        task.progress(100.00000000000006, "done")
        task.progress(-1e-12)
        with pytest.raises(ValueError, match=r"progress must be 0 to 100 \(got 100.1\)"):
            task.progress(100.1)
        with pytest.raises(ValueError, match="progress must be"):
            task.progress(float("nan"))

    task = queue.submit("sum")
    drain(queue)
    assert queue.get(task.id).status is Status.COMPLETED


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_children_of_a_handler_have_default_signal_handling(
    queue: TaskQueue, isolation: str, spawn: Callable[..., Forked]
):
    spawn("w1")
    task = queue.submit(f"children.{isolation}", 100)
    assert eventually(lambda: ended(queue, task.id), 60).status is Status.COMPLETED
    # Python forgets a signal that its own handler receives while a forked child starts.
    assert queue.result(task.id) == {"-15": 100}


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_handler_may_use_a_pool_of_processes_and_a_program(
    queue: TaskQueue, isolation: str, spawn: Callable[..., Forked]
):
    spawn("w1")
    task = queue.submit(f"pools.{isolation}", 10)
    assert eventually(lambda: ended(queue, task.id), 60).status is Status.COMPLETED
    assert queue.result(task.id) == [[0, 1, 4], "-15"]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_cancelled_task_is_told_and_one_that_goes_on_is_ended(
    queue: TaskQueue, isolation: str, tmp_path: Path, spawn: Callable[..., Forked]
):
    spawn("w1")
    polite = queue.submit(f"patient.{isolation}", str(tmp_path / "began"))
    eventually((tmp_path / "began").exists)
    queue.cancel(polite.id, by="anna")
    returned = eventually(lambda: ended(queue, polite.id), 30)
    assert (returned.status, returned.percent) == (Status.CANCELLED, 0.0), "it returned early"
    deaf = queue.submit(f"sleep.{isolation}", 50)
    eventually(lambda: queue.get(deaf.id).status is Status.RUNNING)
    queue.cancel(deaf.id, by="anna")
    assert eventually(lambda: ended(queue, deaf.id), 30).status is Status.CANCELLED
    fine = queue.submit(f"echo.{isolation}", 1)
    assert eventually(lambda: ended(queue, fine.id), 30).status is Status.COMPLETED


@pytest.mark.req("S2-25")
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_progress_is_written_down_while_it_runs(queue: TaskQueue, isolation: str, spawn: Callable[..., Forked]):
    spawn("w1")
    task = queue.submit(f"progress.{isolation}", 0.15)
    seen = eventually(lambda: found if 0 < (found := queue.get(task.id)).percent < 100 else None, 30)
    assert seen.message == f"step {seen.percent:.0f}"
    done = eventually(lambda: ended(queue, task.id), 30)
    assert (done.status, done.percent) == (Status.COMPLETED, 100)


@pytest.mark.req("S2-15")
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_shutdown_finishes_what_runs_and_gives_back_what_takes_longer_than_it_may(
    queue: TaskQueue, isolation: str, spawn: Callable[..., Forked], tmp_path: Path
):
    begun = tmp_path / "begun"
    short = queue.submit(f"log.{isolation}", {"file": str(begun), "seconds": 0.4})
    worker = spawn("w1", 20.0)
    eventually(begun.exists)  # not only claimed: what has not begun is given back
    worker.terminate()
    assert worker.wait(30) == 0
    assert queue.get(short.id).status is Status.COMPLETED
    long = queue.submit(f"sleep.{isolation}", 55)
    worker = spawn("w2", 0.2)
    eventually(lambda: queue.get(long.id).status is Status.RUNNING)
    worker.terminate()
    assert worker.wait(30) == 0
    task = queue.get(long.id)
    assert (task.status, task.attempts) == (Status.QUEUED, 0)


def test_a_handler_that_nothing_reaches_costs_its_worker_and_is_charged(queue: TaskQueue, spawn: Callable[..., Forked]):
    task = queue.submit("deaf.none")
    worker = spawn("w1")
    assert worker.wait(60) == -signal.SIGKILL
    sweeper = Sweeper(queue)
    eventually(lambda: sweeper.tick() >= 0 and queue.get(task.id).status is Status.FAILED)


@pytest.mark.req("S2-31")
def test_the_process_of_a_task_ends_with_its_worker(queue: TaskQueue, spawn: Callable[..., Forked], tmp_path: Path):
    task = queue.submit("patient.fork", str(tmp_path / "pid"))
    worker = spawn("w1")
    pid = int(eventually(lambda: (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""))
    worker.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert queue.get(task.id).status is Status.RUNNING, "until the sweeper looks"


def test_a_worker_that_is_stopped_past_its_lease_records_nothing(queue: TaskQueue, spawn: Callable[..., Forked]):
    task = queue.submit("sleep.fork", 0.5)
    worker = spawn("paused")
    eventually(lambda: queue.get(task.id).status is Status.RUNNING)
    worker.send_signal(signal.SIGSTOP)
    sweeper = Sweeper(queue)
    queue.database.run(  # its lease ends now instead of in some seconds
        lambda tx: tx.execute("UPDATE tasks SET lease_until = 0, holder = replace(holder, '\"until\":', '\"until\":-')")
    )
    eventually(lambda: [sweeper.tick(), queue.get(task.id).status is Status.QUEUED][1])
    finished = eventually(lambda: drained(queue, task.id))
    worker.send_signal(signal.SIGCONT)
    other = queue.submit("echo.fork", 1)
    eventually(lambda: ended(queue, other.id), 30)
    assert queue.get(task.id) == finished, "the late result changed nothing"


def test_one_of_two_sweepers_is_active(queue: TaskQueue):
    first, second = Sweeper(queue), Sweeper(queue)
    first.tick()
    second.tick()
    holder = queue.database.one("SELECT token FROM leases WHERE name = 'queue.sweeper'")
    first.release()
    second.tick()
    after = queue.database.one("SELECT token FROM leases WHERE name = 'queue.sweeper'")
    assert holder is not None
    assert after is not None
    assert (holder[0], after[0]) == (1, 2)


@pytest.mark.req("S2-60")
def test_what_ended_longer_ago_than_it_is_kept_is_deleted(queue: TaskQueue):
    old = queue.submit("echo.none", 1)
    drain(queue)
    waiting = queue.submit("echo.none", 2)
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET ended_at = ended_at - 1000"))
    assert Sweeper(queue, retention=999).purge() == 1
    assert [task.id for task in queue.list()] == [waiting.id]
    assert old.id != waiting.id


def test_counts_and_causes_of_tasks_that_are_gone_are_deleted_and_those_of_today_are_not(queue: TaskQueue):
    def there() -> tuple[int, int]:
        [[minutes]] = queue.database.all("SELECT count(*) FROM task_minutes")
        [[causes]] = queue.database.all("SELECT count(*) FROM task_causes")
        return minutes, causes

    queue.submit("raise.none", "value")
    drain(queue)
    before = there()
    assert min(before) > 0
    Sweeper(queue, retention=1).purge()
    assert there() == before
    queue.database.run(lambda tx: tx.execute("UPDATE task_minutes SET minute = minute - 1441"))
    queue.database.run(lambda tx: tx.execute("UPDATE task_causes SET last_seen = last_seen - 86500"))
    Sweeper(queue, retention=1).purge()
    assert there() == (0, 0)


COUNTS_THREADS = """
import json, os, sys, time
from headway.queue import TaskQueue
from headway.queue.worker.worker import Worker

worker = os.getpid()

def look():
    time.sleep(0.005)
    return len(os.listdir(f"/proc/{worker}/task"))

def threads():
    return min(look() for _ in range(40))  # one that was joined is listed until the system has ended it too

with TaskQueue(sys.argv[1], per_user=None) as queue:
    inside = []
    queue.handler("here", isolation="none")(lambda task, payload: inside.append(threads()))
    queue.handler("forked")(lambda task, payload: threads())
    tasks = queue.submit_many({"kind": kind} for kind in ("here", "forked", "here", "forked"))
    alone = threads()
    Worker(queue).run(burst=True)
    forked = [json.loads(result) for (result,) in queue.database.all("SELECT result FROM tasks WHERE kind = 'forked'")]
    statuses = [queue.get(task.id).status.value for task in tasks]
    print(json.dumps({"alone": alone, "inside": inside, "forked": forked, "after": threads(), "statuses": statuses}))
"""


def test_a_worker_that_ran_a_task_in_its_own_process_has_one_thread_when_it_forks(database_url: str):
    """A child of a process with threads may inherit a lock that nobody releases. In a process of its own: here threads
    of other tests come and go."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTS_THREADS, database_url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["statuses"] == ["COMPLETED"] * 4
    assert counted["alone"] == 1
    assert counted["inside"] == [2, 2]
    assert counted["forked"] == [1, 1]
    assert counted["after"] == 1


def test_a_worker_that_rests_outlives_a_database_that_is_away(
    redis_server: RedisServer, postgres_with_tables: str, tcp_proxy: Callable[[int], TcpProxy],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    port = urlsplit(postgres_with_tables).port
    assert port is not None
    proxy, ticks, shutdown = tcp_proxy(port), count(step=10.0), Shutdown()
    with TaskQueue(postgres_with_tables.replace(f":{port}", f":{proxy.port}"), redis_server.url()) as queue:
        queue.handler("caption")(lambda task, payload: payload)

        class CutWhenItRests(RqSource):
            def wait(self, seconds: float, stop: threading.Event) -> None:
                if not said():
                    proxy.refuse()
                    proxy.cut()
                super().wait(seconds, stop)

        def said() -> bool:
            return any("the database cannot be used" in record.message for record in caplog.records)

        source = CutWhenItRests(queue, redis_server.url(), name="w", clock=lambda: float(next(ticks)))
        queue.database.patience = 0.0
        worker = Worker(queue, source=source, shutdown=shutdown, settings=Settings(rest=0.05))
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(worker.run)
            eventually(said)
            proxy.pass_through()
            eventually(lambda: worker.name in dict(queue.database.all("SELECT name, pid FROM task_workers")))
            assert not running.done()
            shutdown.stop.set()
            running.result(60)
