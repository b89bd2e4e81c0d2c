"""Where measuring coverage would change what a test observes: processes that are not measured."""

from __future__ import annotations

import os
import sys


def untraced_environment() -> dict[str, str]:
    """The environment of a process that nobody measures: it loads what it loads by itself, and no tracer's frame takes
    part in its stack."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


def stop_tracing() -> None:
    """In a forked child: what a tracer does between two lines is not interrupted by the signals of the test."""
    coverage = sys.modules.get("coverage")
    measuring = None if coverage is None else coverage.Coverage.current()
    if measuring is not None:
        measuring.stop()
