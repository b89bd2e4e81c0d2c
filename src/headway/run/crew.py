"""The worker processes of a run, as their parent sees them."""

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

from headway.connection_pools import discard_inherited
from headway.errors import HeadwayError
from headway.ledger import Item
from headway.lifecycle import Budget, check_descriptors, signal_name
from headway.run import worker as worker_process
from headway.run.console import Console
from headway.run.program import Work
from headway.run.results import Keep
from headway.run.wire import Slots, Wire, work_frame

RECALL = '{"recall":true}'
STOP = '{"stop":true}'
#: Files that this process can open besides when a worker was started: the database is closed for a fork and opened again,
#: and there are the file of results, pages, events.
SPARE_FILES = 16


class CannotStart(HeadwayError):
    """The machine does not let another worker process start."""

    hint = "Use fewer workers, or raise the limits of this process (ulimit -n, ulimit -u) and the machine."


class WorkerHandle:
    """One of them."""

    def __init__(self, pid: int, wire: Wire, slots: Slots, name: str, *, alone: bool) -> None:
        self.pid, self.wire, self.slots, self.name = pid, wire, slots, name
        #: Runs suspects, one at a time, to find the item that kills its process.
        self.alone = alone
        #: What it has been given and has not reported.
        self.out: dict[int, Item] = {}
        #: What items printed whose end it has not reported yet.
        self.printed: dict[int, str] = {}
        #: How many failures it has reported, and how many it may have had in all before it gives the rest back.
        self.failures = 0
        self.most_failures: int | None = None
        self.reported = False
        self.recalled = False
        self.stopping = False
        #: Of one that was started anew: kept, because Python waits by itself for processes that nobody keeps.
        self.process: subprocess.Popen[bytes] | None = None

    def running(self) -> list[tuple[int, float]]:
        """(idx, since when by the monotonic clock) of what it runs right now and has not reported."""
        return [(idx, began) for idx, began in self.slots.running() if idx in self.out]

    def begun(self) -> list[int]:
        """What it has begun and not reported: it takes items in the order they were sent, so that is everything up to
        the one a slot began last."""
        last = self.slots.last()
        order = list(self.out)
        upto = max((place for place, idx in enumerate(order) if idx in last), default=-1)
        return order[: upto + 1]

    @property
    def may_fail(self) -> int:
        """How many further failures it may report before it gives back what it has not begun."""
        return 0 if self.most_failures is None or not self.out else max(0, self.most_failures - self.failures)

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # a function may have put the process into another group
            os.kill(self.pid, signal.SIGKILL)

    def last_frames(self) -> Iterator[Any]:
        """What it had still sent, once it is no more. Only the end of the stream may not come: see `Crew.dead`."""
        deadline = Budget(0.2)
        self.wire.socket.settimeout(0.2)
        with suppress(TimeoutError):
            while self.wire.receive() and not deadline.spent:
                pass
        yield from self.wire.frames()


