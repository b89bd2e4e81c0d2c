"""Handlers in a forked process (``isolation="fork"``), which may leak, hang, crash or be killed.

The child has no database and no Redis. It reports through a pipe and reads from a shared byte whether to stop.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from headway.core.connection_pools import discard_inherited
from headway.core.failure import Failure
from headway.core.lifecycle import STOP_SIGNALS, own_handler, signal_name, wait_for_children
from headway.errors import HeadwayError, RetryLater
from headway.queue.handlers import Context
from headway.queue.task import Claim
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import (
    RESULT_LIMIT,
    CannotStart,
    Ended,
    RunningTask,
    TaskCancelled,
    TaskTimeout,
    ended_by,
    no_result_within,
    perform,
    rss,
)
from headway.queue.worker.heartbeat import PULSE, Renewal, Watch
from headway.queue.worker.process_state import Interrupts

if TYPE_CHECKING:
    from headway.queue.worker.worker import Worker

#: Maximum bytes of one message in the pipe: a result whose every character is an escape, and its frame.
_FRAME_LIMIT = 8 * RESULT_LIMIT
#: Reads of up to 64 KB from the pipe before the lease and the timeout are checked again.
_READS = 32
#: Seconds for a process to exit after it has sent its outcome.
EXIT_SECONDS = 2.0
#: Seconds between two progress reports from the child.
_REPORT_SECONDS = 0.1

_PR_SET_PDEATHSIG = 1
#: Bits of the shared byte. The last two say what SIGUSR1 raises in the handler.
_CANCEL, _STOPPING, _TIMED_OUT, _MUST_END = 1, 2, 4, 8
#: Signals that the child handles itself.
_HANDLED = (*STOP_SIGNALS, signal.SIGUSR1)
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before any fork


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a handler: its task, function, payload (JSON text), context and further arguments."""

    claim: Claim
    function: Callable[..., Any]
    text: str
    context: Context | None
    extra: tuple[Any, ...] = ()  # the value of the handler's set-up


class ForkRunner:
    """Runs claimed tasks one after the other, each in a forked process."""

    def __init__(self, queue: TaskQueue, worker: Worker, context: Context | None) -> None:
        self._queue, self._worker = queue, worker
        self._context = _child_context(queue, context)

    def run(self) -> None:
        """Run the first held task. The worker's other claims are released first."""
        claims = self._worker.claims
        claim = claims.first
        if not claims.may_start(claim):
            return
        claims.keep_only(claim)
        claims.remove_first()
        text = self._worker.decode(claim)
        if text is None:
            return
        call = Call(
            claim,
            self._queue.handlers[claim.kind].function,
            text,
            self._context,
            self._worker.setups.arguments(claim.kind),
        )
        try:
            process = TaskProcess(call)
        except CannotStart:
            claims.put_back(claim)  # the worker releases it with its other claims
            raise
        ended = self._supervise(process, claim)
        if ended is not None:
            self._worker.outcomes.add(claim, ended, process.seconds)
            self._worker.outcomes.record()

    def suspend(self) -> None:
        """Nothing: no thread is left between two tasks."""

    def _supervise(self, process: TaskProcess, claim: Claim) -> Ended | None:
        """Wait for the process; return the outcome, or None if the task was released or belongs to another worker."""
        worker = self._worker
        watch, renewal = Watch(claim, worker.settings), Renewal(worker.settings)
        reported: tuple[float, str] | None = None
        while not process.wait(PULSE):
            if worker.is_stopping:
                process.announce_stop()
            if worker.must_end:
                process.abandon()
                if watch.reason is None and (process.ended is None or process.ended.failure is not None):
                    worker.claims.release([claim])
                    return None
                break
            if process.progress is not None and process.progress != reported:
                reported = process.progress
                watch.cancelling |= worker.record_progress(claim, *reported)
            if renewal.is_due:
                lost, cancelling = worker.renew(claim)
                if lost:
                    process.abandon()
                    return None
                watch.cancelling |= cancelling
            worker.show()
            if watch.cancelling:
                process.request_cancel()
            step = watch.next_step(process.seconds, process.rss())
            if step == "kill":
                process.abandon()
                break
            if step == "raise" and watch.reason is not None:
                process.raise_in_handler(timed_out=watch.reason.outcome == "timeout")
        ended = process.ended
        assert ended is not None
        if watch.reason is not None and ended.failure is not None:
            ended = watch.reason  # the worker ended the run: record its reason, not the signal
        return ended if process.progress is None else replace(ended, message=process.progress[1])


