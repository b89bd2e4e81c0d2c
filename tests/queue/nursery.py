"""A process with everything imported that forks workers on demand: a worker costs some milliseconds instead of a second.

It has no thread and no connection, so a worker it forks begins like one that was started anew, and can be killed, stopped
and signalled like one. What it hears and says are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Any

from headway.telemetry import configure
from tests.queue import app
from tests.services.waiting import eventually


class Nursery:
    """As a test sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.queue.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready: set[str] = set()
        self.pids: dict[str, int] = {}
        self.ended: dict[int, int] = {}
        self._count = 0
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def start(self, name: str, **options: Any) -> Forked:
        """A worker of `tests.queue.app`, when it is ready to hear signals."""
        child = self.begin(name, **options)
        eventually(lambda: child.key in self.ready, 60)
        return child

    def begin(self, name: str, **options: Any) -> Forked:
        """The same without waiting for it to be ready."""
        self._count += 1
        key = f"{self._count}"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"key": key, "name": name, **options}) + "\n")
        self._process.stdin.flush()
        eventually(lambda: key in self.pids, 60)
        return Forked(self, key, self.pids[key])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._listening.join(60)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "forked" in said:
                self.pids[said["key"]] = said["forked"]
            elif "ready" in said:
                self.ready.add(said["ready"])
            else:
                self.ended[said["ended"]] = said["status"]


class Forked:
    """One worker."""

    def __init__(self, nursery: Nursery, key: str, pid: int) -> None:
        self._nursery, self.key, self.pid = nursery, key, pid

    def poll(self) -> int | None:
        return self._nursery.ended.get(self.pid)

    def wait(self, timeout: float = 60.0) -> int:
        eventually(lambda: self.poll() is not None, timeout)
        return self._nursery.ended[self.pid]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


def _say(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def _nurse() -> None:
    children: set[int] = set()
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    buffer = b""
    while True:
        readable, _, _ = select.select([0, waking], [], [])
        if waking in readable:
            os.read(waking, 4096)
            _reap(children)
        if 0 in readable:
            part = os.read(0, 65536)
            if not part:
                break
            *lines, buffer = (buffer + part).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _be_a_worker(order, waking, woken)
                children.add(pid)
                _say(forked=pid, key=order["key"])
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        children.discard(pid)
        _say(ended=pid, status=os.waitstatus_to_exitcode(status))


def _be_a_worker(order: dict[str, Any], *pipe: int) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for descriptor in pipe:
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        if order.get("log"):
            os.dup2(os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
            configure(level="DEBUG")
        app.work(
            order["url"], order["name"], drain=order.get("drain", 5.0), redis=order.get("redis"),
            isolations=order.get("isolations", ("fork", "none")), options=order.get("options") or {},
            ready=lambda: _say(ready=order["key"]),
        )  # fmt: skip
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


if __name__ == "__main__":
    _nurse()
