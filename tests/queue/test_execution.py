"""Running a handler in a child process or in the worker: pipes, signals, children, lack of resources."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headway.core.lifecycle import Shutdown
from headway.errors import HeadwayError
from headway.queue.rq.source import RqSource
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.nursery import Nursery
from tests.services.waiting import eventually


def work_off(queue: TaskQueue) -> None:
    Worker(queue, settings=Settings(rest=0.05)).run(burst=True)


def pipes() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


@pytest.mark.parametrize(
    "said", ["7", '{"progress": 1}', '{"ended": 3}', '{"ended": [7, ["a"], "failed", 1]}', '{"progress": [1e999, ""]}', "long"]
)  # fmt: skip
def test_a_handler_that_writes_into_the_pipe_to_its_worker_is_in_nobodys_way(tmp_path: Path, said: str):
    foreign = pipes()
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("odd", retries=0)
        def odd(task: Any, payload: str) -> str:
            raw = payload.encode()
            for pipe in pipes() - foreign:
                os.write(pipe, struct.pack(">I", 2**32 - 1 if payload == "long" else len(raw)) + raw)
            return "done"

        queue.handler("caption")(lambda task, payload: payload)
        strange, plain = queue.submit("odd", said), queue.submit("caption", 7)
        work_off(queue)
        assert queue.get(strange.id).is_final
        assert queue.get(strange.id).percent in (0.0, 100.0)
        assert queue.result(plain.id) == 7


def test_a_handlers_own_file_in_the_place_of_the_pipe_is_not_written_into(tmp_path: Path):
    foreign, kept = pipes(), []
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("daemon", retries=0)
        def daemon(task: Any, payload: Any) -> str:
            for pipe in pipes() - foreign:
                os.close(pipe)
                kept.append((tmp_path / "own").open("wb"))
                os.dup2(kept[-1].fileno(), pipe)
            return "done"

        task = queue.submit("daemon")
        work_off(queue)
        assert queue.get(task.id).status is Status.FAILED
        assert (tmp_path / "own").read_bytes() == b""


def test_a_handler_that_writes_without_end_into_the_pipe_to_its_worker_is_ended_at_its_timeout(tmp_path: Path):
    foreign = pipes()
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("flood", timeout=0.5, retries=0)
        def flood(task: Any, payload: Any) -> None:
            nothing = (struct.pack(">I", 2) + b"{}") * 10_000  # takes longer to read than to write
            ends = time.monotonic() + 20
            while time.monotonic() < ends:
                for pipe in pipes() - foreign:
                    os.write(pipe, nothing)

        task = queue.submit("flood")
        Worker(queue, settings=Settings(rest=0.05)).run(burst=True)
        assert (queue.get(task.id).error or "").startswith("TimedOut")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[TaskQueue]:
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db", per_user=None) as made:
        yield made


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


def test_a_process_that_a_handler_forks_in_the_worker_does_not_become_a_second_worker(
    database_url: str, tmp_path: Path, nursery: Nursery
):
    truth = tmp_path / "ran"
    with app.build(database_url) as queue:
        first = queue.submit("twice.none", str(tmp_path / "came back"))
        queue.submit_many({"kind": "log.none", "payload": {"file": str(truth)}} for _ in range(5))
        worker = nursery.start("w", url=database_url, isolations=["none"])
        try:
            eventually(lambda: queue.stats()[2].completed == 6)
        finally:
            worker.kill()
        assert queue.get(first.id).status is Status.COMPLETED
    assert (tmp_path / "came back").read_text() == "1", "its status"
    assert len(truth.read_text().splitlines()) == 5


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


def drain(queue: TaskQueue) -> None:
    source = None if queue.backend.redis_url is None else RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, settings=Settings(rest=0.05)).run(burst=True)


@pytest.mark.parametrize("isolation", ["fork", "none"])
@pytest.mark.parametrize("text", ["a\0b", "half a pair \ud800", "x" * 100_000], ids=["nul", "surrogate", "long"])
def test_a_text_that_no_database_takes_costs_neither_its_task_nor_the_next(queue: TaskQueue, isolation: str, text: str):
    def odd(task, payload):
        task.progress(50, text)
        if payload == "raise":
            raise ValueError(text)

    queue.handler(f"odd.{isolation}", retries=0, isolation=isolation)(odd)  # type: ignore[arg-type]  # one of the two
    raised = queue.submit(f"odd.{isolation}", "raise")
    returned = queue.submit(f"odd.{isolation}", "return")
    fine = queue.submit(f"echo.{isolation}", 1)
    drain(queue)
    assert queue.get(raised.id).status is Status.FAILED
    assert (queue.get(raised.id).error or "").startswith("ValueError: ")
    assert queue.get(returned.id).status is Status.COMPLETED
    assert queue.get(fine.id).status is Status.COMPLETED


def test_a_handler_that_dies_and_leaves_a_child_holds_up_nothing(queue: TaskQueue):
    def vanish(task, payload):
        if os.fork() == 0:
            signal.pause()
        os._exit(3)

    queue.handler("vanish", retries=0, timeout=15)(vanish)
    task = queue.submit("vanish")
    fine = queue.submit("echo.fork", 1)
    drain(queue)
    assert "exited with status 3" in (queue.get(task.id).error or "")
    assert queue.get(fine.id).status is Status.COMPLETED


def test_a_child_of_a_handler_that_returns_into_our_code_says_nothing(queue: TaskQueue):
    def split(task, payload):
        child = os.fork()
        if child == 0:
            return "the child"
        os.waitpid(child, 0)
        with suppress(
            AssertionError
        ):  # if it said something, that is heard before the parent says the same thing otherwise
            eventually(lambda: queue.get(task.id).status is not Status.RUNNING, 2)
        return "the parent"

    queue.handler("split", retries=0)(split)
    queue.submit("split")
    drain(queue)
    assert queue.database.all("SELECT status, result FROM tasks") == [("COMPLETED", '"the parent"')]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(n for n in range(4096) if n not in used), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_task_for_which_no_process_can_be_started_waits_and_is_not_charged(one_per_user: TaskQueue):
    task = one_per_user.submit("resize")  # no retries
    worker = Worker(one_per_user, shutdown=Shutdown())
    one_per_user.stats()
    with no_descriptor_left(), pytest.raises(HeadwayError, match="Too many open files"):
        worker.tick()
    waiting = one_per_user.get(task.id)
    assert (waiting.status, waiting.attempts) == (Status.QUEUED, 0)
    worker.tick()
    assert one_per_user.get(task.id).status is Status.COMPLETED


def test_tasks_that_no_thread_can_look_after_wait_and_are_not_charged(
    crowd: TaskQueue, monkeypatch: pytest.MonkeyPatch
):
    crowd.handler("echo", retries=0, isolation="none")(lambda task, payload: payload)
    crowd.handlers = {"echo": crowd.handlers["echo"]}
    crowd.submit_many({"kind": "echo"} for _ in range(3))

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")  # as Python says it

    worker = Worker(crowd, shutdown=Shutdown())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(HeadwayError, match="can't start new thread"):
            worker.tick()
    assert {(task.status, task.attempts) for task in crowd.list()} == {(Status.QUEUED, 0)}
    worker.tick()
    assert {task.status for task in crowd.list()} == {Status.COMPLETED}