def _child_context(queue: TaskQueue, context: Context | None) -> Context:
    """Wrap ``context`` for the child: discard inherited connections, call the fork hooks, then enter it."""

    @contextmanager
    def entered() -> Iterator[None]:
        discard_inherited()
        for hook in queue.fork_hooks:
            hook()
        with nullcontext() if context is None else context():
            yield

    return entered


# ---------------------------------------------------------------------------------------------------------------------
# The worker's side


class TaskProcess:
    """The child that runs one task, seen from its worker. It leads a process group, so that its own children end with it."""

    def __init__(self, call: Call) -> None:
        """Fork. Raises `CannotStart` if the system refuses."""
        self._began = time.monotonic()
        self.progress: tuple[float, str] | None = None
        self.ended: Ended | None = None
        self._buffer = bytearray()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or absent since the process started
                stream.flush()  # or the child would print it a second time
        wait_for_children()  # the application may have set SIGCHLD to be ignored; we need the exit status
        parent = os.getpid()
        with ExitStack() as undo:  # if a step fails, release the resources of the steps before
            try:
                self._flag = undo.enter_context(mmap.mmap(-1, 1))  # shared with the child
                self._reading, writing = os.pipe()
                undo.callback(os.close, self._reading)
                undo.callback(os.close, writing)
                # Blocked until the child has installed its handlers: such a signal is neither lost nor kills the child.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
                undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
                self.pid = os.fork()
            except OSError as error:
                raise CannotStart(f"No process can be started for a task: {error}") from error
            undo.pop_all()
        if self.pid == 0:
            _run_child(call, self._reading, writing, self._flag, parent, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(writing)
        os.set_blocking(self._reading, False)
        with suppress(OSError):  # the child does the same, and either may be first
            os.setpgid(self.pid, self.pid)

    @property
    def seconds(self) -> float:
        """Seconds since the fork."""
        return time.monotonic() - self._began

    def request_cancel(self) -> None:
        """Make `RunningTask.cancelled` true."""
        self._flag[0] |= _CANCEL

    def announce_stop(self) -> None:
        """Make `RunningTask.stopping` true."""
        self._flag[0] |= _STOPPING

    def raise_in_handler(self, *, timed_out: bool) -> None:
        """Raise `TaskTimeout` or `TaskCancelled` in the handler."""
        self._flag[0] |= _TIMED_OUT if timed_out else _MUST_END
        os.kill(self.pid, signal.SIGUSR1)  # not reaped yet, so the pid is not reused

    def kill(self) -> None:
        """Kill the process and its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # the handler may have left its group
            os.kill(self.pid, signal.SIGKILL)

    def rss(self) -> int:
        """Return the memory of the process in bytes."""
        return rss(self.pid)

    def wait(self, seconds: float) -> bool:
        """Read messages for up to ``seconds``; return whether the run has ended."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN | select.POLLHUP)
        poll.poll(max(0.0, seconds) * 1000)
        # A process that the handler started may hold the pipe open, so the outcome or the death of the child is enough. The
        # death is checked before the pipe is read: then everything it sent is in the pipe.
        is_dead = self._is_dead()
        if self._receive() and self.ended is None and not is_dead:
            return False
        self._reap()
        return True

    def _is_dead(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _receive(self) -> bool:
        """Read the pipe; return whether it is still open.

        The reads are limited, so that a handler that writes without end does not keep the worker from renewing its lease.
        """
        for _ in range(_READS):
            try:
                part = os.read(self._reading, 65536)
            except BlockingIOError:
                return True
            if not part:
                return False
            self._buffer += part
            self._parse()
        return True

    def _parse(self) -> None:
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from(">I", self._buffer)
            if size > _FRAME_LIMIT:
                self._buffer.clear()
                return
            if len(self._buffer) < 4 + size:
                return
            with suppress(ValueError):  # not JSON: the handler wrote into the pipe
                self._accept(json.loads(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]

    def _accept(self, message: object) -> None:
        """Store a message. Ignore one of another form than `_Child` sends: the handler wrote it."""
        match message:
            case {"progress": [int() | float() as percent, str() as text]} if 0.0 <= percent <= 100.0:
                self.progress = (percent, text)
            case {"ended": [str() | None as result, failure, str() as outcome, bool() as retryable]}:
                match failure:
                    case None:
                        self.ended = Ended(result, None, outcome, retryable)
                    case [str() as type, str() as text, str() as frame, str() | None as detail]:
                        failure = Failure(type, text, frame, detail)
                        self.ended = Ended(result, failure, outcome, retryable, later=_later_of(message))

    def _reap(self) -> None:
        """Collect the child. One that does not exit in time is killed, and so is its process group."""
        os.close(self._reading)
        self._flag.close()
        deadline = time.monotonic() + EXIT_SECONDS
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            time.sleep(0.001)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.kill()
        if not pid:
            _, status = os.waitpid(self.pid, 0)
        if self.ended is None:
            how = (
                f"was killed by {signal_name(os.WTERMSIG(status))}"
                if os.WIFSIGNALED(status)
                else f"exited with status {os.WEXITSTATUS(status)}"
            )
            self.ended = Ended(failure=Failure("ProcessDied", f"the task's process {how} without a result"))

    def abandon(self) -> None:
        """Kill the process and reap it."""
        self.kill()
        while not self.wait(1.0):
            self.kill()


def _later_of(message: object) -> RetryLater | None:
    """Return the postponement in a message; None if there is none, or the handler wrote another form."""
    match message:
        case {"later": [seconds, reason, scope]}:
            with suppress(HeadwayError):
                return RetryLater(seconds, reason, scope)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The child's side


def _run_child(call: Call, reading: int, writing: int, flag: mmap.mmap, parent: int, mask: set[int]) -> NoReturn:
    """Run the child. It never returns into the worker's code, whatever the handler does."""
    status = 1
    try:
        os.close(reading)
        _Child(call, writing, flag).run(parent, mask)
        status = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(status)


class _Child:
    """The forked process: runs the handler and sends its outcome."""

    def __init__(self, call: Call, writing: int, flag: mmap.mmap) -> None:
        self._call, self._writing, self._flag = call, writing, flag
        self._pid, self._pipe = os.getpid(), os.fstat(writing).st_ino
        self._lock = threading.Lock()
        self._interrupts: Interrupts | None = None
        self._reported_at = 0.0

    def run(self, parent: int, mask: set[int]) -> None:
        """Run the handler and send its outcome. ``mask``: the signals that were blocked before the fork."""
        self._prepare(parent)
        self._interrupts = Interrupts(self._interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        ended = self._perform(self._interrupts)
        failure = ended.failure
        parts = None if failure is None else [failure.type, failure.message, failure.frame, failure.detail]
        later = ended.later and [ended.later.seconds, ended.later.reason, ended.later.scope]
        self._send({"ended": [ended.result, parts, ended.outcome, ended.retryable], "later": later})

    def _prepare(self, parent: int) -> None:
        with suppress(OSError):
            os.setpgid(0, 0)
        _die_with(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGALRM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _ignore_stop_signals(self._pid)

    def _perform(self, interrupts: Interrupts) -> Ended:
        call, flag = self._call, self._flag
        task = RunningTask(call.claim, self._report, lambda: bool(flag[0] & _CANCEL), lambda: bool(flag[0] & _STOPPING))
        try:
            with interrupts.armed():
                return perform(task, call.function, call.text, call.context, call.extra)
        except (TaskTimeout, TaskCancelled) as late:  # raised after the handler had returned
            return ended_by(late)

    def _interrupt(self) -> BaseException | None:
        """Return the exception that the worker wants to be raised."""
        if self._flag[0] & _TIMED_OUT:
            return TaskTimeout(no_result_within(self._call.claim.timeout))
        return TaskCancelled("the task was cancelled") if self._flag[0] & _MUST_END else None

    def _report(self, percent: float, message: str) -> None:
        """Send progress, at most every `_REPORT_SECONDS`: a handler may report in a tight loop."""
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_SECONDS or percent >= 100.0:
            self._reported_at = now
            self._send({"progress": [percent, message]})

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            return  # a process that the handler forked has returned into our code
        if os.fstat(self._writing).st_ino != self._pipe:
            raise OSError("the handler closed the pipe to its worker, and opened a file in its place")
        assert self._interrupts is not None
        raw = json.dumps(message).encode()
        with self._interrupts.deferred(), self._lock:  # a partial message would garble the ones after it
            _write_all(self._writing, struct.pack(">I", len(raw)) + raw)


def _ignore_stop_signals(child: int) -> None:
    """Leave it to the worker to end this process.

    systemd and the init of a container may send SIGTERM to every process. The worker ends this one when its drain is over.
    A handler instead of SIG_IGN: programs inherit an ignored signal. Forked children have the default handlers.
    """

    def ignore(number: int, _: FrameType | None) -> None:
        if os.getpid() != child:  # forked by C code, without Python's hooks
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in STOP_SIGNALS:
        own_handler(number, ignore)


def _die_with(parent: int) -> None:
    """Have this process killed when the worker dies: another worker gets the task, which must not run twice at once.

    Other systems than Linux cannot do that. There the handler continues, and its result is dropped.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)


def _write_all(descriptor: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[os.write(descriptor, view) :]
