"""Gunicorn hooks: one supervisor beside the web workers, started with them, replaced when it dies, drained at the end.

In gunicorn.conf.py:

    from headway.queue.gunicorn import hooks

    when_ready, on_exit, on_reload = hooks("shop:headway", workers=2, max_workers=4)

The hooks run in Gunicorn's parent process, never in its workers, so it does not matter how many of those there are.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.retry import RetryPolicy
from headway.telemetry import Log

log = Log("queue")

Hook = Callable[[Any], None]  # Gunicorn gives its arbiter, which has no type of its own
_LOOK = 0.5
_DIED = RetryPolicy(retries=0, base=0.5, cap=30.0)


class Guard:
    """Keeps one supervisor running."""

    def __init__(self, command: list[str], *, drain: float) -> None:
        self._command, self._drain = command, drain
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headway-supervisor", daemon=True)
            self._thread.start()

    def reload(self) -> None:
        """Have it start its workers anew, with the code as it is now; what they run is finished first."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        self._stop.set()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._drain + 10.0)
            except subprocess.TimeoutExpired:
                log.warning("the supervisor did not end in time and is killed")
                self._process.kill()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        deaths = 0
        while not self._stop.is_set():
            # A session of its own: a Ctrl-C at the terminal goes to Gunicorn, and Gunicorn ends us.
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
            # Looked for, not waited for: Gunicorn collects every child of the process, and who waits may wait for ever.
            while (status := self._process.poll()) is None and not self._stop.wait(_LOOK):
                pass
            if self._stop.is_set():
                return
            deaths = deaths + 1 if status else 0
            log.warning("the supervisor ended and is started again", reason=f"status {status}", count=deaths)
            self._stop.wait(_DIED.delay(max(1, deaths)))


def hooks(
    app: str, *, workers: int = 1, max_workers: int | None = None, drain: float = 20.0
) -> tuple[Hook, Hook, Hook]:
    """``when_ready, on_exit, on_reload`` for gunicorn.conf.py. ``drain`` stays below Gunicorn's graceful_timeout."""
    command = [
        sys.executable, "-m", "headway", "worker", "--app", app, "--workers", str(workers),
        "--max-workers", str(max_workers or workers), "--drain", f"{drain:g}",
    ]  # fmt: skip
    guard = Guard(command, drain=drain)

    def when_ready(_server: Any) -> None:
        guard.start()

    def on_exit(_server: Any) -> None:
        guard.stop()

    def on_reload(_server: Any) -> None:
        guard.reload()

    return when_ready, on_exit, on_reload
