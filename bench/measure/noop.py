"""The function of `headway run` when only headway itself is to be measured."""

import time


def noop(item: object) -> None:
    """Do nothing with it."""


def wait(_: object) -> None:
    """As long as a call to a neighbour takes."""
    time.sleep(0.02)


def wait_second(_: object) -> None:
    """As long as something large takes."""
    time.sleep(1.0)
