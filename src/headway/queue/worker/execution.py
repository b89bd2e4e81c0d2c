"""Running one task: in a process of its own, or in the worker's.

In a process of its own (``isolation="fork"``) a handler may leak, hang, crash or be killed: the worker sees it and goes on.
The child has no database and no Redis; it tells its worker through a pipe what it has to say, and reads from a shared
byte whether it is to stop. In the worker's process (``"none"``) a task costs no fork, and a handler that ends the process
takes the worker with it.
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
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from headway.core.failure import Failure, describe
from headway.core.lifecycle import STOP_SIGNALS, own_handler, signal_name, wait_for_children
from headway.core.text import printable
from headway.errors import HeadwayError
from headway.queue.handlers import Context
from headway.queue.payload import PAYLOAD_LIMIT, holds_zero
from headway.queue.task import Claim
from headway.queue.worker.inline import Interrupts

#: What a handler may return, in bytes of JSON.
RESULT_LIMIT = PAYLOAD_LIMIT
_MESSAGE_LIMIT = 500
#: Bytes of one message through the pipe: a result whose every character is written as an escape, and its frame.
_SAID_LIMIT = 8 * RESULT_LIMIT
#: Parts of the pipe, of 64 KB, that are read together.
_PARTS = 32
#: A process that has said how it ended gets this long to be gone.
EXIT_SECONDS = 2.0

_PR_SET_PDEATHSIG = 1
#: Bits of the byte that worker and task share. The last two say what SIGUSR1 raises in the handler.
_CANCEL, _STOPPING, _TIMED_OUT, _MUST_END = 1, 2, 4, 8
#: Signals that the process of a task handles itself.
_HANDLED = (*STOP_SIGNALS, signal.SIGUSR1)
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before any fork

Report = Callable[[float, str], None]


class TaskCancelled(BaseException):
    """The task was cancelled.

    Raised in a handler that goes on after its task was cancelled. A handler may also raise it itself when `cancelled` is
    true. Not an Exception, so ``except Exception`` lets it through.
    """


class TaskTimeout(BaseException):
    """Raised in a handler that runs longer than its timeout. ``finally`` blocks get `queue_cancel_grace` seconds."""


class TaskTooLarge(BaseException):
    """Raised in a handler with ``isolation="none"`` that uses too much memory. A process of its own is killed."""


class TaskStopped(BaseException):
    """Raised in a handler that still ran when its worker had to end: the task goes back into its queue."""


class CannotBegin(HeadwayError):
    """No process, descriptor or thread is left to run a task with: nothing was begun, and later there may be one."""


class GiveUp(Exception):
    """Raised by a handler: this task will not succeed however often it is tried."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: with a result, or with a failure."""

    result: str | None = None
    failure: Failure | None = None
    outcome: str = "failed"
    retryable: bool = True
    message: str | None = None  # what the handler said last


