"""What the tests of the core and of the ledger's storage share: databases of both engines, processes that use them."""

import hashlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

#: Runs over both engines and over a database without a file.
everywhere = pytest.mark.parametrize("url", ["file", "memory", "postgresql"], indirect=True)
#: Runs over the two engines that several processes can share.
shared = pytest.mark.parametrize("url", ["file", "postgresql"], indirect=True)


def sqlite_url(path: Path, options: str = "") -> str:
    return f"sqlite:///{path}{options}"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def python(code: str, *arguments: object, **options) -> "subprocess.Popen[str]":
    """A process that runs ``code``; its first words come by stdout."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def forked(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child; the pid. It exits 0 when work returned, 1 (and says why) when it raised."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:  # noqa: BLE001 - a child must not return into pytest
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
