"""The supervisor of a host: starts as many workers as the load needs, replaces crashed ones and ends them in time.

Each worker is a separate process that is started, not forked, so it begins with fresh memory. The supervisor itself runs no
task. It also runs the host's sweeper, of which one is active per deployment.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway import telemetry
from headway.config import Config
from headway.core.lifecycle import Shutdown, on_signals, signal_name
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError
from headway.queue.recovery import Sweeper
from headway.queue.settings import LiveSettings
from headway.queue.store import tasks, workers
from headway.queue.task import PRIORITIES, Priority, Task
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.app import load
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.source import DatabaseSource, Source
from headway.queue.worker.worker import Worker
from headway.telemetry import Log, metrics, redact

log = Log("queue")

#: Seconds between two checks of children and load.
TICK = 0.5
#: Checks in a row with waiting tasks before a worker is added.
GROW_CHECKS = 2
#: Seconds without waiting tasks before a worker is removed.
SHRINK_SECONDS = 20.0
#: Seconds between two checks for workers without a heartbeat, and for such a worker to send one before it is killed.
SILENCE_INTERVAL, SILENT_SECONDS = 5.0, 20.0
#: Seconds between two searches for waiting tasks that no worker runs.
UNSERVED_INTERVAL = 2.0
#: A worker that ran for this many seconds did not crash at its start.
HEALTHY_SECONDS = 10.0
#: Seconds after the drain time for a worker to record outcomes and exit before it is killed.
END_SECONDS = 5.0
_CRASHED = RetryPolicy(retries=0, base=0.5, cap=30.0, jitter=0.2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a supervisor runs. It may be replaced while the supervisor runs."""

    app: str
    workers: int = 1
    most: int = 1
    queues: Sequence[Priority] = PRIORITIES
    drain: float = 30.0
    #: Options of the command line, which override the settings. They are passed to the workers.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The module whose `main` starts a worker; it finds the queue by ``app``.
    module: str = "headway.queue.worker.supervisor"


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    started: float
    ending_since: float | None = None
    lost_since: float | None = None  # the process is alive, and the sweeper marked it as lost


@dataclass(slots=True)
class _Load:
    """The recent load."""

    busy_checks: int = 0  # in a row with waiting tasks
    idle_since: float | None = None


