"""A slot of a fleet: a queue task that works on a job, using the machinery of a local run.

The slot claims blocks of the job's items, runs them and records the outcomes. It ends when nothing is left to claim,
when its worker stops, or when other tasks wait for their turn. The sweeper submits missing slots again
(`headway.run.fleet.start.Fleets`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from headway.core.lifecycle import Shutdown
from headway.core.retry import LaterLimit, RetryPolicy
from headway.core.setup import Setup, checked
from headway.errors import HeadwayError, InvalidInput, NotFound, SetupFailed, StaleClaim
from headway.ledger import Item, Job, JobInfo, Ledger, Recorded
from headway.ledger.control import Control
from headway.ledger.fleet import fleet
from headway.ledger.fleet.fleet import Fleet
from headway.ledger.fleet.share import BLOCK_MOST, Share
from headway.queue.handlers import Handler
from headway.queue.store import fleet_slots
from headway.queue.task_queue import TaskQueue
from headway.queue.worker import app, supervisor
from headway.queue.worker.execution import RunningTask
from headway.run import function as functions
from headway.run.display.display import open_display
from headway.run.fleet import code_version as stamps
from headway.run.output.results import Keep
from headway.run.pool.backlog import BYTES, Backlog
from headway.run.pool.local import LocalRunner
from headway.run.pool.loop import RunLoop
from headway.run.pool.runner import HeldJob, RunContext, Settings
from headway.run.program import Program, Work
from headway.telemetry import Log

log = Log("run")

#: The task kind of slots, reserved for Headway.
KIND = "headway.slot"
#: Target duration of a block, seconds. If many slots wait for the job's row, it is at least `CLAIM_TIMES` the
#: duration of a claim, which keeps claims a small part of the time. It never exceeds `BLOCK_SECONDS_MOST`, because a
#: single slot takes over the block of a dead one.
BLOCK_SECONDS = 2.0
CLAIM_TIMES = 20.0
BLOCK_SECONDS_MOST = 30.0
#: Interval between commits of a slot, seconds. Many slots share one server; committing 20 ms items one by one costs
#: it over a millisecond each. A killed slot repeats at most this much work.
COMMIT_SECONDS = 0.25
#: A slot ends after this many seconds without a claim. The sweeper submits a new one when there is work.
IDLE_SECONDS = 2.0
#: After this many seconds a slot ends if other tasks wait.
TURN_SECONDS = 20.0
#: Interval for checking for surplus slots and waiting tasks, seconds.
CHECK_SECONDS = 2.0


def add_slots(queue: TaskQueue) -> TaskQueue:
    """Let the workers of a queue take part in fleets."""

    def slot(task: RunningTask, payload: Any) -> dict[str, Any]:
        url = queue.backend.url
        if url is None:
            raise InvalidInput("The queue's database has no URL, so its workers cannot run fleet jobs.")
        return serve(task, str(payload["job"]), int(payload["run"]), url, queue.backend.decode)

    # Retry almost without limit: a slot holds nothing that its end could lose.
    queue.handlers[KIND] = Handler(KIND, slot, timeout=None, retries=1000, retry_delay=1.0, isolation="fork")
    return queue


def load(spec: str) -> TaskQueue:
    """Load the queue of ``spec`` and add slots to it.

    Without ``spec`` the queue comes from the settings and has only slots.
    """
    if spec:
        queue = app.load(spec)
        stamps.remember_loaded()
        return add_slots(queue) if is_shared(queue.backend.url) else queue
    queue = TaskQueue.from_settings()
    if not is_shared(queue.backend.url):
        raise InvalidInput(
            "Without --app a worker only runs fleet jobs, and a fleet needs PostgreSQL.",
            hint="Name one: HEADWAY_DATABASE=postgresql://user@host/name. Or an application: --app module:queue",
        )
    return add_slots(queue)


def is_shared(url: str | None) -> bool:
    """Return whether several machines can use the database."""
    return url is not None and url.startswith(("postgresql:", "postgres:"))


def serve(task: RunningTask, id: str, run: int, url: str, decode: Callable[[str, str], str]) -> dict[str, Any]:
    """Run one slot from start to end; return a summary for the task."""
    with Ledger.open(url, create=False) as ledger:
        try:
            job = ledger.job(id)
        except NotFound:
            return {"ended": "the job was forgotten"}
        known = fleet.read(ledger.database, job.no)
        if known is None or known.run != run:
            return {"ended": "the run is over"}
        try:
            order = json.loads(decode(seal_id(job.no, run), known.work))
            work, setup = _load(order)
        except HeadwayError as error:
            return _refuse(ledger, known, id, str(error))
        differs = stamps.difference(order["stamp"], _stamp(order, work))
        if differs:
            if not order["any_version"]:
                return _refuse(ledger, known, id, f"its version differs: {differs}")
            log.warning("the version differs, which was allowed", job=id, reason=differs)
        return _work_off(task, ledger, id, known, order, work, setup)


def seal_id(job: int, run: int) -> str:
    """Return the id that binds a run's encrypted order to it.

    Task ids contain no space, so no task payload can pass as an order.
    """
    return f"fleet {job}.{run}"


def _load(order: dict[str, Any]) -> tuple[Work, Setup | None]:
    """Return the work of a slot, and its checked set-up."""
    if order["program"] is not None:
        return Program(**order["program"]), None
    name = order.get("setup")  # orders of an earlier version have none
    if name is None:
        return functions.load(order["function"]), None
    return functions.load(order["function"], 2), checked(functions.load_any(name), loop=order["mode"] == "async")


def _stamp(order: dict[str, Any], work: Work) -> stamps.Stamp:
    if order["program"] is not None:
        return stamps.of_program(order["program"]["words"][0])
    assert callable(work)
    return stamps.of_function(work)


def _refuse(ledger: Ledger, known: Fleet, id: str, why: str) -> dict[str, Any]:
    """Decline the job; say why in the log and in the job's note."""
    text = f"A worker on {socket.gethostname()} refused the job: {why}"
    log.error("this worker refused a fleet job", job=id, reason=why)
    fleet.note(ledger.database, known.job, known.run, text)
    return {"ended": text}


