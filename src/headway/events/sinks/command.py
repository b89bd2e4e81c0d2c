"""The sink ``command:/path/to/program argument``: a program that reads the event from its stdin."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress

from headway.errors import InvalidInput, Unavailable
from headway.events.deadline import Watchdog
from headway.events.envelope import Event
from headway.events.outbox import EventRefused
from headway.events.sinks.sink import digest
from headway.telemetry import redact

#: Seconds a program may run.
COMMAND_DEADLINE = 10.0

#: Exit code of a program that will never take the event (EX_DATAERR of sysexits).
NEVER = 65


class CommandSink:
    """Runs a program with the event as JSON on its stdin, without a shell. Exit code 0 means delivered."""

    job: str | None = None
    types: Sequence[str] | None = None

    def __init__(self, arguments: Iterable[str], timeout: float = COMMAND_DEADLINE, *, name: str = "") -> None:
        self._arguments = list(arguments)
        if not self._arguments or not self._arguments[0] or any("\0" in word for word in self._arguments):
            raise InvalidInput("A sink's command names no program.", hint="Use command:/path/to/program argument")
        self._timeout = timeout
        self._watchdog = Watchdog()
        program = os.path.basename(self._arguments[0])
        self.name = name or f"command {program} {digest(shlex.join(self._arguments))}"

    def deliver(self, event: Event) -> None:
        """Run the program. Raises `EventRefused` for exit code 65 and `Unavailable` for other failures."""
        import subprocess
        import tempfile

        program = self._arguments[0]
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # Its exit code would be unknown, so each delivery would count as failed and be repeated for ever.
            raise Unavailable(
                f"The program {program} was not started: this process ignores SIGCHLD, so exit codes are unknown.",
                hint="Leave SIGCHLD at its default, or let `headway relay` deliver.",
            )
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(event.as_json().encode() + b"\n")
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    self._arguments, stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr,
                    start_new_session=True,  # a group of its own, to kill its children with it
                )  # fmt: skip
            except OSError as error:
                raise Unavailable(f"The program {program} cannot be started: {error.strerror}.") from error
            with self._watchdog.over(lambda: _kill(process.pid), self._timeout) as late:
                status: int | None = 0
                try:
                    status = _status(process.pid)
                finally:
                    if status is not None:
                        # The zombie still reserves its pid, so this kills only what it left in its group.
                        _kill(process.pid)
                    process.wait()  # its returncode is 0 also when another part of this process has reaped it
            if status == 0:
                return
            how = f"it took longer than {self._timeout:g} s" if late() else f"it ended with {status}"
            if status is None:
                how = "its exit code is unknown (this process waits for all its children)"
            stderr.seek(0)
            why = redact(stderr.read(2_000).decode("utf-8", "replace").strip())[:300]
            message = f"The program {program} did not take the event: {how}" + (f": {why}" if why else "")
            raise EventRefused(message) if status == NEVER else Unavailable(message)

    def close(self) -> None:
        """Kill a running program."""
        self._watchdog.abort()


def _status(pid: int) -> int | None:
    """Wait for a child and return its exit code, negative for a signal, without reaping it.

    Returns None when another part of this process has reaped it: a SIGCHLD handler that waits for every child.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    assert ended is not None  # without WNOHANG it waits
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
