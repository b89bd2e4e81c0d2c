"""How long a command takes to start, beside bare Python and a bare import of click. JSON on stdout.

.venv/bin/python bench/startup.py [--quick]
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headway.ledger import Ledger

#: What a command may take on a quiet machine.
BUDGET_MS = 120


def once(command: list[str], directory: Path) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, check=True, env=environment())
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures_of(taken: list[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds: the least is what the command needs, the median what it got."""
    wall = [seconds for seconds, _ in taken]
    figures = {"min": min(wall), "median": statistics.median(wall), "cpu_min": min(cpu for _, cpu in taken)}
    return {name: round(seconds * 1000, 1) for name, seconds in figures.items()}


def environment() -> dict[str, str]:
    """As an installed command runs: with compiled modules, without our settings."""
    dropped = ("HEADWAY_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def main() -> int:
    rounds = 5 if "--quick" in sys.argv else 30
    with tempfile.TemporaryDirectory() as directory:
        with Ledger.open(f"sqlite:///{directory}/headway.db") as ledger:
            for number in range(20):
                ledger.create(f"job-{number}")
        headway = [sys.executable, "-m", "headway"]
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "click": [sys.executable, "-c", "import click"],
            "headway --version": [*headway, "--version"],
            "headway jobs": [*headway, "jobs"],
            "headway status": [*headway, "status"],
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name, command in commands.items():  # in turn, so that a busy moment hits all of them alike
                measure = once(command, Path(directory))
                if number:  # the first round compiles what is not compiled yet
                    taken[name].append(measure)
            print(f"round {number} of {rounds}", file=sys.stderr)
    figures = {name: figures_of(measures) for name, measures in taken.items()}
    bare = figures["python"]["min"]
    result = {
        "milliseconds": figures,
        "times_bare_python": {name: round(found["min"] / bare, 1) for name, found in figures.items()},
        "budget_ms": BUDGET_MS,
        "within_budget": {name: found["min"] <= BUDGET_MS for name, found in figures.items()},
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