class Crew:
    """All of them: forked from this process or started anew, talked to through sockets of the caller's selector."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        function: Work,
        *,
        start: str,
        mode: str,
        size: int,
        mark: str,
        timeout: float | None,
        keep: Keep,
        console: Console | None,
    ) -> None:
        self._selector = selector
        self._function, self._mode, self._timeout, self._keep, self._console = function, mode, timeout, keep, console
        self._mark = mark
        self._package = _package(function, mode, timeout, keep) if start == "spawn" else None
        #: How many were started in all.
        self.started = 0
        self._members: dict[int, WorkerHandle] = {}
        #: Processes, and how many items each of them runs at once.
        self.processes, self._slots = (size, 1) if mode == "process" else (1, size)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    @property
    def busy(self) -> int:
        """How many items run right now."""
        return sum(len(worker.slots.running()) for worker in self)

    @property
    def idle(self) -> bool:
        """Nobody has anything."""
        return not any(worker.out for worker in self)

    @property
    def size(self) -> int:
        """How many items are to run at once."""
        return self.processes * self._slots

    def common(self, wanted: int) -> list[WorkerHandle]:
        """Those that take any item, at least ``wanted`` of them (as far as that is allowed)."""
        found = [worker for worker in self if not worker.alone and not worker.stopping]
        found += [self._start(alone=False) for _ in range(min(wanted, self.processes) - len(found))]
        return found

    def examiner(self) -> WorkerHandle:
        """The one that runs suspects."""
        return next((worker for worker in self if worker.alone), None) or self._start(alone=True)

    def give(self, worker: WorkerHandle, items: Sequence[Item], *, may_fail: int | None = None) -> None:
        """Send items. ``may_fail``: after so many further failures it gives back what it has not begun."""
        worker.most_failures = None if may_fail is None else worker.failures + may_fail
        for item in items:
            worker.out[item.idx] = item
        self.tell(worker, work_frame(items, worker.most_failures))

    def tell(self, worker: WorkerHandle, frame: str) -> None:
        with suppress(OSError):  # it has just died: the end of its stream tells us, and what it held comes back then
            worker.wire.send(frame)
        self.watch(worker)

    def watch(self, worker: WorkerHandle) -> None:
        """Look out for room in its socket as long as something waits to be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.wire.pending else 0)
        self._selector.modify(worker.wire, events, worker)

    def recall(self, worker: WorkerHandle) -> None:
        """Ask for what it has not begun."""
        if not worker.recalled:
            worker.recalled = True
            self.tell(worker, RECALL)

    def dismiss(self, worker: WorkerHandle) -> None:
        """Let it end when it has done what it has."""
        if not worker.stopping:
            worker.stopping = True
            self.tell(worker, STOP)

    def resize(self, size: int) -> None:
        """Have ``size`` items run at once from now on; whoever is too many finishes what it has begun. How many slots a
        process has is fixed when it starts, so threads and loops go on in a new one."""
        current = [worker for worker in self if not worker.alone and not worker.stopping]
        if self._mode == "process":
            self.processes, surplus = size, current[size:]
        else:
            self._slots, surplus = size, current
        for worker in surplus:
            self.dismiss(worker)

    def dead(self) -> list[WorkerHandle]:
        """Workers that have ended. Their streams need not have: what the function started may have our socket."""
        return [worker for worker in self if _has_ended(worker.pid)]

    def remove(self, worker: WorkerHandle) -> tuple[str, bool]:
        """Forget one whose process or stream has ended; how it ended, and whether it was cut off from us: then its
        function closed our socket, and what it ran at its end need not be what did it."""
        patience = Budget(1.0)
        while not (ended := _has_ended(worker.pid)) and not patience.spent:
            time.sleep(0.002)  # a process closes its descriptors a moment before it has ended
        cut_off = worker.slots.cut_off or not ended
        status = _end(worker)
        self._selector.unregister(worker.wire)
        del self._members[worker.pid]
        worker.wire.close()
        return ("lost its connection to the run" if cut_off else _how_it_died(status)), cut_off

    def close(self) -> None:
        """End all of them, by force whoever holds something."""
        deadline = Budget(2.0)
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
        """Start a worker that has nothing of this process but its end of the socket, the page and the package."""
        with tempfile.TemporaryFile() as page:
            page.truncate(Slots.size(count))
            descriptors = theirs.fileno(), page.fileno(), package.fileno()
            code = "from headway.run.worker import spawned; spawned()"
            streams = {} if self._console is None else self._console.streams()
            process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, (*descriptors, count))],
                pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True,
                stdout=streams.get("stdout"), stderr=streams.get("stderr"),
            )  # fmt: skip
            return Slots(count, page.fileno()), process

    def _become_worker(self, ours: socket.socket, theirs: socket.socket, slots: Slots) -> NoReturn:
        """In the child. Every other end of ours must be closed here, or siblings would not notice our death."""
        try:
            # A group of its own, and no terminal, for it and what it starts: who asks there from the background is stopped.
            os.setsid()
            ours.close()
            for sibling in self:
                sibling.wire.close()
            self._selector.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if self._console is not None:
                self._console.enter_worker()
            discard_inherited()
            wire = Wire(theirs, blocking=True)
            worker_process.main(wire, slots, self._function, mode=self._mode, timeout=self._timeout, keep=self._keep)
        finally:
            os._exit(70)


def _package(function: Work, mode: str, timeout: float | None, keep: Keep) -> IO[bytes]:
    """What a worker that is started anew has to know. The file has no name: nobody else can write into it, and the pickle
    is read by our own children only."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the crew
    pickle.dump({"path": sys.path, "work": pickle.dumps((function, mode, timeout, keep))}, file)
    file.flush()
    return file


def _has_ended(pid: int) -> bool:
    """Whether the process has ended. It is left to be waited for: until then nobody else gets its number."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # the program that called us waits for every child, or ignores SIGCHLD


def _end(worker: WorkerHandle) -> int | None:
    """End the worker, if it has not ended, and what its function left behind in its group; its exit status. None if the
    program that called us was quicker to ask for it: then its number may be somebody else's by now, and is left alone."""
    try:
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        worker.kill()
        status = os.waitpid(worker.pid, 0)[1]
        if worker.process is not None:
            worker.process.returncode = status  # it was waited for
        return status
    except ChildProcessError:
        return None


def _how_it_died(status: int | None) -> str:
    if status is None:
        return "ended, nobody knows how (this program ignores SIGCHLD, or waits for all its children)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by {signal_name(number)}" + (" (out of memory?)" if number == signal.SIGKILL else "")
    return f"ended by itself with code {os.WEXITSTATUS(status)}"
