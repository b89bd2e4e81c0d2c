"""A program that runs once per item.

    headway run --items urls.txt -- ./convert.sh {} --out {key}.png

The command is an argument list and never shell text: an item's content is one argument or part of one. Exit status 0
means done, and stdout is the result. Exit status 75 (EX_TEMPFAIL) postpones the item, as `headway.RetryLater` does. Any
other end is a failure, whose cause is the status or signal with the last line of stderr.

Each program runs in a process group that it shares with no other program. When it ends or times out, the whole group
is killed. So is a group that the program made for itself, as timeout(1) and setsid(1) do. A guard process (`_Guard`)
beside each worker kills these groups when the worker dies.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from headway.core.failure import Failure, reported
from headway.core.lifecycle import LOOK_SECONDS, Stopwatch
from headway.errors import InvalidInput, RetryLater, is_delay
from headway.ledger import canonical
from headway.run.output.capture import LIMIT, Captured
from headway.telemetry import redact

#: Seconds between SIGTERM and SIGKILL for a program that timed out.
TERM_SECONDS = 1.0
#: Maximum size of stdout with ``--stdout json``, bytes.
JSON_LIMIT = 1 << 20
TIMED_OUT = "TimedOut"

#: Exit status of a program that asks to run later: EX_TEMPFAIL of sysexits.h.
LATER_STATUS = 75
#: Default delay of such a program, seconds.
LATER_SECONDS = 30.0
#: Its last line on stderr, if it names the delay itself.
_RETRY_AFTER = re.compile(r"Retry-After:\s*(\d{1,9}(?:\.\d{1,6})?)\s*", re.IGNORECASE | re.ASCII)

#: ``{}`` or ``{name}``; doubled braces are an escape.
_PLACEHOLDER = re.compile(r"\{\{(?P<literal>[A-Za-z_][\w.-]*)?\}\}|\{(?P<name>[A-Za-z_][\w.-]*)?\}")
#: Further placeholders of GNU parallel, which are refused. Passed on literally, they would be the same for every
#: item, for example as an output file. ``${#}`` is shell syntax and ``{{.}}`` is a template's, so both are allowed.
_PARALLEL = re.compile(r"(?<![$\{])\{(?:\.|//?|/\.|#|%)\}(?!\})")
_BROKEN = (errno.E2BIG, errno.ENOEXEC)
#: Limits of this process or machine. The item is not to blame; the program can start once others have ended.
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)

# Waits until every writer of its stdin is gone, then reads the worker's process groups and kills them.
_GUARD = 'trap "" INT TERM HUP; read -r end; read -r now <&3; for group in $now; do kill -s KILL -- "-$group"; done'


class ProgramFailed(Exception):
    """The program failed for an item."""

    def __init__(self, failure: Failure, printed: str = "", *, retryable: bool = True) -> None:
        super().__init__(failure.text)
        self.failure, self.printed, self.retryable = failure, printed, retryable


class CannotStartNow(Exception):
    """No descriptor, process or memory is left to start a program. No attempt was made."""


class Program:
    """The validated command of a run."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: bool = False,
        stdout: Literal["text", "json"] = "text",
        key: str | None = None,
        later: float = LATER_SECONDS,
    ) -> None:
        """Validate the command.

        ``key`` is the field that names an item, if any. ``later`` is the delay of exit status 75, in seconds.
        """
        if not is_delay(later):
            raise InvalidInput(f"--later must be from 0 to 2,592,000 seconds (got {later!r:.60}).")
        self._later = later
        if not words or not words[0]:
            raise InvalidInput("There is no program after --.", hint="headway run --items FILE -- program {}")
        self._words, self._stdin, self._stdout, self._key = tuple(words), stdin, stdout, key
        self._path = _find(words[0])
        self.name = os.path.basename(words[0])
        for word in words[1:]:
            if foreign := _PARALLEL.search(word):
                raise InvalidInput(
                    f"{foreign[0]} is a placeholder of GNU parallel and not supported here.",
                    hint="{index} is the number of an item. For a part of its name use a shell: "
                    '-- sh -c \'convert "$1" "${1%.*}.png"\' sh {}',
                )
        names = [name for word in words[1:] for name in _names(word)]
        if not names and not stdin:
            raise InvalidInput(
                "The command has no placeholder, so it would do the same for every item.",
                hint="Write {} where the item goes, {FIELD} for one of its fields, or --stdin to give it on standard input.",
            )

    @property
    def text(self) -> str:
        """The command as text, redacted, with how stdin and stdout are used. It identifies the program of a job."""
        return redact(shlex.join(self._words)) + self._stdin * " < item" + (self._stdout == "json") * " > json"

    def check(self, payload: Any) -> None:
        """Raise `InvalidInput` if the item does not fit the command."""
        self._arguments(0, payload)

    def run(self, idx: int, payload: Any, timeout: float | None) -> tuple[Any, str]:
        """Run the program for one item; return its result and its output.

        Raises `ProgramFailed`, `RetryLater` for exit status 75, or `CannotStartNow` if a system limit kept it from starting.
        """
        try:
            words = self._arguments(idx, payload)
        except InvalidInput as error:  # the item was registered for a different command
            raise ProgramFailed(reported("InvalidInput", str(error), self.name), retryable=False) from None
        out = Captured(2 * JSON_LIMIT if self._stdout == "json" else LIMIT)
        err = Captured()
        try:
            status = self._execute(words, payload, out, err, timeout)
        except OSError as error:
            if error.errno in _LIMITS:
                raise CannotStartNow(error.strerror) from None
            hint = {
                errno.E2BIG: "; pass long items on standard input: --stdin",
                errno.ENOEXEC: "; does the script start with a line such as #!/bin/sh?",
            }.get(error.errno or 0, "")
            failure = reported("CannotStart", f"{self.name}: {error.strerror}{hint}", self.name)
            raise ProgramFailed(failure, retryable=error.errno not in _BROKEN) from None
        printed = _both(out, err)
        if status == LATER_STATUS:
            raise self._postponement(err, words)
        if status != 0:
            raise ProgramFailed(self._failure(status, err, words, timeout), printed)
        return self._result(out, printed), printed

    # ---- the command of an item ------------------------------------------------------------------------------------

    def _arguments(self, idx: int, payload: Any) -> list[str]:
        words = [
            self._words[0],
            *(
                _PLACEHOLDER.sub(
                    lambda found: (
                        self._value(found["name"] or "", idx, payload)
                        if not found[0].startswith("{{")
                        else found[0][1:-1]
                    ),
                    word,
                )
                for word in self._words[1:]
            ),
        ]
        if any("\0" in word for word in words):
            raise InvalidInput("the item has a NUL character, which arguments cannot contain.", hint="Use --stdin.")
        return words

    def _value(self, name: str, idx: int, payload: Any) -> str:
        if name == "":
            return _plain(payload)
        if name == "index":
            return str(idx)
        fields = payload if isinstance(payload, dict) else {}
        if name == "key" and (self._key is not None or "key" not in fields):
            return str(idx) if self._key is None else _plain(fields.get(self._key))
        if fields.get(name) is None:
            what = "no fields" if not isinstance(payload, dict) else f"no field {name!r}"
            known = ", ".join(f"{{{field}}}" for field in list(fields)[:8])
            raise InvalidInput(
                f"the command has {{{name}}}, and the item has {what}.",
                hint=f"Use {known + ', ' if known else ''}{{}}, {{key}} or {{index}}; for literal braces write {{{{{name}}}}}.",
            )
        return _plain(fields[name])

    # ---- running it ------------------------------------------------------------------------------------------------

    def _execute(self, words: list[str], payload: Any, out: Captured, err: Captured, timeout: float | None) -> int:
        """Run the program and return its exit status.

        A program killed by a signal returns the negative signal number, one that timed out returns `_TIME_IS_UP`.
        """
        guard = _Guard.of_this_process()
        with (
            guard.group() as group,
            _pipe() as (out_reading, out_writing),
            _pipe() as (err_reading, err_writing),
        ):
            actions: list[Any] = [(os.POSIX_SPAWN_DUP2, out_writing, 1), (os.POSIX_SPAWN_DUP2, err_writing, 2)]
            with self._input(payload) as action:
                pid = os.posix_spawn(
                    self._path, words,
                    dict(os.environb),  # as bytes: decoding and encoding each variable took a tenth of the time
                    file_actions=[*actions, action], setpgroup=group,
                    setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these, and children would inherit that
                )  # fmt: skip
            streams, overdue = {out_reading: out, err_reading: err}, False
            try:
                guard.note(pid)
                overdue = _follow(pid, group, streams, timeout)
            finally:
                # The pid cannot be reused before it is reaped, so a group with that number belongs to this program.
                _end_groups(group, pid, signal.SIGKILL)
                guard.forget(pid)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            for descriptor, captured in streams.items():
                _read_output(descriptor, captured, most=64)
            return _TIME_IS_UP if overdue else status

    @contextmanager
    def _input(self, payload: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the spawn action for stdin: the item, or nothing.

        The item is in a file, because a pipe would have to be fed concurrently.
        """
        if not self._stdin:
            yield os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0
            return
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write((_plain(payload) + "\n").encode())
            file.seek(0)
            yield os.POSIX_SPAWN_DUP2, file.fileno(), 0

    # ---- results and failures --------------------------------------------------------------------------------------

    def _result(self, out: Captured, printed: str) -> Any:
        if self._stdout == "text":
            return out.text().rstrip("\r\n") or None
        text = out.text()
        try:
            if not out.whole or len(text) > JSON_LIMIT:
                raise ValueError(f"it is longer than {JSON_LIMIT:,} bytes")
            return json.loads(text, parse_constant=_refuse_constant) if text.strip() else None
        except (ValueError, RecursionError) as error:
            failure = reported("ResultNotJson", f"{self.name} did not print JSON: {error}", self.name)
            raise ProgramFailed(failure, printed, retryable=False) from None

    def _failure(self, status: int, err: Captured, words: Sequence[str], timeout: float | None) -> Failure:
        if status == _TIME_IS_UP:
            return reported(TIMED_OUT, f"{self.name} did not end within {timeout:g} s", self.name, err.text())
        kind = f"exit {status}" if status > 0 else _signal_name(-status)
        line = self._without_values(err.last_line(), words)
        return reported(kind, line or f"{self.name} wrote nothing to stderr", self.name, err.text())

    def _postponement(self, err: Captured, words: Sequence[str]) -> RetryLater:
        """Return the delay: the last line of stderr if that is ``Retry-After: N``, or else the default."""
        lines = err.text().rstrip().splitlines()
        found = _RETRY_AFTER.fullmatch(lines[-1].strip()) if lines else None
        reason = lines[-2 if found else -1].strip() if len(lines) > (found is not None) else ""
        seconds = float(found[1]) if found and is_delay(float(found[1])) else self._later
        return RetryLater(seconds, self._without_values(reason, words) or f"{self.name} ended with exit status 75")

    def _without_values(self, line: str, words: Sequence[str]) -> str:
        """Replace the item's values by their placeholders, so that similar ends share one text."""
        for given, filled in sorted(zip(self._words, words, strict=True), key=lambda pair: -len(pair[1])):
            if given != filled and len(filled) >= 3:
                line = line.replace(filled, given)
        return line


_TIME_IS_UP = -1000


def _follow(pid: int, group: int, streams: dict[int, Captured], timeout: float | None) -> bool:
    """Capture output until the program ends; return whether it timed out.

    The caller kills what is left in the process group. Otherwise such processes could hold the streams open or run
    forever.
    """
    poll = select.poll()
    for descriptor in streams:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    ended = _pidfd(pid)
    if ended is not None:
        poll.register(ended, select.POLLIN)
    limits = [] if timeout is None else [(signal.SIGTERM, timeout), (signal.SIGKILL, timeout + TERM_SECONDS)]
    watch, overdue = Stopwatch(), False
    try:
        while True:
            left = limits[0][1] - watch.elapsed() if limits else None
            if left is not None and left <= 0:
                overdue = True
                _end_groups(group, pid, limits.pop(0)[0])
                continue
            patience = 3600.0 if left is None else min(left, LOOK_SECONDS)
            for descriptor, _ in poll.poll(1000 * (patience if ended is not None else min(patience, 0.02)) + 1):
                if descriptor in streams:
                    _read_output(descriptor, streams[descriptor], most=1)
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return overdue
    finally:
        if ended is not None:
            os.close(ended)


def _read_output(descriptor: int, captured: Captured, *, most: int) -> None:
    """Read available output, at most ``most`` times."""
    with suppress(BlockingIOError):
        for _ in range(most):
            captured.add(os.read(descriptor, LIMIT))


def _end_groups(group: int, pid: int, number: signal.Signals) -> None:
    """Signal the program's group, and the group it may have created."""
    for each in (group, pid):
        with suppress(ProcessLookupError, PermissionError):  # the group is empty, or none of its processes are ours
            os.killpg(each, number)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once the process ends; None if unsupported."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class _Guard:
    """A process that kills the program groups of a dead worker.

    It notices the death of its worker however that died. It is a small shell with a fixed script. Its name differs
    from ours, so killing all Headway processes by name spares it.
    """

    _lock = threading.Lock()
    _current: tuple[int, _Guard] | None = None

    @classmethod
    def of_this_process(cls) -> _Guard:
        """Return the guard of this process; start it on first use."""
        with cls._lock:
            if cls._current is None or cls._current[0] != os.getpid():
                cls._current = os.getpid(), cls()
            return cls._current[1]

    def __init__(self) -> None:
        self._groups: list[int] = []
        self._free: list[int] = []
        self._programs: set[int] = set()
        self._changing = threading.Lock()
        # The groups are in a file that the guard reads once, at the end. A pipe would have to be drained all the
        # time.
        with ExitStack() as opened:  # closes the descriptors if the guard cannot be started
            self._file = _nameless_file()
            opened.callback(os.close, self._file)
            reading, self._alive = os.pipe()  # the kernel closes this end when the process dies
            opened.callback(os.close, self._alive)
            actions: list[Any] = [
                (os.POSIX_SPAWN_DUP2, reading, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, self._file, 3),
            ]
            try:
                os.posix_spawn("/bin/sh", ["sh", "-c", _GUARD], {}, file_actions=actions, setpgroup=0)
            finally:
                os.close(reading)
            opened.pop_all()

    @contextmanager
    def group(self) -> Iterator[int]:
        """Yield a process group for a program.

        The guard knows the group before the program joins it. So the program is also killed if its worker dies while
        starting it.
        """
        with self._changing:
            group = self._free.pop() if self._free else self._new_group()
        try:
            yield group
        finally:
            with self._changing:
                self._free.append(group)

    def _new_group(self) -> int:
        """Create a process group and return its number.

        Its leader exits at once and is never reaped. This zombie reserves the group number until this process ends,
        and signals do not affect it. So the group can be killed and reused for program after program.
        """
        group = os.posix_spawn("/bin/sh", ["sh", "-c", ":"], {}, setpgroup=0)
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)
        self._groups.append(group)
        self._tell()
        return group

    def note(self, pid: int) -> None:
        """Record a running program. It may create its own group, whose number is its pid."""
        with self._changing:
            self._programs.add(pid)
            self._tell()

    def forget(self, pid: int) -> None:
        """Remove a program that has ended."""
        with self._changing:
            self._programs.discard(pid)
            self._tell()

    def _tell(self) -> None:
        """Write the groups for the guard, which reads only the first line.

        The rest of an older, longer line stays behind it.
        """
        with suppress(OSError):  # the disk is full: go on without the guard
            os.pwrite(self._file, f"{' '.join(map(str, (*self._groups, *self._programs)))}\n".encode(), 0)


