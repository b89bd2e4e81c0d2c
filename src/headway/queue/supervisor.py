"""The supervisor of a host: keeps as many workers as there is work for, replaces those that crash, ends them in time.

Each worker is a process of its own, started anew (not forked), so that what one of them did to its memory ends with it. The
supervisor itself runs no task. It also is the host's candidate for the sweeper.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.config import Config
from headway.errors import HeadwayError
from headway.lifecycle import Shutdown, on_signals
from headway.queue.app import load
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import PRIORITIES, Priority
from headway.queue.watch import Settings
from headway.queue.worker import Source, Worker
from headway.retry import RetryPolicy
from headway.telemetry import Log, configure, metrics

log = Log("queue")

#: Between two looks at children and load.
TICK = 0.5
#: Work must have waited for so many looks before a worker is added, and been absent for so long before one leaves.
GROW_LOOKS = 2
SHRINK_SECONDS = 20.0
#: A worker that lived this long did not crash at its start.
HEALTHY_SECONDS = 10.0
#: Beyond the drain time, what a worker gets to record and end before it is killed.
END_SECONDS = 5.0
_CRASHED = RetryPolicy(retries=0, base=0.5, cap=30.0, jitter=0.2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a supervisor keeps running; may be replaced while it runs."""

    app: str
    workers: int = 1
    most: int = 1
    queues: Sequence[Priority] = PRIORITIES
    drain: float = 30.0


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    started: float
    ending_since: float | None = None


@dataclass(slots=True)
class _Load:
    """How the load looked lately."""

    pressed: int = 0
    idle_since: float | None = field(default=None)