class RunningTask:
    """What a handler gets: who asked for what, a way to say how far it is, and whether it should stop."""

    __slots__ = ("_cancelled", "_report", "_stopping", "attempts", "id", "kind", "role", "saw_cancelled", "user_id")

    def __init__(
        self,
        claim: Claim,
        report: Report,
        cancelled: Callable[[], bool],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stopping = stopping
        self.id, self.kind, self.user_id, self.role = claim.id, claim.kind, claim.user_id, claim.role
        self.attempts = claim.attempts
        self._report, self._cancelled = report, cancelled
        self.saw_cancelled = False  # `cancelled` was true when the handler asked

    def progress(self, percent: float, message: str = "") -> None:
        """Say how far it is, 0 to 100, and what it does. Cheap: only the newest is written, a few times a second."""
        number = round(float(percent), 6)  # a sum of shares may be 100.00000000000006
        if not 0.0 <= number <= 100.0:
            raise ValueError(f"progress must be 0 to 100 (got {percent})")
        self._report(number, printable(str(message)[:_MESSAGE_LIMIT]))  # no database takes U+0000 or half a pair

    @property
    def cancelled(self) -> bool:
        """Whether the task was cancelled. Return or raise soon: the task ends CANCELLED either way.

        A handler that goes on gets `TaskCancelled` raised in it, and is then killed.
        """
        if self._cancelled():
            self.saw_cancelled = True
        return self.saw_cancelled

    @property
    def stopping(self) -> bool:
        """Whether the worker is to end: what still runs when its time is over goes back into its queue. Only for one who
        can give back by itself what it has not done."""
        return self._stopping()


def perform(task: RunningTask, function: Callable[..., Any], text: str, context: Context | None) -> Ended:
    """Call the handler; whatever it raises is how the run ended."""
    try:
        with (context or nullcontext)():
            value = function(task, json.loads(text))
        if task.saw_cancelled:
            return Ended(failure=Failure("TaskCancelled", "the handler returned because the task was cancelled"))
        return Ended(result=_result(value))
    except GiveUp as error:
        return Ended(failure=describe(error), retryable=False)
    except TaskStopped:
        raise
    except (TaskTimeout, TaskTooLarge, TaskCancelled) as error:
        return ended_by(error)
    except _ResultRefused as error:
        return Ended(failure=Failure("ResultRefused", str(error)), retryable=False)
    except BaseException as error:  # noqa: BLE001 - also SystemExit, KeyboardInterrupt and foreign ones: it is this run's
        return Ended(failure=describe(error))


def ended_by(error: TaskTimeout | TaskTooLarge | TaskCancelled) -> Ended:
    """How a run ended whose handler was ended by us."""
    if isinstance(error, TaskTimeout):
        return Ended(failure=Failure("TimedOut", str(error)), outcome="timeout")
    if isinstance(error, TaskTooLarge):
        return Ended(failure=Failure("MemoryLimit", str(error)), outcome="memory")
    return Ended(failure=Failure("TaskCancelled", "the handler was ended because the task was cancelled"))


def no_result_within(seconds: float | None) -> str:
    return "no result in time" if seconds is None else f"no result within {seconds:g} s"


class _ResultRefused(Exception):
    pass


def _result(value: Any) -> str | None:
    if value is None:
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except Exception as error:  # an object may raise anything while it is encoded
        raise _ResultRefused(f"the handler returned {type(value).__name__}, which is not JSON") from error
    if size > RESULT_LIMIT or holds_zero(text):
        raise _ResultRefused(f"the handler returned {size:,} bytes; at most {RESULT_LIMIT:,} are kept, without U+0000")
    return text


# ---------------------------------------------------------------------------------------------------------------------
# In a process of its own


def rss(pid: int) -> int:
    """Bytes of memory a process has in use; 0 when it is gone, or the system does not say."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


class Horse:
    """The process that runs one task, as its worker sees it. It leads a process group, so that all it started ends too."""

    def __init__(self, claim: Claim, function: Callable[..., Any], text: str, context: Context | None) -> None:
        self.claim = claim
        self.began = time.monotonic()
        self.progress: tuple[float, str] | None = None
        self.ended: Ended | None = None
        self._buffer = bytearray()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or there was none when the process began
                stream.flush()  # or the child would print it a second time
        wait_for_children()  # the application it has loaded may ignore how they end; this process is ours
        worker = os.getpid()
        with ExitStack() as undo:  # what was had before something was refused is given back
            try:
                self._flag = undo.enter_context(mmap.mmap(-1, 1))  # shared with the child: 1 means stop
                self._reading, writing = os.pipe()
                undo.callback(os.close, self._reading)
                undo.callback(os.close, writing)
                # Blocked until the child has installed its handlers: such a signal is neither lost nor kills the child.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
                undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
                self.pid = os.fork()
            except OSError as error:
                raise CannotBegin(f"No process can be started for a task: {error}") from error
            undo.pop_all()
        if self.pid == 0:
            _be_the_horse(claim, function, text, context, writing, self._reading, self._flag, worker, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(writing)
        os.set_blocking(self._reading, False)
        with suppress(OSError):  # the child does the same; whoever comes first
            os.setpgid(self.pid, self.pid)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def ask_to_stop(self) -> None:
        self._flag[0] |= _CANCEL

    def say_stopping(self) -> None:
        self._flag[0] |= _STOPPING

    def raise_in_handler(self, *, timed_out: bool) -> None:
        """Raise `TaskTimeout` or `TaskCancelled` in the handler."""
        self._flag[0] |= _TIMED_OUT if timed_out else _MUST_END
        os.kill(self.pid, signal.SIGUSR1)  # not collected yet, so the pid is its own

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(
            ProcessLookupError
        ):  # a handler may have left its group; it is not collected yet, so the pid is its
            os.kill(self.pid, signal.SIGKILL)

    def rss(self) -> int:
        return rss(self.pid)

    def wait(self, seconds: float) -> bool:
        """Read what it says for up to ``seconds``; whether it has ended."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN | select.POLLHUP)
        poll.poll(max(0.0, seconds) * 1000)
        # Whatever it started may keep the pipe open: its own word that it ended is enough, and so is its death. That is
        # looked for before the pipe is read, so all it said is in there.
        is_dead = self._is_dead()
        if self._receive() and self.ended is None and not is_dead:
            return False
        self._reap()
        return True

    def _is_dead(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _receive(self) -> bool:
        """Take what lies in the pipe; False when it has ended. Of a handler that writes without end only so much at a time: its
        lease is to be renewed, and its timeout holds. More than that a process that died cannot have left."""
        for _ in range(_PARTS):
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
            if size > _SAID_LIMIT:
                self._buffer.clear()
                return
            if len(self._buffer) < 4 + size:
                return
            with suppress(ValueError):  # the handler wrote into our pipe: what it says is not heard
                self._hear(json.loads(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]

    def _hear(self, message: object) -> None:
        """What has another form than what `_be_the_horse` sends was written by the handler, and is nothing."""
        match message:
            case {"progress": [int() | float() as percent, str() as said]} if 0.0 <= percent <= 100.0:
                self.progress = (percent, said)
            case {"ended": [str() | None as result, failure, str() as outcome, bool() as retryable]}:
                match failure:
                    case None:
                        self.ended = Ended(result, None, outcome, retryable)
                    case [str() as type, str() as text, str() as frame, str() | None as detail]:
                        self.ended = Ended(result, Failure(type, text, frame, detail), outcome, retryable)

    def _reap(self) -> None:
        os.close(self._reading)
        self._flag.close()
        deadline = time.monotonic() + EXIT_SECONDS
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            time.sleep(0.001)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.kill()  # it closed the pipe and does not end, or it left processes behind
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
        """End it without a result."""
        self.kill()
        while not self.wait(1.0):
            self.kill()


def _be_the_horse(
    claim: Claim,
    function: Callable[..., Any],
    text: str,
    context: Context | None,
    writing: int,
    reading: int,
    flag: mmap.mmap,
    parent: int,
    mask: set[int],
) -> NoReturn:
    """The child. It never returns into the worker's code, whatever the handler does. ``mask``: signals blocked before."""
    status = 1
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        os.close(reading)
        _end_with(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGALRM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _leave_the_end_to(os.getpid())

        def asked() -> BaseException | None:
            if flag[0] & _TIMED_OUT:
                return TaskTimeout(no_result_within(claim.timeout))
            return TaskCancelled("the task was cancelled") if flag[0] & _MUST_END else None

        interrupts = Interrupts(asked)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        lock, me, pipe = threading.Lock(), os.getpid(), os.fstat(writing).st_ino

        def send(message: dict[str, Any]) -> None:
            if os.getpid() != me:
                return  # a process the handler forked came back into our code: it speaks for nobody
            if os.fstat(writing).st_ino != pipe:
                raise OSError("the handler closed the pipe to its worker, and opened a file in its place")
            raw = json.dumps(message).encode()
            with interrupts.deferred(), lock:  # half a message would hide the ones after it
                _write_all(writing, struct.pack(">I", len(raw)) + raw)

        last = [0.0]

        def report(percent: float, said: str) -> None:
            # A handler may say it in a tight loop: ten times a second is enough for anybody who looks.
            now = time.monotonic()
            if now - last[0] >= 0.1 or percent >= 100.0:
                last[0] = now
                send({"progress": [percent, said]})

        task = RunningTask(claim, report, lambda: bool(flag[0] & _CANCEL), lambda: bool(flag[0] & _STOPPING))
        try:
            with interrupts.armed():
                ended = perform(task, function, text, context)
        except (TaskTimeout, TaskCancelled) as late:  # raised after the handler had returned
            ended = ended_by(late)
        failure = ended.failure
        send(
            {
                "ended": [
                    ended.result,
                    None if failure is None else [failure.type, failure.message, failure.frame, failure.detail],
                    ended.outcome,
                    ended.retryable,
                ]
            }
        )
        status = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(status)


def _leave_the_end_to(horse: int) -> None:
    """Let the worker alone end this process.

    systemd and the init of a container may send SIGTERM to every process. The worker ends this one when its drain is over.
    A handler instead of SIG_IGN: programs inherit an ignored signal. Forked children have the default handlers.
    """

    def pass_over(number: int, _: FrameType | None) -> None:
        if os.getpid() != horse:  # forked by C code, without Python's hooks
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in STOP_SIGNALS:
        own_handler(number, pass_over)


def _end_with(parent: int) -> None:
    """Be killed when the worker dies: its task is given to another, and would run twice at the same time. Where the system
    cannot do that (other than Linux) the handler goes on, and what it returns is heard by nobody."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def _write_all(descriptor: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[os.write(descriptor, view) :]
