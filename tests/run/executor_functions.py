"""Functions for executors: their workers import this module by its name."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def double(n: int) -> int:
    return 2 * n


def fussy(n: int) -> dict[str, Any]:
    """Odd numbers fail, and say something first."""
    if n % 2:
        print(f"about to refuse {n}")  # noqa: T201 - it is to be seen by whom it is kept
        raise ValueError("odd numbers are refused")
    return {"n": n}


def as_text(value: complex) -> str:
    return str(value)


def imaginary(n: int) -> complex:
    return complex(0, n)


def unsendable(n: int) -> Any:
    if n == 0:
        return threading.Lock()
    if n == 1:
        return lambda: n
    if n == 2:
        raise UnsendableError(threading.Lock())
    return n


class UnsendableError(Exception):
    def __init__(self, lock: Any) -> None:
        super().__init__("cannot be pickled")
        self.lock = lock


def killing(item: dict[str, Any]) -> int:
    """One of them kills its process, whenever it is tried."""
    place, n = Path(item["place"]), int(item["n"])
    if n == item["killer"]:
        with (place / "executed").open("a") as file:
            file.write(f"{n}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def noted(item: dict[str, Any]) -> int:
    """Says that it has begun, and ends when it is let go."""
    place, n = Path(item["place"]), int(item["n"])
    (place / f"begun-{n}").write_text(str(os.getpid()))
    with (place / "executed").open("a") as file:
        file.write(f"{n}\n")
    deadline = time.monotonic() + 60
    while not (place / "free").exists() and not (place / f"free-{n}").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return n


def endless(n: int) -> int:
    """Item 1 takes too long, whatever it catches."""
    deadline = time.monotonic() + 30
    while n == 1 and time.monotonic() < deadline:
        with suppress(Exception):  # as careless functions do
            time.sleep(0.01)
    return n


async def gentle(n: int) -> int:
    await asyncio.sleep(30 if n == 1 else 0)
    return n


async def blocking(n: int) -> int:
    for _ in range(40):
        time.sleep(1.2)  # noqa: ASYNC251 - as a client that is not async does
        await asyncio.sleep(0)
    return n


def forking(n: int) -> int:
    """The child comes back from the function as well."""
    if os.fork():
        os.wait()
    return n


#: Set by a test: a process that is forked from it sees that, one that is started anew does not.
changed = False


def sees_change(_: int) -> bool:
    return changed


async def sees_change_soon(_: int) -> bool:
    return changed
