"""A run's directory and everything in it, gone when the run is gone, however it ended.

Servers and commands under test work inside the directory. The janitor is a process that outlives the run:
when the run closes its pipe, by returning, by Ctrl-C or by SIGKILL, it kills what still works inside and
removes the directory. Run as a script, this file is that process.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class RunDirectory:
    """A new directory with a janitor of its own."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="headway-tests-", dir=_memory())).resolve()
        self.path.chmod(0o711)  # PostgreSQL refuses root; the user it runs as has to pass through here
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.path],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the tests, not for the one who cleans up after them
        )

    def close(self) -> None:
        """Have it swept now; returns when that is done.

        A child that a test forked and forgot holds the pipe open too, and would keep the janitor waiting for ever.
        """
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        try:
            self._janitor.wait(30)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()
            sweep(self.path)


def _memory() -> str | None:
    """Where files are kept in memory, if there is room: the tests write and delete many, and kill processes, not
    machines. Whoever sets TMPDIR has chosen; programs are started from the directory, so it must not be ``noexec``."""
    place = "/dev/shm"  # the directory made there is private and its name is random
    try:
        room, flags = shutil.disk_usage(place).free, os.statvfs(place).f_flag
    except OSError:
        return None
    usable = room > 8 * 2**30 and not flags & os.ST_NOEXEC and os.access(place, os.W_OK)
    return place if usable and "TMPDIR" not in os.environ else None


def sweep(directory: Path) -> None:
    """Kill the processes that work inside the directory, then remove it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(directory):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()
    sweep(Path(sys.argv[1]))
