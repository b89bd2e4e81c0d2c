"""The only place where a test sleeps."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T | None], timeout: float = 30.0, message: str = "") -> T:
    """Return the first true answer of `predicate`; fail when there is none within `timeout` seconds.

    The pause between two looks grows from 1 to 50 ms.
    An AssertionError inside the predicate counts as "not yet" and is told when time is up.
    """
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        reason: AssertionError | None = None
        try:
            if answer := predicate():
                return answer
        except AssertionError as error:
            reason = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout:g} s: {message or predicate}") from reason
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
