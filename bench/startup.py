"""How long a command takes to start, beside bare Python and a bare import of click. JSON on stdout.

.venv/bin/python bench/startup.py [--quick] [--beside OTHER_PYTHON]

With --beside the same commands of another installation are run in turn with ours, on a database of its own.
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


MAKE_JOBS = """
from headway.ledger import Ledger
with Ledger.open("sqlite:///headway.db") as ledger:
    for number in range(20):
        ledger.create(f"job-{number}")
"""


def commands_of(python: str, directory: Path) -> dict[str, tuple[list[str], Path]]:
    """The commands of an installation, with a directory whose database it has made itself."""
    directory.mkdir()
    subprocess.run([python, "-c", MAKE_JOBS], cwd=directory, check=True, env=environment())
    headway = [python, "-m", "headway"]
    return {f"headway {verb}": ([*headway, verb], directory) for verb in ("--version", "jobs", "status")}


def main() -> int:
    rounds = 5 if "--quick" in sys.argv else 30
    other = sys.argv[sys.argv.index("--beside") + 1] if "--beside" in sys.argv else None
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        commands = {
            "python": ([sys.executable, "-c", "pass"], directory),
            "click": ([sys.executable, "-c", "import click"], directory),
            **commands_of(sys.executable, directory / "ours"),
        }
        if other is not None:
            theirs = commands_of(other, directory / "theirs")
            commands |= {f"other {verb}": command for verb, command in theirs.items()}
        taken: dict[str, list[tuple[float, float]]] = {verb: [] for verb in commands}
        for number in range(rounds + 1):
            for verb, (command, place) in commands.items():  # in turn, so that a busy moment hits all of them alike
                measure = once(command, place)
                if number:  # the first round compiles what is not compiled yet
                    taken[verb].append(measure)
            print(f"round {number} of {rounds}", file=sys.stderr)
    figures = {verb: figures_of(measures) for verb, measures in taken.items()}
    bare = figures["python"]["min"]
    result = {
        "milliseconds": figures,
        "times_bare_python": {verb: round(found["min"] / bare, 1) for verb, found in figures.items()},
        "budget_ms": BUDGET_MS,
        "within_budget": {verb: found["median"] <= BUDGET_MS for verb, found in figures.items()},
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
