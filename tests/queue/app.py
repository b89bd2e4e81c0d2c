"""An application with handlers of every kind, as a worker's process imports it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway._lease import Owner
from headway.core.lifecycle import Shutdown, on_signals
from headway.queue.rq.source import RqSource
from headway.queue.store.claim import Claimant
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import GiveUp
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker

ISOLATIONS = ("fork", "none")


def build(url: str, *, isolations: Sequence[str] = ISOLATIONS, **options) -> TaskQueue:
    queue = TaskQueue(url, **{"per_user": None, **options})
    for isolation in isolations:
        if isolation == "async":
            register_async(queue)
            continue

        def register(name: str, function, isolation=isolation, **more) -> None:
            queue.handler(f"{name}.{isolation}", isolation=isolation, **{"retries": 0, **more})(function)

        register("echo", lambda task, payload: payload)
        register("log", log)
        register("sleep", lambda task, payload: time.sleep(payload), timeout=60.0, retries=3, retry_delay=0.05)
        register("quick", lambda task, payload: time.sleep(payload), timeout=1.0)
        register("patient", patient)
        register("deaf", deaf, timeout=0.5)
        register("raise", odd)
        register("progress", told)
        register("twice", twice)
        register("children", children, timeout=60.0)
        register("pools", pools, timeout=60.0)
        register(
            "close", lambda task, payload: os.closerange(3, 256), retries=int(isolation == "none"), retry_delay=0.01
        )
        register("die", lambda task, payload: os.kill(os.getpid(), signal.SIGKILL), retries=1, retry_delay=0.01)
    if "fork" not in isolations:
        return queue
    queue.handler("exit.fork", retries=0)(lambda task, payload: os._exit(payload))
    queue.handler("kill.fork", retries=0)(lambda task, payload: os.kill(os.getpid(), signal.SIGKILL))
    queue.handler("hog.fork", retries=0)(hog)
    queue.handler("leak.fork", retries=0)(leak)
    queue.handler("orphan.fork", retries=0)(orphan)
    return queue


def register_async(queue: TaskQueue) -> None:
    @queue.handler("log.async", retries=3, retry_delay=0.05, concurrency=1000)
    async def log_async(task, payload) -> None:
        """Append a line for every run, then wait."""
        append_run(task, payload)
        await asyncio.sleep(payload.get("seconds", 0.0))

    @queue.handler("one.async", retries=3, retry_delay=0.05, concurrency=1)
    async def one(task, payload) -> None:
        await log_async(task, payload)

    @queue.handler("brief.async", retries=3, retry_delay=0.05, timeout=0.4)
    async def brief(task, payload) -> None:
        await asyncio.sleep(0.2)

    @queue.handler("block.async", retries=0, timeout=0.5)
    async def block(task, payload) -> None:
        time.sleep(120)  # noqa: ASYNC251 - it blocks the event loop on purpose


def claimant(queue: TaskQueue, name: str = "w") -> Claimant:
    return Claimant(name, Owner.current(), sorted(queue.handlers))


def log(task, payload) -> None:
    """Leaves a line for every execution, as the truth about what ran."""
    append_run(task, payload)
    time.sleep(payload.get("seconds", 0.0))


def append_run(task, payload) -> None:
    with open(payload["file"], "a", encoding="utf-8") as file:
        file.write(f"{task.id} {task.attempts}\n")


def patient(task, payload) -> str:
    """Ends itself when it is asked to."""
    Path(payload).write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while not task.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    return "ended itself"


def deaf(task, payload) -> None:
    """Cannot be ended from within."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    while True:
        time.sleep(60)


def leak(task, payload) -> None:
    """Fails with a secret in the message, and more of them where a careless traceback would show it."""
    local = "canary-local"
    task.progress(10, "began")
    raise ValueError(f"token={payload['token']} is refused") from KeyError(len(local))


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Foreign(BaseException):
    pass


def odd(task, payload):
    match payload:
        case "give-up":
            raise GiveUp("never")
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "generator-exit":
            raise GeneratorExit
        case "foreign":
            raise Foreign("foreign")
        case "hostile":
            raise Hostile
        case "result":
            return {1, 2}
        case "nan":
            return float("nan")
        case "large":
            return "x" * 300_000
    raise ValueError(payload)


def told(task, payload) -> str:
    for percent in range(0, 101, 10):
        task.progress(percent, f"step {percent}")
        time.sleep(payload)
    return "told"


def twice(task, payload) -> None:
    """Returns in two processes; notes how the second one ended."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        Path(payload).write_text(str(os.waitstatus_to_exitcode(status)))


def children(task, payload) -> dict[str, int]:
    """Fork and end children the moment they start, and return how many ended in which way."""
    ends: Counter[str] = Counter()
    for _ in range(payload):
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        ends[str(os.waitstatus_to_exitcode(found[1]))] += 1
    return dict(ends)


def square(number: int) -> int:
    return number * number


def pools(task, payload) -> list[Any]:
    """Use pools of processes, each of which ends its children by SIGTERM, and end a program in the same way."""
    squares: list[int] = []
    for _ in range(payload):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            squares = pool.map(square, range(3))
    with subprocess.Popen(["sleep", "60"]) as program:
        program.terminate()
    return [squares, str(program.returncode)]


def hog(task, payload) -> None:
    kept = []
    for _ in range(60):  # not for ever, should nobody end it
        kept.append(bytearray(10 * 2**20))
        time.sleep(0.02)
    time.sleep(5)


def orphan(task, payload) -> int:
    """Leaves a process behind that holds every descriptor, and says which."""
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    return child


def work(
    url: str,
    name: str,
    *,
    drain: float = 5.0,
    redis: str | None = None,
    isolations: Sequence[str] = ISOLATIONS,
    options: Mapping[str, Any] | None = None,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """A worker, until it is told to end."""
    shutdown = Shutdown()
    settings = Settings(drain=drain, cancel_grace=1.0)
    with on_signals(shutdown), build(url, redis=redis, isolations=isolations, **(options or {})) as queue:
        ready()
        source = RqSource(queue, redis, name=name) if redis else None
        Worker(queue, name=name, shutdown=shutdown, settings=settings, source=source).run()


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], drain=float(sys.argv[3]), redis=sys.argv[4] if len(sys.argv) > 4 else None)