def _nameless_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("headway-groups")  # in memory: programs can start even if the disk is full
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe and keep both ends open here.

    So only output wakes the reader. A program that closes its streams just before it ends does not.
    """
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _find(word: str) -> str:
    """Return the program's path; raise `InvalidInput` if it cannot be run."""
    path = shutil.which(word)
    if path is not None:
        return path
    a_pipeline = any(character in word for character in " |&;<>$")
    if _names(word) and not a_pipeline:
        raise InvalidInput(
            f"The program itself cannot be a placeholder: {word}.", hint="Name the program, then {} as its argument."
        )
    there = Path(word)
    if "/" in word and there.exists():
        what = "is not a file" if not there.is_file() else "cannot be executed"
        raise InvalidInput(
            f"The program {word} {what}.", hint=f"Allow it: chmod +x {word}" if there.is_file() else None
        )
    if a_pipeline:
        hint = "It is not given to a shell. For a pipeline: -- sh -c '... \"$1\" | ...' sh {}"
    elif re.fullmatch(r"[\w.]+:[\w.]+", word):
        hint = f"For a Python function leave out the --: headway run {word} ..."
    else:
        hint = "Check its name; a program in this directory is ./NAME"
    raise InvalidInput(f"There is no program {word!r}.", hint=hint)


def _names(word: str) -> list[str]:
    return [found["name"] or "" for found in _PLACEHOLDER.finditer(word) if not found[0].startswith("{{")]


def _plain(value: Any) -> str:
    """Return a string as it is, any other value as JSON."""
    return value if isinstance(value, str) else canonical(value)


def _both(out: Captured, err: Captured) -> str:
    """Return stdout and stderr as one text to keep. Each gets a heading if both have content."""
    parts = [(name, text) for name, text in (("stdout", out.text()), ("stderr", err.text())) if text]
    text = parts[0][1] if len(parts) == 1 else "".join(f"--- {name} ---\n{text.rstrip()}\n" for name, text in parts)
    if len(text) <= LIMIT // 4:
        return text
    bounded = Captured()
    bounded.add(text.encode())
    return bounded.text()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


Work = Callable[..., object] | Program
