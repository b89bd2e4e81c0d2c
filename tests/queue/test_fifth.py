"""What the fifth attack on the queue found: each of these once failed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from headway._lease import Lease, Owner, SqlLeases
from headway._sql import Tx
from headway.errors import StaleClaim
from headway.failure import Failure
from headway.lifecycle import Shutdown
from headway.queue import claims, migration, settling, workers
from headway.queue.claims import LEASE, Claimant
from headway.queue.gunicorn import Guard
from headway.queue.rqsource import RqSource
from headway.queue.supervisor import CurrentHints, Plan, Supervisor
from headway.queue.sweeper import SILENCE, Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import PRIORITIES
from headway.queue.watch import Settings
from headway.queue.worker import Worker
from tests.queue import app
from tests.services.redis import RedisServer
from tests.services.server import free_port
from tests.services.waiting import eventually

# ---------------------------------------------------------------------------------------------------------------------
# Handlers in the worker's process, and what they leave of it


@pytest.fixture
def small(tmp_path: Path) -> Iterator[TaskQueue]:
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db", per_user=None) as made:
        yield made


def work_off(queue: TaskQueue) -> None:
    Worker(queue, settings=Settings(rest=0.05)).run(burst=True)


def test_what_a_thread_says_after_its_task_has_ended_is_not_taken_for_the_next_ones_progress(small: TaskQueue):
    begun, said = threading.Event(), threading.Event()

    @small.handler("first", isolation="none")
    def first(task: Any, payload: Any) -> None:
        def late() -> None:
            begun.wait(30)
            task.progress(77, "of the first")
            said.set()

        threading.Thread(target=late).start()

    @small.handler("second", isolation="none")
    def second(task: Any, payload: Any) -> None:
        begun.set()
        assert said.wait(30)
        time.sleep(0.7)  # longer than it takes to be written down

    small.submit("first")
    task = small.submit("second")
    work_off(small)
    assert small.get(task.id).message == ""
    [[versions]] = small.database.all("SELECT version FROM tasks WHERE id = ?", (task.id,))
    assert versions == 3  # submitted, claimed, completed: nothing in between


def _ignore_signals(task: Any, payload: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


def _block_signals(task: Any, payload: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})


def _move_away(task: Any, payload: Any) -> None:
    os.chdir("/")
    os.umask(0o777)


def _set_an_alarm(task: Any, payload: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.5)


@pytest.mark.parametrize("change", [_ignore_signals, _block_signals, _move_away, _set_an_alarm])
def test_a_handler_in_its_workers_process_leaves_that_process_to_the_next_task_as_it_was(
    small: TaskQueue, change: Callable[[Any, Any], None], tmp_path: Path
):
    small.handler("change", isolation="none")(change)

    @small.handler("state", isolation="none")
    def state(task: Any, payload: Any) -> list[str]:
        mask = os.umask(0o22)
        os.umask(mask)
        return [
            os.getcwd(), oct(mask), str(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            str(signal.getitimer(signal.ITIMER_REAL)), *(str(signal.getsignal(n)) for n in (15, 2, 1, signal.SIGCHLD)),
        ]  # fmt: skip

    small.handler("stuck", isolation="none", timeout=0.3, retries=0)(lambda task, payload: time.sleep(20))
    small.handler("apart")(lambda task, payload: "ran")

    def work() -> list[Any]:
        tasks = [small.submit(kind).id for kind in ("state", "change", "state", "stuck", "apart")]
        work_off(small)
        return [small.result(tasks[0]), small.result(tasks[2]), small.get(tasks[3]).error, small.result(tasks[4])]

    before, after, error, ran = in_a_process(work, tmp_path / "said")
    assert after == before
    assert error.startswith("TimedOut")
    assert ran == "ran"


def test_an_application_that_ignores_the_ends_of_children_costs_its_worker_no_task(small: TaskQueue, tmp_path: Path):
    small.handler("apart")(lambda task, payload: "ran")

    def work() -> list[Any]:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as its module does when the worker loads it
        tasks = [small.submit("apart").id for _ in range(2)]
        work_off(small)
        return [small.result(task) for task in tasks]

    assert in_a_process(work, tmp_path / "said") == ["ran", "ran"]


def test_a_worker_whose_directory_was_deleted_runs_tasks_in_its_process(small: TaskQueue, tmp_path: Path):
    small.handler("caption", isolation="none")(lambda task, payload: payload)
    release = tmp_path / "release"
    release.mkdir()

    def work() -> list[Any]:
        os.chdir(release)
        release.rmdir()
        tasks = [small.submit("caption", n).id for n in range(2)]
        work_off(small)
        return [small.result(id) for id in tasks]

    assert in_a_process(work, tmp_path / "said") == [0, 1]


def in_a_process(work: Callable[[], Any], said: Path) -> Any:
    """What ``work`` returns in a process of its own, whose state is nobody else's."""
    pid = os.fork()
    if pid == 0:
        try:
            said.write_text(json.dumps(work()), encoding="utf-8")
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(said.read_text(encoding="utf-8"))


