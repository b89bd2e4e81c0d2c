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


def measured(command: list[str], directory: Path, rounds: int) -> dict[str, float]:
    """Milliseconds on the clock and of the processor; the least is what the command needs, the median what it got."""
    wall, processor = [], []
    for _ in range(rounds):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, check=True, env=environment())
        wall.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    figures = {"min": min(wall), "median": statistics.median(wall), "cpu_min": min(processor)}
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
        figures = {}
        for name, command in commands.items():
            measured(command, Path(directory), 1)  # compiles what is not compiled yet
            figures[name] = measured(command, Path(directory), rounds)
            print(f"{name}: {figures[name]}", file=sys.stderr)
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