class Supervisor:
    """Runs the workers of a host; see the module. `tick` is one round and returns the seconds until the next."""

    def __init__(
        self,
        queue: TaskQueue,
        plan: Plan,
        *,
        shutdown: Shutdown,
        parent: int | None = None,
        live: LiveSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        chores: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``parent``: pid of the process with which this one ends, if any. ``live``: settings that change the plan.
        ``chores``: see `Sweeper`."""
        self._parent, self._live = parent, live
        self._queue, self.plan, self._shutdown, self._clock = queue, plan, shutdown, clock
        self._children: list[_Child] = []
        self._crashes = 0
        self._not_before = 0.0
        self._wanted = plan.workers
        self._load = _Load()
        self._sweeper = Sweeper(queue, hints=CurrentHints(queue), chores=chores)
        self._silence_at = 0.0
        self._unserved_at = 0.0
        self._unserved: set[tuple[str, str]] = set()  # (queue, kind) that was logged

    @property
    def workers(self) -> list[str]:
        """The names of the workers that were not asked to exit."""
        return [child.name for child in self._children if child.ending_since is None]

    def run(self) -> None:
        """Run workers until a shutdown is requested, then end them all."""
        stop = threading.Event()
        self._follow()
        self._log_connections()
        sweeper = threading.Thread(target=self._sweeper.run, args=(stop,), name="headway-sweeper", daemon=True)
        sweeper.start()
        try:
            while not self._shutdown.stop.is_set() and self._parent in (None, os.getppid()):
                self._shutdown.stop.wait(self.tick())
        finally:
            self._end_all()
            stop.set()
            sweeper.join(END_SECONDS)

    def tick(self) -> float:
        """Run one round."""
        self._follow()
        self._collect()
        self._kill_silent()
        self._scale()
        self._start_or_end()
        self._report_unserved()
        metrics.gauge("headway_workers", len(self.workers))
        return TICK

    def _follow(self) -> None:
        """Adopt the current settings."""
        try:
            changed = self._live is not None and self._live.refresh()
        except HeadwayError as error:
            log.warning("the settings cannot be read; the previous ones stay in force", error=str(error))
            return
        if self._live is not None and changed:
            now = self._live.in_force
            self.plan = replace(self.plan, workers=now.workers, most=now.max_workers, drain=now.drain)
            self._sweeper.retention = now.retention

    def _log_connections(self) -> None:
        """Log what the supervisor reaches at its start. Without Redis, workers claim tasks from the database."""
        log.info("the database is connected", key=self._queue.database.name)
        reached = self._queue.backend.reaches_redis()
        if reached is None:
            log.info("no Redis is configured: workers learn of tasks from the database alone")
        elif reached:
            log.info(
                "Redis is connected: workers learn of tasks through RQ", key=redact(self._queue.backend.redis_url or "")
            )
        else:
            log.warning(
                "Redis is unreachable at the start: workers claim tasks from the database",
                key=redact(self._queue.backend.redis_url or ""),
            )

    # ---- children ----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Collect workers that exited. A crashed one is replaced, with a growing delay after crashes in a row."""
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

    def _kill_silent(self) -> None:
        """Kill a worker that is alive and sends no heartbeat: it is suspended, or its handler blocks all threads.

        Its tasks belong to other workers by then, and it would never run a task again.
        """
        now = self._clock()
        if now < self._silence_at or not self._children:
            return
        self._silence_at = now + SILENCE_INTERVAL
        try:
            with self._queue.database.read() as tx:
                lost = workers.lost_among(tx, self.workers)
        except HeadwayError:  # the database is unreachable for the workers too
            lost = set()
        for child in self._children:
            if child.name not in lost:
                child.lost_since = None
            elif child.lost_since is None:
                child.lost_since = now
            elif now - child.lost_since > SILENT_SECONDS:
                log.error("a worker sends no heartbeat and is killed", worker=child.name)
                child.process.kill()

    def _start_or_end(self) -> None:
        """Start missing workers, or ask surplus ones to exit, the youngest first."""
        active = [child for child in self._children if child.ending_since is None]
        for child in reversed(active[self._wanted :]):
            self._ask_to_end(child)
        while len(self.workers) < self._wanted and self._clock() >= self._not_before:
            try:
                self._start()
            except OSError as error:  # out of memory or processes: retry later
                self._crashes += 1
                self._not_before = self._clock() + _CRASHED.delay(self._crashes)
                log.warning("a worker cannot be started; retrying", error=str(error))

    def _start(self) -> None:
        name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        command = [
            sys.executable, "-m", self.plan.module, self.plan.app, name,
            ",".join(queue.value for queue in self.plan.queues), json.dumps(self._worker_options()),
        ]  # fmt: skip
        # A new session: a Ctrl-C at the terminal reaches only the supervisor, which then ends the workers.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._children.append(_Child(name, process, self._clock()))
        log.info("a worker was started", worker=name)

    def _worker_options(self) -> Mapping[str, Any]:
        """Return the options for its workers; without live settings, with the plan's drain time."""
        return {"queue_drain": self.plan.drain, **self.plan.options} if self._live is None else self.plan.options

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
                    child.process.send_signal(signal.SIGINT)  # now
            self._collect()
            time.sleep(0.05)

    # ---- how many ----------------------------------------------------------------------------------------------------

    def waiting(self) -> int:
        """Count the waiting tasks that its workers can run, up to the largest number of workers."""
        kinds = sorted(self._queue.handlers)
        with self._queue.database.read() as tx:
            return tasks.count_waiting(tx, self.plan.queues, kinds, most=self.plan.most)

    def _report_unserved(self) -> None:
        """Log each kind of waiting task that no online worker runs, once until it is served or gone."""
        now = self._clock()
        if now < self._unserved_at:
            return
        self._unserved_at = now + UNSERVED_INTERVAL
        try:
            with self._queue.database.read() as tx:
                found = [each for each in workers.unserved(tx) if each.kind not in self._queue.handlers]
        except HeadwayError:  # the database is unreachable, which `_scale` and the workers report
            return
        for each in found:
            if (each.queue, each.kind) not in self._unserved:
                log.warning(
                    "tasks wait that no online worker runs: register a handler for their kind, or cancel them",
                    kind=each.kind, queue=each.queue, count=each.tasks,
                )  # fmt: skip
        self._unserved = {(each.queue, each.kind) for each in found}

    def _scale(self) -> None:
        """Add workers while tasks wait; remove one after a while without waiting tasks."""
        plan = self.plan
        if plan.most > plan.workers:
            try:
                waiting = self.waiting()
            except HeadwayError as error:  # unknown is not idle: keep the number
                log.warning("the load cannot be read", error=str(error))
                return
            if waiting:
                self._load.idle_since = None
                self._load.busy_checks += 1
                if self._load.busy_checks >= GROW_CHECKS:
                    self._load.busy_checks = 0
                    self._wanted = min(plan.most, max(self._wanted + 1, min(self._wanted * 2, waiting)))
            else:
                self._load.busy_checks = 0
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
    return f"was killed by {signal_name(-status)}"


def work_off(queue: TaskQueue, plan: Plan, *, shutdown: Shutdown) -> None:
    """Run one worker in this process until no tasks are left (``--burst``)."""
    name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    settings = Settings(queues=plan.queues, drain=plan.drain)
    worker = _worker(queue, name, settings, shutdown, live=live_settings(queue, plan.options))
    worker.run(burst=True)
    with queue.database.read() as tx:
        left = sorted({each.kind for each in workers.waiting_kinds(tx) if each.kind not in queue.handlers})
    if left:
        log.warning("tasks still wait that this application has no handler for", kind=", ".join(left))
    if worker.outgrown:
        raise HeadwayError(
            "The worker exceeded its memory limit and exited before all tasks were done.",
            hint="Start it again, or raise the limit: headway queue set memory_limit MB",
        )


def _worker(
    queue: TaskQueue,
    name: str,
    settings: Settings,
    shutdown: Shutdown,
    orphaned: Callable[[], bool] = lambda: False,
    live: LiveSettings | None = None,
) -> Worker:
    def source() -> Source:
        url = queue.backend.redis_url
        if url is None:
            return DatabaseSource(queue)
        from headway.queue.rq.source import RqSource

        return RqSource(queue, url, name=name, queues=settings.queues)

    return Worker(
        queue, name=name, settings=settings, shutdown=shutdown, make_source=source, context=queue.context,
        orphaned=orphaned, live=live,
    )  # fmt: skip


def live_settings(queue: TaskQueue, options: Mapping[str, Any]) -> LiveSettings:
    """Return the settings of this queue's workers. ``options`` of the command line override them."""
    return LiveSettings(lambda: queue.database, queue.backend.worker_config(options))


def log_as_configured(config: Config) -> None:
    """Configure the log of a long-lived process: INFO unless the settings name a level."""
    level = config.text("log_level").upper() if config.is_set("log_level") else "INFO"
    telemetry.configure(level=level, as_json=config["log_format"] == "json")


class CurrentHints:
    """The hints of the queue's current Redis, which may change or be removed while the sweeper runs."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue

    def push(self, tasks: Sequence[tuple[str, Priority]]) -> list[str]:
        hints = self._queue.hints
        return [] if hints is None else hints.push(tasks)

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]] | None:
        hints = self._queue.hints
        return None if hints is None else hints.missing(tasks)

    def check_memory(self) -> bool:
        hints = self._queue.hints
        return True if hints is None else hints.check_memory()

    def show_ended(self, tasks: Sequence[Task]) -> None:
        hints = self._queue.hints
        if hints is not None:
            hints.show_ended(tasks)

    def remove_dead_workers(self) -> None:
        hints = self._queue.hints
        if hints is not None:
            hints.remove_dead_workers()


class WorkerShutdown(Shutdown):
    """A shutdown in which only a SIGINT that is not the first signal means *now*.

    A worker may get SIGTERM twice: from its supervisor, and from systemd or the init of a container, which signal all
    processes.
    """

    def _decide(self, signum: int) -> threading.Event:
        decided = super()._decide(signum)
        return decided if signum == signal.SIGINT else self.stop


def main(arguments: Sequence[str], load: Callable[[str], TaskQueue] = load) -> int:
    """Run one worker, as the supervisor starts it. ``load`` finds its queue."""
    app, name, queues, options = arguments
    shutdown = WorkerShutdown()
    settings = Settings(queues=[Priority(each) for each in queues.split(",")])
    parent = os.getppid()
    with on_signals(shutdown), load(app) as queue:
        live = live_settings(queue, json.loads(options))
        log_as_configured(live.config)
        _worker(queue, name, settings, shutdown, lambda: os.getppid() != parent, live=live).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
