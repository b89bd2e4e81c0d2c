"""Task queues on Redis, in their documented configuration with two worker processes: how many no-op tasks a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from measure import ROOT, say

HERE = Path(__file__).parent
HOME = ROOT / ".venv" / "peers"
BIN = HOME / "bin"

#: How each one's two workers are started. Dramatiq's processes have eight threads each, as it ships.
COMMANDS = {
    "dramatiq": ["dramatiq", "queues", "--processes", "2", "--threads", "8"],
    "huey": ["huey_consumer", "queues.huey", "-w", "2", "-k", "process", "-q"],
    "celery": ["celery", "-A", "queues:app", "worker", "-c", "2", "-l", "ERROR", "--pool", "prefork"],
}

INSTALL_SECONDS = 300


def install() -> str | None:
    """Put the peers into an environment of their own; None, or why that cannot be done."""
    wanted = (HERE / "requirements.txt").read_text()
    stamp = HOME / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return None
    say("  installing the peers (once)")
    pip = [str(BIN / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(HOME)], [*pip, "-r", str(HERE / "requirements.txt")]):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.CalledProcessError as error:
            return f"the peers could not be installed: {(error.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        except subprocess.TimeoutExpired:
            return f"the peers could not be installed within {INSTALL_SECONDS} s"
    stamp.write_text(wanted)
    return None


class Peer:
    """One task queue, its workers warm and its queue filled while they are stopped."""

    def __init__(self, name: str, redis_url: str, place: Path) -> None:
        self.name = name
        self._ticks = place / f"{name}.ticks"
        self._log = place / f"{name}.log"
        self._environment = {
            **os.environ,
            "BENCH_PEER": name,
            "BENCH_REDIS": redis_url,
            "BENCH_TICKS": str(self._ticks),
            "PYTHONPATH": str(HERE),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def measure(self, count: int, limit: float) -> tuple[float, float]:
        """(enqueued per second, done per second). Workers are running and warm before the clock starts."""
        self._ticks.write_bytes(b"")
        with self._log.open("wb") as log:
            workers = subprocess.Popen(
                [str(BIN / COMMANDS[self.name][0]), *COMMANDS[self.name][1:]],
                env=self._environment, cwd=HERE, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            warm = 50
            self._enqueue(warm)
            self._await(warm, 60)
            os.killpg(workers.pid, signal.SIGSTOP)
            enqueuing = self._enqueue(count)
            began = time.monotonic()
            os.killpg(workers.pid, signal.SIGCONT)
            self._await(warm + count, limit)
            return count / enqueuing, count / (time.monotonic() - began)
        finally:
            self._end(workers)

    def _enqueue(self, count: int) -> float:
        command = [str(BIN / "python"), str(HERE / "queues.py"), str(count)]
        out = subprocess.run(command, env=self._environment, check=True, capture_output=True, text=True, timeout=300)
        return float(out.stdout)

    def _await(self, count: int, limit: float) -> None:
        end = time.monotonic() + limit
        while self._ticks.stat().st_size < 4 * count:
            if time.monotonic() > end:
                said = self._log.read_text(errors="replace")[-800:]
                raise TimeoutError(f"{self.name} did not do {count} tasks within {limit:g} s: {said}")
            time.sleep(0.002)

    def _end(self, workers: subprocess.Popen[bytes]) -> None:
        """Every process of the group: Celery and Dramatiq have children."""
        try:
            os.killpg(workers.pid, signal.SIGCONT)
            os.killpg(workers.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        workers.wait(10)
