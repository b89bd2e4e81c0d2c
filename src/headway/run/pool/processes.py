"""The worker processes of a run, as seen by the parent."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

from headway.core.connection_pools import discard_inherited
from headway.core.lifecycle import Budget, check_descriptors, signal_name
from headway.errors import HeadwayError
from headway.ledger import Item
from headway.run.output.console import Console
from headway.run.pool.runner import Settings
from headway.run.worker import worker as worker_process
from headway.run.worker.protocol import Slots, Wire, work_frame
from headway.run.worker.worker import WorkerOrder

RECALL = '{"recall":true}'
STOP = '{"stop":true}'
#: Descriptors to keep free when a worker starts. The database is closed for a fork and reopened, and results, pages
#: and events need files.
SPARE_FILES = 16


#: Seconds that workers get at the end to close what their set-up has opened.
CLOSE_SECONDS = 15.0


class CannotStart(HeadwayError):
    """The system refuses to start another worker process."""

    hint = "Use fewer workers, or raise the limits of this process (ulimit -n, ulimit -u) and the machine."


class WorkerHandle:
    """The parent's view of one worker process."""

    def __init__(self, pid: int, wire: Wire, slots: Slots, name: str, *, alone: bool) -> None:
        self.pid, self.wire, self.slots, self.name = pid, wire, slots, name
        #: Whether this worker runs suspects one at a time, to find the item that kills its process.
        self.alone = alone
        #: Items sent to the worker and not reported yet.
        self.out: dict[int, Item] = {}
        #: Output of items whose outcome has not arrived yet.
        self.printed: dict[int, str] = {}
        #: Failures reported so far, and the total at which the worker gives the rest back.
        self.failures = 0
        self.most_failures: int | None = None
        self.reported = False
        self.recalled = False
        self.stopping = False
        #: The process of a spawned worker. Keep the reference: Python reaps Popen objects that are garbage-collected.
        self.process: subprocess.Popen[bytes] | None = None

    def running(self) -> list[tuple[int, float]]:
        """Return (idx, start on the monotonic clock) of running, unreported items."""
        return [(idx, began) for idx, began in self.slots.running() if idx in self.out]

    def begun(self) -> list[int]:
        """Return the items the worker has begun and not reported.

        It runs items in the order they were sent, so these are all up to the last one begun by any slot.
        """
        last = self.slots.last()
        order = list(self.out)
        upto = max((place for place, idx in enumerate(order) if idx in last), default=-1)
        return order[: upto + 1]

    @property
    def may_fail(self) -> int:
        """How many more failures the worker may report before it gives back the rest."""
        return 0 if self.most_failures is None or not self.out else max(0, self.most_failures - self.failures)

    def kill(self) -> None:
        """Kill the worker and every process in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # the function may have moved the process to another group
            os.kill(self.pid, signal.SIGKILL)

    def last_frames(self) -> Iterator[Any]:
        """Yield the frames a dead worker had already sent.

        The stream may stay open (see `Crew.dead`), so reading stops after 0.2 s.
        """
        deadline = Budget(0.2)
        self.wire.socket.settimeout(0.2)
        with suppress(TimeoutError):
            while self.wire.receive() and not deadline.spent:
                pass
        yield from self.wire.frames()


class Crew:
    """All worker processes of a run, forked or spawned.

    The parent talks to them through sockets in the caller's selector.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        order: WorkerOrder,
        settings: Settings,
        mark: str,
        console: Console | None,
    ) -> None:
        self._selector, self._order, self._mark, self._console = selector, order, mark, console
        self._package = _package(order) if settings.start.how == "spawn" else None
        #: Workers started so far.
        self.started = 0
        self._members: dict[int, WorkerHandle] = {}
        #: Number of processes, and items each one runs at once.
        self.processes, self._slots = (settings.workers, 1) if order.mode == "process" else (1, settings.workers)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    @property
    def busy(self) -> int:
        """Number of items running now."""
        return sum(len(worker.slots.running()) for worker in self)

    @property
    def idle(self) -> bool:
        """Whether no worker has items."""
        return not any(worker.out for worker in self)

    @property
    def size(self) -> int:
        """Maximum number of items running at once."""
        return self.processes * self._slots

    def common(self, wanted: int) -> list[WorkerHandle]:
        """Return the workers that take any item, starting some to reach ``wanted``.

        There are never more than `processes`.
        """
        found = [worker for worker in self if not worker.alone and not worker.stopping]
        found += [self._start(alone=False) for _ in range(min(wanted, self.processes) - len(found))]
        return found

    def examiner(self) -> WorkerHandle:
        """Return the worker that runs suspects; start it if needed."""
        return next((worker for worker in self if worker.alone), None) or self._start(alone=True)

    def give(self, worker: WorkerHandle, items: Sequence[Item], *, may_fail: int | None = None) -> None:
        """Send items to a worker. After ``may_fail`` more failures the worker gives back what it has not begun."""
        worker.most_failures = None if may_fail is None else worker.failures + may_fail
        for item in items:
            worker.out[item.idx] = item
        self.tell(worker, work_frame(items, worker.most_failures))

    def tell(self, worker: WorkerHandle, frame: str) -> None:
        """Send a frame to a worker."""
        with suppress(OSError):  # it has just died: its items come back when its stream ends
            worker.wire.send(frame)
        self.watch(worker)

    def watch(self, worker: WorkerHandle) -> None:
        """Watch the socket for writability while data waits to be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.wire.pending else 0)
        self._selector.modify(worker.wire, events, worker)

    def recall(self, worker: WorkerHandle) -> None:
        """Ask the worker to return items it has not begun."""
        if not worker.recalled:
            worker.recalled = True
            self.tell(worker, RECALL)

    def dismiss(self, worker: WorkerHandle) -> None:
        """Ask the worker to exit after its current items."""
        if not worker.stopping:
            worker.stopping = True
            self.tell(worker, STOP)

    def resize(self, size: int) -> None:
        """Change how many items run at once.

        Surplus workers finish the items they have begun. A process has a fixed number of slots, so in thread and
        async mode a new process replaces the old one.
        """
        current = [worker for worker in self if not worker.alone and not worker.stopping]
        if self._order.mode == "process":
            self.processes, surplus = size, current[size:]
        else:
            self._slots, surplus = size, current
        for worker in surplus:
            self.dismiss(worker)

    def dead(self) -> list[WorkerHandle]:
        """Return the workers whose process has ended.

        Their streams may still be open: a child of the function can hold the socket.
        """
        return [worker for worker in self if _has_ended(worker.pid)]

    def remove(self, worker: WorkerHandle) -> tuple[str, bool]:
        """Forget a worker whose process or stream ended.

        Return how it ended and whether its function closed our socket. After such a cut-off, the items that ran at
        the end are not necessarily to blame.
        """
        patience = Budget(1.0)
        while not (ended := _has_ended(worker.pid)) and not patience.spent:
            time.sleep(0.002)  # a process closes its descriptors shortly before it has ended
        cut_off = worker.slots.cut_off or not ended
        status = _end(worker)
        self._selector.unregister(worker.wire)
        del self._members[worker.pid]
        worker.wire.close()
        return ("lost its connection to the run" if cut_off else _how_it_died(status)), cut_off

    def close(self) -> None:
        """Stop all workers; kill those that still have items."""
        deadline = Budget(2.0 if self._order.setup is None else CLOSE_SECONDS)
        for worker in self:
            if worker.out:
                worker.kill()
            else:
                self.dismiss(worker)
        for worker in self:
            while not _has_ended(worker.pid) and not deadline.spent:
                time.sleep(0.002)
            _end(worker)
            worker.wire.close()
            worker.slots.close()
        self._members.clear()
        if self._package is not None:
            self._package.close()

    def _start(self, *, alone: bool) -> WorkerHandle:
        try:
            check_descriptors(SPARE_FILES)
            ours, theirs = socket.socketpair()
            count = 1 if alone else self._slots
            if self._package is not None:
                slots, process = self._spawn(theirs, count, self._package)
                pid = process.pid
            else:
                slots, process = Slots(count), None
                pid = os.fork()
        except OSError as error:
            raise CannotStart(f"Worker process {len(self) + 1} cannot be started: {error.strerror}.") from error
        self.started += 1
        if pid == 0:
            self._become_worker(ours, theirs, slots)
        theirs.close()
        name = f"{self._mark} worker {self.started}"
        worker = self._members[pid] = WorkerHandle(pid, Wire(ours, blocking=False), slots, name, alone=alone)
        worker.process = process
        self._selector.register(worker.wire, selectors.EVENT_READ, worker)
        return worker

    def _spawn(self, theirs: socket.socket, count: int, package: IO[bytes]) -> tuple[Slots, subprocess.Popen[bytes]]:
        """Start a worker that inherits only its socket, the page and the package."""
        with tempfile.TemporaryFile() as page:
            page.truncate(Slots.size(count))
            descriptors = theirs.fileno(), page.fileno(), package.fileno()
            code = "from headway.run.worker.worker import spawned; spawned()"
            streams = {} if self._console is None else self._console.streams()
            process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, (*descriptors, count))],
                pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True,
                stdout=streams.get("stdout"), stderr=streams.get("stderr"),
            )  # fmt: skip
            return Slots(count, page.fileno()), process

    def _become_worker(self, ours: socket.socket, theirs: socket.socket, slots: Slots) -> NoReturn:
        """Run the worker in the forked child.

        It closes all inherited parent sockets; otherwise the siblings would not notice the parent's death.
        """
        try:
            # A new session: its own process group and no terminal. Reading a terminal from the background would stop
            # it.
            os.setsid()
            ours.close()
            for sibling in self:
                sibling.wire.close()
            self._selector.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if self._console is not None:
                self._console.enter_worker()
            discard_inherited()
            worker_process.main(Wire(theirs, blocking=True), slots, self._order)
        finally:
            os._exit(70)


def _package(order: WorkerOrder) -> IO[bytes]:
    """Write what a spawned worker needs to an unnamed file.

    No other process can write to it, so unpickling it in our children is safe.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - `Crew.close` closes it
    pickle.dump({"path": sys.path, "work": pickle.dumps(order)}, file)
    file.flush()
    return file


def _has_ended(pid: int) -> bool:
    """Return whether the process has ended. It is not reaped, so its pid cannot be reused yet."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # the calling program reaps every child, or ignores SIGCHLD


def _end(worker: WorkerHandle) -> int | None:
    """Kill the worker and its process group, reap it and return its status.

    Return None if the calling program reaped it first. The pid may then belong to another process and is not
    signalled.
    """
    try:
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        worker.kill()
        status = os.waitpid(worker.pid, 0)[1]
        if worker.process is not None:
            worker.process.returncode = status  # already reaped: Popen must not wait again
        return status
    except ChildProcessError:
        return None


def _how_it_died(status: int | None) -> str:
    if status is None:
        return "ended, its status is unknown (this program ignores SIGCHLD, or waits for all its children)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by {signal_name(number)}" + (" (out of memory?)" if number == signal.SIGKILL else "")
    return f"ended by itself with code {os.WEXITSTATUS(status)}"
