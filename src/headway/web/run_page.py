"""The web application next to a run, in a separate process that ends with the run (``headway run --serve``).

It costs the run one process at low priority. If the server fails, the run continues. The run creates the socket and
passes it to the server, so the address is known before the server is up; an early browser waits. The server reads its
token from standard input. It exits at end of file there, hence also when the run is killed.
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

#: Niceness of the process: it only uses CPU time that the run leaves.
NICE: Final = 10
#: Packages that the server needs.
_NEEDED: Final = ("fastapi", "uvicorn", "httptools", "websockets", "jinja2")


def check(what: str = "A page beside a run") -> None:
    """Raise `MissingExtra` for ``what`` if the packages of the web server are not installed."""
    if not all(find_spec(name) for name in _NEEDED):
        raise MissingExtra("web", what)


class Beside:
    """The server process, as the run sees it."""

    def __init__(self, database: str) -> None:
        with listen(HOST, 0) as listener:
            self.server = new_server(listener)
            self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno())],
                env={**os.environ, "HEADWAY_DATABASE": database},  # other users can read the arguments of a process
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the run, which stops the server at its end
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it failed already; `close` returns why
            self._process.stdin.write(f"{self.server.token}\n".encode())
            self._process.stdin.flush()
        self._files = ExitStack()
        self._files.enter_context(published(self.server))

    def close(self) -> str | None:
        """Stop the server after its pages got the last state; return why it failed, if it did."""
        self._files.close()
        has_ended = self._process.poll() is not None
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            # `poll` may miss a process that was just killed while its threads still exit. The exit status shows it.
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
    """Run the server process on an inherited socket."""
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