def test_a_process_that_has_no_output_runs_tasks(small: TaskQueue, monkeypatch: pytest.MonkeyPatch):
    small.handler("caption", retries=0)(lambda task, payload: payload)
    task = small.submit("caption", 7)
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it when it is started with that descriptor closed
    work_off(small)
    assert small.result(task.id) == 7


# ---------------------------------------------------------------------------------------------------------------------
# The database's clock


def far_away() -> Owner:
    """A process of another machine, which nobody here can see."""
    return replace(Owner.current(), host="far", machine="far", space="far", claim="far")


def claimed_far_away(queue: TaskQueue, lease: float = LEASE, owner: Owner | None = None) -> str:
    task = queue.submit("caption")
    who = Claimant("far", owner or far_away(), ["caption"], lease)
    assert queue.database.run(lambda tx: claims.claim(tx, who, queues=PRIORITIES))
    return task.id


def turn_clock(queue: TaskQueue, seconds: float) -> None:
    """As if the database's clock had been set: what was written by it is so much nearer or further."""
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE leases SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE task_workers SET seen_at = seen_at - ?", (seconds,)))


def test_a_clock_that_was_set_back_delays_the_takeover_of_a_dead_workers_task_by_a_lease_at_the_most(queue: TaskQueue):
    id = claimed_far_away(queue)
    sweeper = Sweeper(queue)
    turn_clock(queue, -3600)
    sweeper.tick()
    assert queue.get(id).status == "RUNNING"  # it may live, and renew its lease
    turn_clock(queue, LEASE + 1)
    sweeper.tick()
    assert (queue.get(id).status, queue.get(id).attempts) == ("QUEUED", 1)


@pytest.mark.parametrize("stood_by", [False, True], ids=["active", "stood-by"])
def test_a_clock_that_was_set_forward_takes_nothing_from_those_who_live(queue: TaskQueue, stood_by: bool):
    """One that stood by takes the lease of the sweepers from the active one, of another machine, before that one looks."""
    if stood_by:
        queue.database.run(lambda tx: SqlLeases().acquire(tx, "queue.sweeper", far_away(), 8.0))
    id = claimed_far_away(queue)
    forward = 0.0
    sweeper = Sweeper(queue, clock=lambda: time.monotonic() - forward)
    sign = workers.Sign("far", far_away(), PRIORITIES, "busy", id, 0, 0, 0)
    queue.database.run(lambda tx: workers.say_alive(tx, sign))
    sweeper.tick()
    forward = 3600.0
    turn_clock(queue, forward)
    sweeper.tick()
    assert queue.get(id).status == "RUNNING"
    assert queue.database.all("SELECT state FROM task_workers") == [("busy",)]
    turn_clock(queue, LEASE + 1)  # it said nothing since
    sweeper.tick()
    assert queue.get(id).status == "QUEUED"


def test_a_sweeper_that_stood_by_when_the_clock_was_set_forward_remembers_it_for_a_lease(queue: TaskQueue):
    """Whoever was active then may have died before it could do anything about it."""
    active = far_away()
    lease = queue.database.run(lambda tx: SqlLeases().acquire(tx, "queue.sweeper", active, 8.0))
    assert isinstance(lease, Lease)
    id = claimed_far_away(queue)
    forward = 0.0
    sweeper = Sweeper(queue, clock=lambda: time.monotonic() - forward)
    sweeper.tick()
    forward = 3600.0
    turn_clock(queue, forward)
    queue.database.run(lambda tx: SqlLeases().renew(tx, lease))
    sweeper.tick()
    queue.database.run(lambda tx: SqlLeases().release(tx, lease))
    sweeper.tick()
    assert queue.get(id).status == "RUNNING"


def test_a_database_that_answered_nobody_for_long_takes_nothing_from_those_who_live(
    database_url: str, queue: TaskQueue
):
    """Nobody could renew anything; that the sweeper is answered first says nothing of the others, here or elsewhere."""
    ids = [claimed_far_away(queue, 1.0, owner) for owner in (far_away(), Owner.current())]
    sweeper, busy = Sweeper(queue), threading.Event()
    sweeper.tick()

    def be_busy(tx: Tx) -> None:
        tx.execute("UPDATE leases SET token = token")  # on SQLite this is the whole database
        busy.set()
        time.sleep(SILENCE + 0.5)

    with TaskQueue(database_url) as other, ThreadPoolExecutor(1) as pool:
        blocking = pool.submit(other.database.run, be_busy)
        assert busy.wait(10.0)
        sweeper.tick()
        blocking.result()
    assert [queue.get(id).status for id in ids] == ["RUNNING", "RUNNING"]
    turn_clock(queue, LEASE + 1)  # they said nothing since
    sweeper.tick()
    assert [queue.get(id).status for id in ids] == ["QUEUED", "QUEUED"]


