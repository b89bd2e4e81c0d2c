"""Gunicorn hooks that run one supervisor of task workers beside the web workers.

In gunicorn.conf.py:

    from headway.queue.gunicorn import hooks

    when_ready, on_exit, on_reload = hooks("shop:headway", workers=2, max_workers=4)

The hooks run in Gunicorn's master process, so there is one supervisor however many web workers there are.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway.core.retry import RetryPolicy
from headway.errors import InvalidInput
from headway.queue.task import is_number
from headway.telemetry import Log

log = Log("queue")

Hook = Callable[[Any], None]  # called with Gunicorn's arbiter, which has no type hints
#: Seconds between two checks of the supervisor.
_INTERVAL = 0.5
#: A supervisor that ran this long did not fail at its start.
_HEALTHY = 10.0
#: Seconds beyond the drain after which a supervisor is killed. It kills its own workers before.
_BEYOND_DRAIN = 10.0
_RESTART = RetryPolicy(retries=0, base=0.5, cap=30.0)


@dataclass(slots=True)
class _Supervisor:
    pid: int
    drain: float
    started: float
    kill_at: float | None = None  # set when it was asked to exit

    def has_exited(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # Gunicorn, which waits for any child, has collected it
            return True

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Guard:
    """Keep one supervisor running; replace it on a reload; drain it at the end.

    A reload reads gunicorn.conf.py again and so calls `hooks` again. The guard therefore belongs to the process, and the
    hooks of every reading use the same one. All state is changed under one lock: by Gunicorn's main thread (`deploy`,
    `stop`) and by the guard's thread (`_check`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._master = 0
        self._command: Sequence[str] = ()
        self._drain = 0.0
        self._current: _Supervisor | None = None
        self._draining: list[_Supervisor] = []
        self._deaths = 0
        self._not_before = 0.0

    def deploy(self, command: Sequence[str], *, drain: float) -> None:
        """Run ``command`` as the supervisor from now on.

        A supervisor that already runs finishes its tasks and exits. The new one starts at once, as Gunicorn's new web
        workers do, so that no task waits for the drain of the old one.
        """
        with self._lock:
            self._command, self._drain = command, drain
            self._retire()
            self._deaths, self._not_before = 0, 0.0
            if self._thread is None:
                # Also when Gunicorn leaves without calling on_exit, for example after a reload of an invalid file.
                self._master = os.getpid()
                atexit.register(self.stop)
                self._thread = threading.Thread(target=self._run, name="headway-supervisor", daemon=True)
                self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """Ask every supervisor to exit and wait until all have. Does nothing in processes that Gunicorn forked."""
        if self._thread is None or os.getpid() != self._master:
            return
        with self._lock:
            thread, self._thread = self._thread, None
            self._retire()
        self._wake.set()
        thread.join()
        atexit.unregister(self.stop)
        while self._draining:
            self._collect()
            time.sleep(0.05)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._thread is None:
                    return
                self._check()
            self._wake.wait(_INTERVAL)
            self._wake.clear()

    def _check(self) -> None:
        self._collect()
        now = time.monotonic()
        if self._current is not None and self._current.has_exited():
            self._deaths = self._deaths + 1 if now - self._current.started < _HEALTHY else 1
            self._current, self._not_before = None, now + _RESTART.delay(self._deaths)
            log.warning("the supervisor exited and is restarted", count=self._deaths)
        if self._current is None and now >= self._not_before:
            try:
                self._current = _Supervisor(_spawn(self._command), self._drain, now)
            except OSError as error:  # out of memory or processes: retry later
                self._deaths += 1
                self._not_before = now + _RESTART.delay(self._deaths)
                log.warning("the supervisor cannot be started; retrying", error=str(error))

    def _retire(self) -> None:
        """Ask the running supervisor to drain and exit."""
        if self._current is not None and not self._current.has_exited():
            self._current.kill_at = time.monotonic() + self._current.drain + _BEYOND_DRAIN
            self._current.signal(signal.SIGTERM)
            self._draining.append(self._current)
        self._current = None

    def _collect(self) -> None:
        self._draining = [each for each in self._draining if not each.has_exited()]
        for each in self._draining:
            if each.kill_at is not None and time.monotonic() > each.kill_at:
                log.warning("the supervisor did not exit in time and is killed")
                each.signal(signal.SIGKILL)


def _spawn(command: Sequence[str]) -> int:
    """Start a supervisor of this process and return its pid.

    `subprocess` waits for the end of a pipe, which a web worker that Gunicorn forks at that moment would hold open for
    ever; ``posix_spawn`` needs no pipe. The process group is its own: Ctrl-C at the terminal reaches Gunicorn only.
    """
    return os.posix_spawn(
        command[0],
        [*command, "--parent", str(os.getpid())],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            *((os.POSIX_SPAWN_CLOSE, number) for number in _inheritable()),
        ],
        setpgroup=0,
    )


def _inheritable() -> list[int]:
    """List descriptors a new process would inherit: Gunicorn's listening sockets.

    A supervisor that held them would keep the port of a killed Gunicorn until its tasks are finished.
    """
    with suppress(OSError):  # not Linux
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
        return [number for number in numbers if number > 2 and _is_inheritable(number)]
    return []


def _is_inheritable(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # closed since it was listed
        return False


_guard = Guard()


def hooks(
    app: str, *, workers: int | None = None, max_workers: int | None = None, drain: float = 20.0
) -> tuple[Hook, Hook, Hook]:
    """Return ``when_ready, on_exit, on_reload`` for gunicorn.conf.py.

    ``workers`` and ``max_workers`` default to the settings. ``drain``: seconds that running tasks get to finish, on a
    reload and at shutdown; then they return to their queue. Gunicorn's shutdown takes up to graceful_timeout for the web
    workers and then up to ``drain`` for the tasks.
    """
    if not is_number(drain) or not 0 <= drain <= 86_400:
        raise InvalidInput(f"drain must be 0 to 86,400 seconds (got {drain!r}).")
    command = [sys.executable, "-m", "headway", "worker", "--app", app, "--drain", f"{drain:g}"]
    if workers is not None:
        command += ["--workers", str(workers)]
    if max_workers is not None:
        command += ["--max-workers", str(max_workers)]

    def deploy(_arbiter: Any) -> None:
        _guard.deploy(command, drain=drain)

    def on_exit(_arbiter: Any) -> None:
        _guard.stop()

    return deploy, on_exit, deploy