def _work_off(
    task: RunningTask,
    ledger: Ledger,
    id: str,
    known: Fleet,
    order: dict[str, Any],
    work: Work,
    setup: Setup | None,
) -> dict[str, Any]:
    shutdown = Shutdown()
    share = SlotShare(ledger, id, known, task, shutdown)
    settings = Settings(
        workers=order["workers"], mode=order["mode"], policy=RetryPolicy(**order["policy"]),
        timeout=order["timeout"], rate=order["rate"], last_pass=False, commit_seconds=COMMIT_SECONDS,
        later_limit=LaterLimit.parse(order.get("later_limit", str(LaterLimit()))),
    )  # fmt: skip
    loop = RunLoop(
        HeldJob(share, share.hold, lambda _: share.renew_share()), settings,
        RunContext(open_display("none", stream=None), shutdown), Keep(**order["keep"]),
        lambda parts: LocalRunner(parts, work, setup),
        lambda _, on_damaged: SharedBacklog(share, order["workers"], on_damaged),
    )  # fmt: skip
    try:
        ending = loop.run()
    except StaleClaim:
        return {"ended": "the fleet no longer holds the job"}
    except SetupFailed as error:
        return _refuse(ledger, known, id, str(error))
    finally:
        share.leave()
    return {"ended": share.why or "nothing was left to claim", "done": ending.done, "failures": ending.failures}


class SlotShare(Share):
    """A share that also decides when its slot ends.

    Besides requests to the job, the worker may be stopping, there may be surplus slots, or other tasks may wait for
    their turn.
    """

    def __init__(self, ledger: Ledger, id: str, known: Fleet, task: RunningTask, shutdown: Shutdown) -> None:
        super().__init__(ledger.database, id, known, f"slot {socket.gethostname()}.{os.getpid()}")
        self._task, self._shutdown = task, shutdown
        self._began = self._checked_at = time.monotonic()
        self.why = ""

    def asked(self, run: int) -> Control:
        if not self.why and (why := self._reason()):
            self.why = why
            if not self._shutdown.stop.is_set():  # the job may be stopping: a second request would abandon its items
                self._shutdown.request(signal.SIGINT)  # SIGINT lets running items finish without a time limit
        return super().asked(run)

    def _reason(self) -> str:
        if self._task.stopping or self._task.cancelled:
            self.excuse_running()  # items that exceed the grace period are killed and not charged
            return "its worker is stopping" if self._task.stopping else "its task was cancelled"
        now = time.monotonic()
        if now - self._checked_at < CHECK_SECONDS:
            return ""
        self._checked_at = now
        if self._is_surplus():
            return "the job has more slots than requested"
        if now - self._began > TURN_SECONDS and fleet_slots.others_wait(self._database, party(self.no), self._task.id):
            return "other tasks were waiting"
        return ""

    def _is_surplus(self) -> bool:
        older = fleet_slots.count_older(self._database, KIND, party(self.no), self._task.id)
        return older >= wanted_slots(self, self.fleet)


