"""The supervisor of a host: keeps as many workers as there is work for, replaces those that crash, ends them in time.

Each worker is a process of its own, started anew (not forked), so that what one of them did to its memory ends with it. The
supervisor itself runs no task. It also is the host's candidate for the sweeper.
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
from headway.queue.store import tasks as records
from headway.queue.store import workers
from headway.queue.task import PRIORITIES, Priority, Task
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.app import load
from headway.queue.worker.database_source import DatabaseSource
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.source import Source
from headway.queue.worker.worker import Worker
from headway.telemetry import Log, metrics, redact

log = Log("queue")

#: Between two looks at children and load.
TICK = 0.5
#: Work must have waited for so many looks before a worker is added, and been absent for so long before one leaves.
GROW_LOOKS = 2
SHRINK_SECONDS = 20.0
#: A worker that is taken for lost is looked for so often; it is given so long to say something after all.
SILENCE_LOOK, SILENT_SECONDS = 5.0, 20.0
#: Seconds between two searches for waiting tasks that no worker runs.
UNSERVED_INTERVAL = 2.0
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
    #: What the command line says, which goes before the settings; the workers are told it too.
    given: Mapping[str, Any] = field(default_factory=dict)
    #: The module whose `main` a worker is started by: it finds the queue by ``app``.
    module: str = "headway.queue.worker.supervisor"


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    started: float
    ending_since: float | None = None
    lost_since: float | None = None  # it lives, and the sweeper takes it for lost


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
        live: LiveSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        chores: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``parent``: the process this one ends with, if it belongs to one. ``live``: settings that change the plan.
        ``chores``: the sweeper's, see there."""
        self._chores = chores
        self._parent, self._live = parent, live
        self._queue, self.plan, self._shutdown, self._clock = queue, plan, shutdown, clock
        self._children: list[_Child] = []
        self._crashes = 0
        self._not_before = 0.0
        self._wanted = plan.workers
        self._load = _Load()
        self._sweeper: Sweeper | None = None
        self._silence_at = 0.0
        self._unserved_at = 0.0
        self._unserved: set[tuple[str, str]] = set()  # (queue, kind) that was logged

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are not on their way out."""
        return [child.name for child in self._children if child.ending_since is None]

    def run(self) -> None:
        """Until a shutdown is asked for, and all workers have ended."""
        stop = threading.Event()
        self._follow()
        self._say_connections()
        self._sweeper = Sweeper(self._queue, hints=CurrentHints(self._queue), chores=self._chores)
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
        self._follow()
        self._collect()
        self._look_for_silent()
        self._weigh()
        self._match()
        self._report_unserved()
        metrics.gauge("headway_workers", len(self.workers))
        return TICK

    def _follow(self) -> None:
        """Go by the settings as they are now."""
        try:
            changed = self._live is not None and self._live.refresh()
        except HeadwayError as error:
            log.warning("the settings cannot be read; those before stay in force", error=str(error))
            return
        if self._live is not None and changed:
            now = self._live.in_force
            self.plan = replace(self.plan, workers=now.workers, most=now.max_workers, drain=now.drain)
            if self._sweeper is not None:
                self._sweeper.retention = now.retention

    def _say_connections(self) -> None:
        """Whom the supervisor reaches at its start. A Redis that is away is no error: tasks wait in the database."""
        log.info("the database is connected", key=self._queue.database.name)
        reached = self._queue.reaches_redis()
        if reached is None:
            log.info("no Redis is named: workers hear of tasks from the database alone")
        elif reached:
            log.info("Redis is connected: workers hear of tasks through RQ", key=redact(self._queue.redis_url or ""))
        else:
            log.warning(
                "Redis is away at the start: tasks wait in the database and are run from there",
                key=redact(self._queue.redis_url or ""),
            )

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

    def _look_for_silent(self) -> None:
        """Kill a worker that lives and says nothing: stopped, or in a handler that lets no other thread run. What it held is
        somebody else's by then; left alone it would never run a task again, and the next try would cost the next worker."""
        now = self._clock()
        if now < self._silence_at or not self._children:
            return
        self._silence_at = now + SILENCE_LOOK
        try:
            with self._queue.database.read() as tx:
                lost = workers.lost(tx, self.workers)
        except HeadwayError:  # the store is away: for them too
            lost = set()
        for child in self._children:
            if child.name not in lost:
                child.lost_since = None
            elif child.lost_since is None:
                child.lost_since = now
            elif now - child.lost_since > SILENT_SECONDS:
                log.error("a worker says nothing any more and is killed", worker=child.name)
                child.process.kill()

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
            sys.executable, "-m", self.plan.module, self.plan.app, name,
            ",".join(queue.value for queue in self.plan.queues), json.dumps(self._given()),
        ]  # fmt: skip
        # A session of its own: a Ctrl-C at the terminal goes to us, and we decide what becomes of the workers.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._children.append(_Child(name, process, self._clock()))
        log.info("a worker was started", worker=name)

    def _given(self) -> Mapping[str, Any]:
        """What its workers are told; without settings to follow, the plan itself."""
        return {"queue_drain": self.plan.drain, **self.plan.given} if self._live is None else self.plan.given

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
            return records.count_waiting(tx, self.plan.queues, kinds, most=self.plan.most)

    def _report_unserved(self) -> None:
        """Log each kind of waiting task that no online worker runs, once until it is served or gone."""
        now = self._clock()
        if now < self._unserved_at:
            return
        self._unserved_at = now + UNSERVED_INTERVAL
        try:
            with self._queue.database.read() as tx:
                found = [each for each in workers.unserved(tx) if each.kind not in self._queue.handlers]
        except HeadwayError:  # the database is away, which `_weigh` and the workers report
            return
        for each in found:
            if (each.queue, each.kind) not in self._unserved:
                log.warning(
                    "tasks wait that no online worker runs: register a handler for their kind, or cancel them",
                    kind=each.kind, queue=each.queue, count=each.tasks,
                )  # fmt: skip
        self._unserved = {(each.queue, each.kind) for each in found}

    def _weigh(self) -> None:
        """More workers while tasks wait although all are busy; fewer when nothing has waited for a while."""
        plan = self.plan
        if plan.most > plan.workers:
            try:
                waiting = self.waiting()
            except HeadwayError as error:  # unknown is not idle: nothing is changed
                log.warning("the load cannot be seen", error=str(error))
                return
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
    return f"was killed by {signal_name(-status)}"


