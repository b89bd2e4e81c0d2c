"""Something happens at the n-th line of our own code that a thread runs: the process dies, the server is wiped, a signal
handler raises. No code of ours knows of it, and no step between two lines is left out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[2] / "src" / "headway"


class Steps:
    """How many lines were run, and whether the one that was waited for was among them."""

    def __init__(self) -> None:
        self.count = 0
        self.reached = False


@contextmanager
def at_line(number: int, action: Callable[[], object], *parts: str) -> Iterator[Steps]:
    """Call ``action`` before the n-th line (from 0) that this thread runs in these parts of src/headway."""
    steps = Steps()
    places = tuple(str(SOURCE / part) for part in parts)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(places):
            return None
        if event == "line":
            if steps.count == number:
                steps.reached = True
                steps.count += 1
                action()
            steps.count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield steps
    finally:
        sys.settrace(before)


@contextmanager
def at_functions(part: str, **actions: Callable[[], object]) -> Iterator[None]:
    """Call each action once, when this thread enters the function of its name in this part of src/headway."""
    place = str(SOURCE / part)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_name
        if event == "call" and name in actions and frame.f_code.co_filename.startswith(place):
            actions.pop(name)()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
