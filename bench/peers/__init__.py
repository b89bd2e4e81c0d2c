"""Task queues in their documented configuration with two worker processes: how many no-op tasks a second, and how soon.

They live in an environment of their own, `.venv/peers`. Headway's own queue is measured by the same code, from the
environment that runs the benchmark.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import ROOT, median, say

HERE = Path(__file__).parent
HOME = ROOT / ".venv" / "peers"
BIN = HOME / "bin"
#: Bytes that a run leaves in the file of ticks: see queues.py.
TICK = 12

_PRELOADED = "import sys, queues; from rq.cli import main; sys.argv[0] = 'rq'; main()"
_RQ = ["worker", "--quiet", "--url", "{redis}", "bench", "-w"]

#: How each one's two workers are started. Dramatiq's processes have eight threads each, as it ships. RQ's are given the
#: module beforehand, as its documentation advises: else every work horse would import it.
COMMANDS = {
    "dramatiq": [["dramatiq", "queues", "--processes", "2", "--threads", "8"]],
    "huey": [["huey_consumer", "queues.huey", "-w", "2", "-k", "process", "-q"]],
    "celery": [["celery", "-A", "queues:app", "worker", "-c", "2", "-l", "ERROR", "--pool", "prefork"]],
    "rq_simple": [["python", "-c", _PRELOADED, *_RQ, "rq.worker.SimpleWorker"]] * 2,
    "rq_fork": [["python", "-c", _PRELOADED, *_RQ, "rq.worker.Worker"]] * 2,
    "procrastinate": [["procrastinate", "--app=queues.app", "--log-level=error", "worker", "-q", "bench"]] * 2,
    "pgqueuer": [["python", "queues.py", "work"]] * 2,
    "dbos": [["python", "queues.py", "work"]] * 2,
    "headway": [["python", "queues.py", "work"]] * 2,
    "headway_fork": [["python", "queues.py", "work"]] * 2,
    "headway_database": [["python", "queues.py", "work"]] * 2,
}
#: Those that `headway run` is compared with.
ON_REDIS = ("dramatiq", "huey", "celery")

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


def cpu_of(leader: int) -> float:
    """Seconds of CPU that a process and its children have used so far."""
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,pid="], check=True, capture_output=True, text=True).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        parent, pid = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found, left = 0.0, [leader]
    while left:
        pid = left.pop()
        found += _cpu(pid)
        left += children.get(pid, [])
    return found


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended meanwhile
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Peer:
    """One task queue. ``name`` may have a batch behind a colon: ``pgqueuer:100``."""

    def __init__(self, name: str, redis_url: str, place: Path, postgres_url: str = "") -> None:
        self.name = name
        self._kind, _, batch = name.partition(":")
        self._ticks = place / f"{name.replace(':', '-')}.ticks"
        self._log = self._ticks.with_suffix(".log")
        self._bin = Path(sys.executable).parent if self._kind.startswith("headway") else BIN
        self.redis_url = redis_url
        self._facts = {"redis": redis_url, "batch": batch or "10"}
        self._environment = {
            **os.environ,
            "BENCH_PEER": name,
            "BENCH_REDIS": redis_url,
            "BENCH_POSTGRES": postgres_url,
            "BENCH_BATCH": batch or "10",
            "BENCH_TICKS": str(self._ticks),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "src")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def measure(self, count: int, limit: float, *servers: int) -> tuple[float, float, list[float]]:
        """(enqueued per second, done per second, microseconds of CPU for a task of the workers and of each of the servers).
        Workers are running and warm before the clock starts."""
        self.prepare()
        with self.working() as pids:
            for pid in pids:
                os.killpg(pid, signal.SIGSTOP)
            before = self.ran
            filling = self.many(count)
            began, used = time.monotonic(), [sum(map(cpu_of, pids)), *map(cpu_of, servers)]
            for pid in pids:
                os.killpg(pid, signal.SIGCONT)
            self.wait(before + count, limit)
            took, after = time.monotonic() - began, [sum(map(cpu_of, pids)), *map(cpu_of, servers)]
            cpu = [1e6 * (now - then) / count for then, now in zip(used, after, strict=True)]
            return count / filling, count / took, cpu

    @contextmanager
    def working(self, warm: int = 50) -> Iterator[list[int]]:
        """Workers that have run ``warm`` tasks; the leaders of their process groups."""
        self._ticks.write_bytes(b"")
        workers: list[subprocess.Popen[bytes]] = []
        try:
            with self._log.open("wb") as log:
                for program, *words in COMMANDS[self._kind]:
                    command = [str(self._bin / program), *(word.format(**self._facts) for word in words)]
                    workers.append(
                        subprocess.Popen(command, env=self._environment, cwd=HERE, stdin=subprocess.DEVNULL, stdout=log,
                                         stderr=log, start_new_session=True)
                    )  # fmt: skip
            self.many(warm)
            self.wait(warm, 60)
            yield [worker.pid for worker in workers]
        finally:
            for worker in workers:
                self._end(worker)

    def prepare(self) -> None:
        self._ask("prepare")

    def enqueue(self, count: int) -> list[float]:
        """Seconds of each call."""
        return [float(seconds) for seconds in json.loads(self._ask("enqueue", count))]

    def many(self, count: int) -> float:
        """Seconds of all."""
        return float(self._ask("many", count))

    def bulk(self, count: int) -> float:
        """Seconds of all, on a connection that is open already: the median of five calls."""
        return median([float(seconds) for seconds in json.loads(self._ask("bulk", count))])

    def pick_up(self, rounds: int) -> list[float]:
        """Seconds from each call to the moment its task runs."""
        return [float(seconds) for seconds in json.loads(self._ask("pickup", rounds))]

    @property
    def ran(self) -> int:
        return self._ticks.stat().st_size // TICK

    def wait(self, count: int, limit: float) -> None:
        """Until so many tasks have run since the workers were started."""
        end = time.monotonic() + limit
        while self.ran < count:
            if time.monotonic() > end:
                said = self._log.read_text(errors="replace")[-800:]
                raise TimeoutError(f"{self.name} did not do {count} tasks within {limit:g} s: {said}")
            time.sleep(0.002)

    def _ask(self, verb: str, count: int = 0) -> str:
        command = [str(self._bin / "python"), str(HERE / "queues.py"), verb, str(count)]
        out = subprocess.run(
            command, env=self._environment, check=False, capture_output=True, text=True, timeout=300, cwd=HERE
        )
        if out.returncode:
            raise RuntimeError(f"{self.name}: {verb} failed: {out.stderr[-800:]}")
        return out.stdout

    def _end(self, workers: subprocess.Popen[bytes]) -> None:
        """Every process of the group: Celery and Dramatiq have children."""
        try:
            os.killpg(workers.pid, signal.SIGCONT)
            os.killpg(workers.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        workers.wait(10)