def work_off(queue: TaskQueue, plan: Plan, *, shutdown: Shutdown) -> None:
    """One worker in this process, until nothing is left to do."""
    name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    settings = Settings(queues=plan.queues, drain=plan.drain)
    worker = _worker(queue, name, settings, shutdown, live=live_settings(queue, plan.given))
    worker.run(burst=True)
    with queue.database.read() as tx:
        left = sorted({each.kind for each in workers.waiting_kinds(tx) if each.kind not in queue.handlers})
    if left:
        log.warning("tasks still wait that this application has no handler for", kind=", ".join(left))
    if worker.outgrown:
        raise HeadwayError(
            "The worker used more memory than it may, and ended before all was done.",
            hint="Start it again, or let it use more: headway queue set memory_limit MB",
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
        if queue.redis_url is None:
            return DatabaseSource(queue)
        from headway.queue.worker.rq_source import RqSource

        return RqSource(queue, queue.redis_url, name=name, queues=settings.queues)

    return Worker(
        queue, name=name, settings=settings, shutdown=shutdown, make_source=source, context=queue.context,
        orphaned=orphaned, live=live,
    )  # fmt: skip


def live_settings(queue: TaskQueue, given: Mapping[str, Any]) -> LiveSettings:
    """The settings of this queue's workers, with what the command line says before them."""
    return LiveSettings(lambda: queue.database, queue.worker_config(given))


def log_as_configured(config: Config) -> None:
    """One who runs for long says what it does, unless it is told to say less."""
    level = config.text("log_level").upper() if config.is_set("log_level") else "INFO"
    telemetry.configure(level=level, as_json=config["log_format"] == "json")


class CurrentHints:
    """Who tells RQ of tasks just now: another Redis may be named while the sweeper runs, or none."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue

    def push(self, tasks: Sequence[tuple[str, Priority]]) -> list[str]:
        hints = self._queue.hints
        return [] if hints is None else hints.push(tasks)

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]] | None:
        hints = self._queue.hints
        return None if hints is None else hints.missing(tasks)

    def look_at_memory(self) -> bool:
        hints = self._queue.hints
        return True if hints is None else hints.look_at_memory()

    def show_ended(self, tasks: Sequence[Task]) -> None:
        hints = self._queue.hints
        if hints is not None:
            hints.show_ended(tasks)

    def forget_the_dead(self) -> None:
        hints = self._queue.hints
        if hints is not None:
            hints.forget_the_dead()


class WorkerShutdown(Shutdown):
    """A worker may be told twice to finish: by its supervisor, and by whoever tells all processes at once (systemd by default,
    an init of a container). So for a worker only a SIGINT that is not the first signal means *now*."""

    def _decide(self, signum: int) -> threading.Event:
        decided = super()._decide(signum)
        return decided if signum == signal.SIGINT else self.stop


def main(arguments: Sequence[str], load: Callable[[str], TaskQueue] = load) -> int:
    """One worker, as the supervisor starts it; ``load`` finds its queue."""
    app, name, queues, given = arguments
    shutdown = WorkerShutdown()
    settings = Settings(queues=[Priority(each) for each in queues.split(",")])
    parent = os.getppid()
    with on_signals(shutdown), load(app) as queue:
        live = live_settings(queue, json.loads(given))
        log_as_configured(live.config)
        _worker(queue, name, settings, shutdown, lambda: os.getppid() != parent, live=live).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