def party(job: int) -> str:
    """Return the partition key of a job's slots, by which jobs take turns."""
    return f"fleet.{job}"


def wanted_slots(job: Job, known: Fleet) -> int:
    """Return how many slots the job should have.

    That is the last request, else the number given at the start, else one per worker.
    """
    asked = Job(job.database, job.no, job.id).asked(known.run)
    if asked.workers is not None:
        return asked.workers
    if known.slots is not None:
        return known.slots
    return max(1, fleet_slots.count_workers(job.database))


class SharedBacklog(Backlog):
    """The items that a slot has claimed, block by block."""

    def __init__(self, share: SlotShare, at_once: int, on_damaged: Callable[[Recorded], object]) -> None:
        super().__init__(share, on_damaged)
        self._share, self._at_once, self._report_damaged = share, at_once, on_damaged
        self.next_due = None
        self._size = at_once
        self._enough = at_once - 1  # claim only while at most this many items are held
        self._claimed_at: float | None = None
        self._held_then = 0  # items held after the last claim
        self._ask_at = 0.0
        self._misses = 0
        self._idle_since: float | None = None

    def refill(self, now: float) -> None:
        self._drop_lost()
        if now < self._ask_at or self._share.is_over or len(self.held) > self._enough or self.slot_suspects:
            return
        wanted = self._size if self._size > self._at_once else self._at_once - len(self.held)
        began, before = time.monotonic(), len(self.held)
        items = self._share.claim_some(max(1, wanted), on_damaged=self._report_damaged)
        if items:
            self._adapt(began, time.monotonic(), before, items)
            suspects = self._share.suspects
            self._add([item for item in items if item.idx not in suspects])
            self.slot_suspects.extend(item for item in items if item.idx in suspects)
            self.held.update(item.idx for item in self.slot_suspects)
            # Half of the items held now, not of those requested: near the end of a job each claim returns fewer.
            self._enough = max(self._at_once - 1, len(self.held) // 2)
            self._misses, self._idle_since = 0, None
            return
        self._claimed_at = None
        self._misses += 1
        self._ask_at = now + min(1.0, 0.05 * 2**self._misses)
        if not self.held and self._idle_since is None:
            self._idle_since = now

    def _adapt(self, began: float, ended: float, before: int, items: Sequence[Item]) -> None:
        """Choose the size of the next block from this slot's throughput.

        The last claim took from ``began`` to ``ended``, when ``before`` items were held. The next block should last
        the target duration and fit into memory. Throughput counts items finished since the previous claim, not items
        received, because claims shrink near the end of a job. The wait for the claim is excluded. Otherwise more
        waiting slots would lead to smaller blocks and so to more claims.
        """
        if self._claimed_at is not None:
            aim = min(BLOCK_SECONDS_MOST, max(BLOCK_SECONDS, CLAIM_TIMES * (ended - began)))
            rate = (self._held_then - before) / max(began - self._claimed_at, 1e-3)
            self._size = round(min(8.0 * self._size, max(0.25 * self._size, rate * aim)))
        self._claimed_at, self._held_then = ended, before + len(items)
        bytes_each = sum(len(item.payload or "") for item in items) / len(items)
        self._size = max(self._at_once, min(self._size, BLOCK_MOST, int(BYTES / max(bytes_each, 1.0))))

    def _drop_lost(self) -> None:
        """Drop items that other slots have claimed meanwhile."""
        if self._share.lost:
            lost, self._share.lost = self._share.lost, set()
            for waiting in (self.ready, self.slot_suspects):
                items = list(waiting)
                waiting.clear()
                waiting.extend(item for item in items if item.idx not in lost)
                self.held.difference_update(
                    item.idx for item in items if item.idx in lost
                )  # items already with a worker are refused when recorded

    def fetch_last_pass(self) -> bool:
        return False  # dead letters of the last pass are claimed like other items

    def info(self) -> JobInfo | None:
        return None  # a slot reports only its own counts

    def find_more(self, now: float) -> bool:
        return False  # the fleet decides whether items are left

    def due_at(self, moment: float) -> None:
        """Do nothing: any slot may claim the item when it is due."""

    @property
    def empty(self) -> bool:
        idle = self._idle_since is not None and time.monotonic() - self._idle_since > IDLE_SECONDS
        return not self.held and (self._share.is_over or idle)


if __name__ == "__main__":
    sys.exit(supervisor.main(sys.argv[1:], load))
