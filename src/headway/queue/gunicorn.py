"""Gunicorn hooks: one supervisor beside the web workers, started with them, replaced when it dies, drained at the end.

In gunicorn.conf.py:

    from headway.queue.gunicorn import hooks

    when_ready, on_exit, on_reload = hooks("shop:headway", workers=2, max_workers=4)

The hooks run in Gunicorn's parent process, never in its workers, so it does not matter how many of those there are.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.retry import RetryPolicy
from headway.telemetry import Log

log = Log("queue")

Hook = Callable[[Any], None]  # Gunicorn gives its arbiter, which has no type of its own
_LOOK = 0.5
_HEALTHY = 10.0
_DIED = RetryPolicy(retries=0, base=0.5, cap=30.0)


class Guard:
    """Keeps one supervisor running.

    It is started by ``posix_spawn``: `subprocess` waits for the end of a pipe, which a worker that Gunicorn forks at that
    moment would hold open for ever. Its end is looked for, not waited for, because Gunicorn collects every child.
    """

    def __init__(self, command: list[str], *, drain: float) -> None:
        self._command, self._drain = command, drain
        self._stop = threading.Event()
        self._pid: int | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headway-supervisor", daemon=True)
            self._thread.start()

    def reload(self) -> None:
        """Have it start its workers anew, with the code as it is now; what they run is finished first."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        self._stop.set()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain + 10.0
        while not self._has_ended():
            if time.monotonic() > deadline:
                log.warning("the supervisor did not end in time and is killed")
                self._signal(signal.SIGKILL)
            time.sleep(0.05)
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        deaths = 0
        while not self._stop.is_set():
            began = time.monotonic()
            # A process group of its own: a Ctrl-C at the terminal goes to Gunicorn, and Gunicorn ends us.
            try:
                self._pid = os.posix_spawn(
                    self._command[0],
                    [*self._command, "--parent", str(os.getpid())],
                    os.environ,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        *((os.POSIX_SPAWN_CLOSE, number) for number in _handed_down()),
                    ],
                    setpgroup=0,
                )
            except OSError as error:  # no memory, no process left: later there may be
                self._pid = None
                log.warning("the supervisor cannot be started; it is tried again", error=str(error))
            while not self._has_ended() and not self._stop.wait(_LOOK):
                pass
            if self._stop.is_set():
                return
            deaths = deaths + 1 if time.monotonic() - began < _HEALTHY else 1
            log.warning("the supervisor ended and is started again", count=deaths)
            self._stop.wait(_DIED.delay(deaths))

    def _has_ended(self) -> bool:
        if self._pid is None:
            return True
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # Gunicorn collected it
            return True

    def _signal(self, number: int) -> None:
        if self._pid is not None and not self._has_ended():
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)


def _handed_down() -> list[int]:
    """Descriptors that a process started now would have too: Gunicorn's sockets, which it hands down to its own successor. A
    supervisor that had them would keep the port of a Gunicorn that was killed, until its tasks are through."""
    with suppress(OSError):  # not Linux
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
        return [number for number in numbers if number > 2 and _is_inheritable(number)]
    return []


def _is_inheritable(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # it was the list's own, or is closed by now
        return False


def hooks(
    app: str, *, workers: int | None = None, max_workers: int | None = None, drain: float = 20.0
) -> tuple[Hook, Hook, Hook]:
    """``when_ready, on_exit, on_reload`` for gunicorn.conf.py. How many workers there are the settings say, unless it is
    said here. ``drain`` stays below Gunicorn's graceful_timeout."""
    command = [sys.executable, "-m", "headway", "worker", "--app", app, "--drain", f"{drain:g}"]
    if workers is not None:
        command += ["--workers", str(workers)]
    if max_workers is not None:
        command += ["--max-workers", str(max_workers)]
    guard = Guard(command, drain=drain)

    def when_ready(_server: Any) -> None:
        guard.start()

    def on_exit(_server: Any) -> None:
        guard.stop()

    def on_reload(_server: Any) -> None:
        guard.reload()

    return when_ready, on_exit, on_reload
