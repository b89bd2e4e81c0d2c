"""A copy of an example whose processes are started by the commands of its README."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.services.waiting import eventually

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Every process of a deployment inherits this variable, so that orphans are found wherever they went.
MARKER = "HEADWAY_SCENARIO"


class Deployment:
    """One example in a directory of its own, with the environment its README asks for.

    With a ``hostname`` it is a machine: its processes have that host name and their own process ids (namespaces of Linux),
    so that Headway cannot see from another machine whether they live. Without the right to do that they are ordinary
    processes.
    """

    def __init__(self, example: str, directory: Path, hostname: str = "", **environment: str) -> None:
        self.directory = Path(
            shutil.copytree(
                EXAMPLES / example, directory / example, ignore=shutil.ignore_patterns(".work", "__pycache__", "*.db*")
            )
        )
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            MARKER: uuid.uuid4().hex,
            **environment,
        }
        self._isolate = _isolation(hostname) if hostname else []
        self._documented = documented_commands(self.directory / "README.md")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        #: Documented commands that were typed earlier in the same shell, such as `ulimit -n 256`.
        self.shell_setup: list[str] = []

    @property
    def is_isolated(self) -> bool:
        """Whether processes of this machine have a host name and process ids of their own."""
        return self._isolate != []

    def start(self, name: str, command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a documented command in the background, as a process group of its own. Its output goes to NAME.log."""
        with self.log_path(name).open("ab") as log:
            process = subprocess.Popen(
                [*self._isolate, *self._shell("exec", command)], cwd=self.directory,
                env=self.environment | environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def run(self, command: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a documented command to its end."""
        return subprocess.run(
            self._shell("", command), cwd=self.directory, env=self.environment | environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def log_path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_path(name).read_text("utf-8", errors="replace")

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM, timeout: float = 60) -> int:
        """Signal one process, wait for its end and return its exit code."""
        process = self.processes[name]
        if process.poll() is None:
            os.kill(self._pid(process), number)
        return process.wait(timeout)

    def kill_group(self, name: str) -> None:
        """SIGKILL a process and its whole group, as if its machine lost power."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def members(self) -> dict[int, str]:
        """Return the living processes of this deployment: pid and command line.

        Each inherits the marker, or is of the session of a started command: nginx overwrites its environment.
        """
        found, sessions = {}, {process.pid for process in self.processes.values()}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                ours = self.environment[MARKER].encode() in (entry / "environ").read_bytes()
                if (ours or os.getsid(int(entry.name)) in sessions) and _is_alive(entry):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it ended meanwhile
                continue
        return found

    def assert_no_orphans(self, timeout: float = 30) -> None:
        """Fail unless every process of the deployment has ended."""

        def none_left() -> bool:
            left = self.members()
            assert not left, left
            return True

        eventually(none_left, timeout, "every process of the deployment has ended")

    def close(self) -> None:
        """End whatever is left, at the end of a test."""
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # nginx overwrites its environment, and with it the marker
            process.wait(60)

    def _pid(self, process: subprocess.Popen[bytes]) -> int:
        """Return the pid of the command itself. On a machine it is the child of the program that made the namespaces."""
        if not self._isolate:
            return process.pid
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return int(eventually(lambda: children.read_text().split(), message="the command has started")[0])

    def _shell(self, prefix: str, command: str) -> list[str]:
        for typed in (*self.shell_setup, command):
            assert typed in self._documented, f"the README does not show this command: {typed}"
        return ["/bin/sh", "-c", " && ".join([*self.shell_setup, f"{prefix} {command}"])]


def documented_commands(readme: Path) -> set[str]:
    """Return the commands in the fenced blocks of a page; a line that ends in a backslash goes on in the next."""
    commands = set()
    for block in re.findall(
        r"^```(?:console|sh|shell|bash)?(?: run[^\n]*)?\n(.*?)^```", readme.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            commands.add(line.removeprefix("$ ").removesuffix("&").strip())
    return commands


def _isolation(hostname: str) -> list[str]:
    """Return the words that start a command under a host name and with process ids of its own; none if that is refused."""
    namespaces = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = [*namespaces, "/bin/sh", "-c", 'hostname "$0" && exec "$@"', hostname]
    try:
        allowed = subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    return words if allowed else []


def _is_alive(entry: Path) -> bool:
    """Return whether the process is more than a zombie."""
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