class Supervisor:
    """See the module. `tick` is one look; it returns how long to rest."""

    def __init__(
        self,
        queue: TaskQueue,
        plan: Plan,
        *,
        shutdown: Shutdown,
        parent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``parent``: the process this one ends with, if it belongs to one."""
        self._parent = parent
        self._queue, self.plan, self._shutdown, self._clock = queue, plan, shutdown, clock
        self._children: list[_Child] = []
        self._crashes = 0
        self._not_before = 0.0
        self._wanted = plan.workers
        self._load = _Load()

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are not on their way out."""
        return [child.name for child in self._children if child.ending_since is None]

    def run(self) -> None:
        """Until a shutdown is asked for, and all workers have ended."""
        look_at_stores(self._queue)
        stop = threading.Event()
        sweeper = threading.Thread(
            target=Sweeper(self._queue, hints=self._queue.hints).run, args=(stop,), name="headway-sweeper", daemon=True
        )
        sweeper.start()
        try:
            while not self._shutdown.stop.is_set() and self._parent in (None, os.getppid()):
                self._shutdown.stop.wait(self.tick())
        finally:
            self._end_all()
            stop.set()
            sweeper.join(END_SECONDS)

    def tick(self) -> float:
        self._collect()
        self._weigh()
        self._match()
        metrics.gauge("headway_workers", len(self.workers))
        return TICK

    # ---- children ----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Notice who ended. One that crashed is replaced, later and later if they crash one after the other."""
        now = self._clock()
        for child in list(self._children):
            status = child.process.poll()
            if status is None:
                if child.ending_since is not None and now - child.ending_since > self.plan.drain + END_SECONDS:
                    log.error("a worker did not end in time and is killed", worker=child.name)
                    child.process.kill()
                continue
            self._children.remove(child)
            if child.ending_since is not None or status == 0:
                continue
            self._crashes = 1 if now - child.started > HEALTHY_SECONDS else self._crashes + 1
            delay = _CRASHED.delay(self._crashes)
            self._not_before = now + delay
            metrics.count("headway_worker_crashes")
            log.error(
                "a worker crashed and is replaced", worker=child.name, reason=_how(status), seconds=round(delay, 1)
            )

    def _match(self) -> None:
        """Start what is missing, ask those to leave that are too many: the youngest first."""
        active = [child for child in self._children if child.ending_since is None]
        for child in reversed(active[self._wanted :]):
            self._ask_to_end(child)
        while len(self.workers) < self._wanted and self._clock() >= self._not_before:
            try:
                self._start()
            except OSError as error:  # no memory, no process left: later there may be
                self._crashes += 1
                self._not_before = self._clock() + _CRASHED.delay(self._crashes)
                log.warning("a worker cannot be started; it is tried again", error=str(error))

    def _start(self) -> None:
        name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        command = [
            sys.executable, "-m", "headway.queue.supervisor", self.plan.app, name,
            ",".join(queue.value for queue in self.plan.queues), str(self.plan.drain),
        ]  # fmt: skip
        # A session of its own: a Ctrl-C at the terminal goes to us, and we decide what becomes of the workers.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._children.append(_Child(name, process, self._clock()))
        log.info("a worker was started", worker=name)

    def _ask_to_end(self, child: _Child) -> None:
        if child.ending_since is None:
            child.ending_since = self._clock()
            child.process.send_signal(signal.SIGTERM)

    def _end_all(self) -> None:
        for child in self._children:
            self._ask_to_end(child)
        while self._children:
            if self._shutdown.abandon.is_set():
                for child in self._children:
                    child.process.send_signal(signal.SIGTERM)  # the second one: now
            self._collect()
            time.sleep(0.05)

    # ---- how many ----------------------------------------------------------------------------------------------------

    def _weigh(self) -> None:
        """More workers while tasks wait although all are busy; fewer when nothing has waited for a while."""
        plan = self.plan
        if plan.most > plan.workers:
            try:
                infos = [info for info in self._queue.stats() if info.priority in plan.queues]
            except HeadwayError as error:  # unknown is not idle: nothing is changed
                log.warning("the load cannot be seen", error=str(error))
                return
            waiting = sum(info.waiting for info in infos if not info.paused)
            if waiting:
                self._load.idle_since = None
                self._load.pressed += 1
                if self._load.pressed >= GROW_LOOKS:
                    self._load.pressed = 0
                    self._wanted = min(plan.most, max(self._wanted + 1, min(self._wanted * 2, waiting)))
            else:
                self._load.pressed = 0
                now = self._clock()
                if self._load.idle_since is None:
                    self._load.idle_since = now
                if now - self._load.idle_since > SHRINK_SECONDS:
                    self._load.idle_since = now
                    self._wanted -= 1
        self._wanted = max(plan.workers, min(self._wanted, max(plan.most, plan.workers)))


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def look_at_stores(queue: TaskQueue) -> None:
    """Say at the start what can be reached. A Redis that is away is no reason not to begin; a database that cannot be used
    is: then this raises."""
    queue.database.one("SELECT 1")
    log.info("the database is connected", reason=queue.database.engine)
    if queue.hints is None:
        log.info("no Redis is named: workers hear of tasks from the database alone")
    elif queue.hints.is_there():
        log.info("Redis is connected: workers hear of tasks through RQ")
    else:
        log.warning("Redis is away at the start: tasks wait in the database and are run from there")


def log_as_configured() -> None:
    """A program of ours says what goes on; a library would stay quiet."""
    config = Config()
    configure(level=config.text("log_level").upper(), as_json=config["log_format"] == "json")


def work_off(queue: TaskQueue, plan: Plan, *, shutdown: Shutdown) -> None:
    """One worker in this process, until nothing is left to do."""
    look_at_stores(queue)
    name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    settings = Settings(queues=plan.queues, drain=plan.drain)
    _worker(queue, name, settings, shutdown).run(burst=True)


def _worker(
    queue: TaskQueue,
    name: str,
    settings: Settings,
    shutdown: Shutdown,
    orphaned: Callable[[], bool] = lambda: False,
) -> Worker:
    source: Source | None = None
    if queue.redis_url is not None:
        from headway.queue.rq import RqSource

        source = RqSource(queue, queue.redis_url, name=name, queues=settings.queues)
    return Worker(
        queue, name=name, settings=settings, shutdown=shutdown, source=source, context=queue.context, orphaned=orphaned
    )


def _main(arguments: Sequence[str]) -> int:
    """One worker, as the supervisor starts it."""
    app, name, queues, drain = arguments
    log_as_configured()
    shutdown = Shutdown()
    settings = Settings(queues=[Priority(each) for each in queues.split(",")], drain=float(drain))
    parent = os.getppid()
    with on_signals(shutdown), load(app) as queue:
        _worker(queue, name, settings, shutdown, lambda: os.getppid() != parent).run()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
