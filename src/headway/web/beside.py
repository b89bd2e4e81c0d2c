"""A page beside a run: the application in a process of its own, for as long as the run takes (``headway run --serve``).

The run pays for it with one process at low priority, and is told nothing by it: if the server fails, the run goes on. The run
makes the socket and gives it away, so the address is known before the server is up; a browser that is early waits. The
server reads its token from its standard input, and ends when that ends, hence also when the run is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import IO, Final

from headway.errors import HeadwayError, MissingExtra
from headway.local_servers import LocalServer, new_server, published
from headway.telemetry import redact
from headway.web.server import GRACE, HOST, listen

#: What the process is niced by: it takes what the run leaves.
NICE: Final = 10
#: What it stands on.
_NEEDED: Final = ("fastapi", "uvicorn", "httptools", "websockets", "jinja2")


def check(what: str = "A page beside a run") -> None:
    """Raise `MissingExtra` for ``what`` if the packages of the web server are not installed."""
    if not all(find_spec(name) for name in _NEEDED):
        raise MissingExtra("web", what)


class Beside:
    """The server's process, as the run sees it."""

    def __init__(self, database: str) -> None:
        with listen(HOST, 0) as listener:
            self.server = new_server(listener)
            self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno())],
                env={**os.environ, "HEADWAY_DATABASE": database},  # an argument could be read by everybody
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the run, which ends the page when it has ended
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it failed already, and `close` says why
            self._process.stdin.write(f"{self.server.token}\n".encode())
            self._process.stdin.flush()
        self._files = ExitStack()
        self._files.enter_context(published(self.server))

    def close(self) -> str | None:
        """End it, after its pages were told the last state; why it had failed, if it had."""
        self._files.close()
        has_ended = self._process.poll() is not None
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            # One that was killed a moment ago has not ended yet, as long as one of its threads has not: its status tells.
            status = self._process.wait(GRACE + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = 0
        with self._said:
            self._said.seek(0)
            lines = self._said.read(100_000).decode(errors="replace").strip().splitlines()
        if status == 0 and not has_ended:
            return None
        return redact(lines[-1])[:300] if lines else f"it ended with {status}"


def main(descriptor: int) -> int:
    """The server's process."""
    os.nice(NICE)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from headway.web.application import app
    from headway.web.server import serve

    with socket.socket(fileno=descriptor) as listener:
        listener.set_inheritable(False)
        host, port = listener.getsockname()[:2]
        with open(sys.stdin.fileno(), closefd=False) as given:
            token = given.readline().strip()
        try:
            application = app()
            application.access.local = LocalServer(host, port, token)
            serve(application, listener, until=sys.stdin.fileno())
        except HeadwayError as error:
            sys.stderr.write(f"{error}\n")
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
