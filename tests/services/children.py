"""Child processes of tests."""

from __future__ import annotations

import os


def unmeasured() -> dict[str, str]:
    """The environment of a child whose lines are not counted: because none of them is ours, or because it interrupts
    itself anywhere by signals, also in coverage's tracer, whose lock would then stay held for ever."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