class FallingSilent:
    """Hints of which nothing is needed but the moment at which a round has looked for dead workers and goes on."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then

    def show_ended(self, tasks: object) -> None:
        self._then()

    def push(self, tasks: object) -> list[str]:
        return []

    def missing(self, tasks: object) -> None:
        return None

    def look_at_memory(self) -> bool:
        return True

    def forget_the_dead(self) -> None:
        pass


class Silence:
    """A database that answers nobody for some seconds from the moment on at which this is called first."""

    def __init__(self, database_url: str, seconds: float) -> None:
        self._other, self._seconds = TaskQueue(database_url), seconds
        self._pool, self._fell, self._over = ThreadPoolExecutor(1), threading.Event(), Future[None]()

    def __call__(self) -> None:
        if not self._fell.is_set():
            self._over = self._pool.submit(self._other.database.run, self._last)
            assert self._fell.wait(10.0)

    def _last(self, tx: Tx) -> None:
        if tx.engine == "postgresql":
            tx.execute("LOCK TABLE tasks")
        tx.execute("UPDATE tasks SET lease_until = lease_until - 60")  # nobody renewed it for so long
        self._fell.set()
        time.sleep(self._seconds)

    def wait(self) -> None:
        self._over.result(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._other.close()


def test_a_database_that_falls_silent_in_the_middle_of_a_round_takes_nothing_from_those_who_live(
    database_url: str, queue: TaskQueue
):
    with Silence(database_url, SILENCE + 0.5) as silence:
        sweeper = Sweeper(queue, hints=FallingSilent(silence))
        id = claimed_far_away(queue)
        sweeper.tick()
        silence.wait()
        sweeper.tick()
        assert queue.get(id).status == "RUNNING"
        turn_clock(queue, LEASE + 1)  # it said nothing since
        sweeper.tick()
        assert queue.get(id).status == "QUEUED"


@pytest.mark.parametrize("doing", ["deletes", "counts"])  # SQLite goes on counting while somebody writes
def test_a_database_that_falls_silent_while_the_sweeper_deletes_or_counts_takes_nothing_from_those_who_live(
    doing: str, database_url: str, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.queue.sweeper.SILENCE", 0.2)
    ahead = 0.0
    with Silence(database_url, 2.0) as silence:
        sweeper = Sweeper(queue, chores=[silence], clock=lambda: time.monotonic() + ahead)
        if doing == "deletes":
            ahead = 61.0  # it does once a minute
        id = claimed_far_away(queue)
        sweeper.tick()
        if doing == "deletes" or queue.database.engine == "postgresql":
            silence.wait()
        sweeper.tick()
        silence.wait()
        assert queue.get(id).status == "RUNNING"


def test_a_sweeper_goes_on_when_the_database_was_put_back_to_before_there_was_one(queue: TaskQueue):
    sweeper = Sweeper(queue)
    sweeper.tick()
    queue.database.write("DELETE FROM leases")
    id = claimed_far_away(queue)
    turn_clock(queue, LEASE + 1)
    sweeper.tick()
    sweeper.tick()
    assert queue.get(id).status == "QUEUED"


def test_a_clock_that_was_set_back_keeps_neither_a_dead_sweeper_nor_a_dead_worker_for_alive(queue: TaskQueue):
    queue.database.run(lambda tx: SqlLeases().acquire(tx, "queue.sweeper", far_away(), 8.0))
    sign = workers.Sign("far", far_away(), PRIORITIES, "idle", None, 0, 0, 0)
    queue.database.run(lambda tx: workers.say_alive(tx, sign))
    turn_clock(queue, -3600)
    id = claimed_far_away(queue)
    sweeper = Sweeper(queue)
    sweeper.tick()
    turn_clock(queue, 30)
    sweeper.tick()
    assert queue.get(id).status == "QUEUED"
    turn_clock(queue, workers.WORKER_SECONDS + 1)
    sweeper.tick()
    assert queue.database.all("SELECT state FROM task_workers") == [("lost",)]


@pytest.mark.parametrize("ending", ["completed", "failed", "progress"])
def test_a_worker_whose_claim_was_lost_by_a_failover_records_nothing_over_the_next_one(queue: TaskQueue, ending: str):
    task = queue.submit("caption")
    row = queue.database.one("SELECT version, token FROM tasks")
    assert row is not None
    first, second = (Claimant(name, Owner.current(), ["caption"]) for name in ("first", "second"))
    [lost] = queue.database.run(lambda tx: claims.claim(tx, first, queues=PRIORITIES))
    queue.database.write(
        "UPDATE tasks SET status = 'QUEUED', version = ?, token = ?, holder = NULL, lease_until = NULL", row
    )
    [claim] = queue.database.run(lambda tx: claims.claim(tx, second, queues=PRIORITIES))
    calls: dict[str, Callable[[Tx], object]] = {
        "completed": lambda tx: settling.complete(tx, lost, "1", 0.1),
        "failed": lambda tx: settling.fail(tx, lost, Failure("ValueError", "boom")),
        "progress": lambda tx: settling.progress(tx, lost, 50, "half"),
    }
    with pytest.raises(StaleClaim):
        queue.database.run(calls[ending])
    queue.database.run(lambda tx: settling.complete(tx, claim, "2", 0.1))
    assert (queue.get(task.id).status, queue.get(task.id).attempts) == ("COMPLETED", 0)


# ---------------------------------------------------------------------------------------------------------------------
# Hints that are not for this worker


def test_tasks_of_a_kind_that_a_worker_does_not_know_hold_up_nothing_in_the_queues_behind(
    database_url: str, redis_server: RedisServer
):
    url = redis_server.url()
    with TaskQueue(database_url, url, per_user=None) as new, TaskQueue(database_url, url, per_user=None) as old:
        for kind in ("fresh", "known"):
            new.handler(kind)(lambda task, payload: payload)
        old.handler("known")(lambda task, payload: payload)
        new.submit_many([{"kind": "fresh"} for _ in range(300)])
        task = new.submit("known", priority="low")
        source = RqSource(old, url, name="old")
        [claim] = source.claim(Claimant("old", Owner.current(), ["known"]), PRIORITIES, 1)
        assert claim.id == task.id
        source.close()


def test_a_hint_that_a_full_redis_threw_away_is_missed_although_it_is_full(
    database_url: str, redis_server: RedisServer
):
    with TaskQueue(database_url, redis_server.url()) as queue, redis_server.client() as client:
        queue.handler("caption")(lambda task, payload: payload)
        task = queue.submit("caption")
        client.delete("rq:queue:headway:normal")  # evicted, or popped by a worker that was killed
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = hinted_at - 60"))
        client.config_set("maxmemory", client.info("memory")["used_memory"] * 10 // 9)
        try:
            hints = CurrentHints(queue)
            assert hints.look_at_memory()
            Sweeper(queue, hints=hints).tick()
            source = RqSource(queue, redis_server.url(), name="w")
            claimed = source.claim(Claimant("w", Owner.current(), ["caption"]), PRIORITIES, 1)
            source.close()
        finally:
            client.config_set("maxmemory", 0)
        assert [claim.id for claim in claimed] == [task.id]


def test_a_move_to_a_redis_that_is_away_says_of_how_many_tasks_it_does_not_know(small: TaskQueue, tmp_path: Path):
    small.handler("caption")(lambda task, payload: payload)
    small.submit_many([{"kind": "caption"} for _ in range(700)])
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db", f"redis://127.0.0.1:{free_port()}/0") as queue:
        assert queue.hints is not None
        assert migration.to_rq(queue, queue.hints) == migration.Moved(0, left=700)


def test_a_task_that_failed_because_its_worker_died_is_in_rqs_registry_of_failed_jobs(
    database_url: str, redis_server: RedisServer
):
    with TaskQueue(database_url, redis_server.url(), per_user=None) as queue, redis_server.client() as client:
        queue.handler("caption", retries=0)(lambda task, payload: payload)
        failed, cancelled = queue.submit("caption"), queue.submit("caption")
        who = Claimant("far", far_away(), ["caption"])
        assert len(queue.database.run(lambda tx: claims.claim(tx, who, queues=PRIORITIES, limit=2))) == 2
        queue.cancel(cancelled.id)
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET attempts = 1"))  # it was tried alone
        turn_clock(queue, LEASE + 1)
        Sweeper(queue, hints=CurrentHints(queue)).tick()
        assert queue.get(failed.id).status == "FAILED"
        assert client.zrange("rq:failed:headway:normal", 0, -1) == [failed.id]
        assert client.hget(f"rq:job:{failed.id}", "status") == "failed"
        assert not client.exists(f"rq:job:{cancelled.id}")


# ---------------------------------------------------------------------------------------------------------------------
# Beside workers


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
