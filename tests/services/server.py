"""What all servers under test have in common."""

import os
import random
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import ClassVar

from tests.services.waiting import eventually

PORTS = range(15000, 32000)
#: Seconds a server may take to start or to end: a second on a quiet machine, and many times that on one that is not.
START, END = 150, 60


def free_port() -> int:
    """A port nobody listens on, below the range from which outgoing connections get theirs.

    Inside that range a client that keeps trying a stopped server's port can end up connected to itself,
    or hold the port when the server wants it back.
    """
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Server:
    """A process on 127.0.0.1 that can be stopped or killed, and started again on its port and data.

    A subclass says its `command()` and when it is `ready()`.
    """

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path, user: tuple[int, int] | None = None) -> None:
        directory.mkdir(mode=0o700)
        if user is not None:
            os.chown(directory, *user)
        self.directory = directory
        self.port = free_port()
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._was_up = False

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._process is not None, "never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and return when it answers."""
        assert not self.running, "running already"
        log = self.directory / "server.log"
        for _ in range(3):
            with log.open("ab") as output:
                self._process = self._spawn(self.command(), output.fileno())
            eventually(lambda: not self.running or self.ready(), START, f"{self.command()[0]} answers")
            if self.running:
                self._was_up = True
                return
            if not self._was_up:  # somebody may have taken the port since it was free; later on, clients know ours
                self.port = free_port()
        raise RuntimeError(f"{self.command()[0]} ended:\n{log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """End it the orderly way; nothing happens when it is not running."""
        self._end(self.stop_signal)

    def kill9(self) -> None:
        """SIGKILL it and its children, as a crash would."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        doomed = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        self._end(signal.SIGKILL)
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def discard(self) -> None:
        """Stop it for good and remove its data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)  # a frozen process cannot obey
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _spawn(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        uid, gid = self._user or (None, None)
        return subprocess.Popen(
            command,
            cwd=self.directory,  # so the janitor knows it as ours
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C is for the tests, which then stop their servers
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
        )
