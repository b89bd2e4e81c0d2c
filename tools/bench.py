"""Run every benchmark, and say at the end which goals were met.

    python tools/bench.py [--quick] [--summary] [WORD ...]

Each `bench/NAME.py` whose name contains a WORD is run; its JSON goes to bench/results/NAME.json. ``--summary`` only reads
the results that are there. Exits 1 when a benchmark
crashed, printed no JSON, or has no result although docs/internals/requirements.md names it. A missed goal is printed and
does not change the exit code, because one run on a shared machine proves nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GOAL = re.compile(r"^(?P<key>\w+ )?(?P<sign><=|>=|<|>) ?(?P<bound>[\d.,]+)")
SIGNS = {
    "<=": float.__le__,
    ">=": float.__ge__,
    "<": float.__lt__,
    ">": float.__gt__,
}


class Goal(NamedTuple):
    bench: str
    what: str
    goal: str
    figure: str
    #: None: a goal in words, for people to judge.
    met: bool | None


def goals(bench: str, result: Any, path: str = "") -> Iterator[Goal]:
    """Every goal in a result: figures with a target, and parts with a goal beside their figures."""
    if isinstance(result, list):
        for part in result:
            yield from goals(bench, part, path)
    if not isinstance(result, dict):
        return
    if "target" in result and "ok" in result:
        yield Goal(
            bench, str(result["name"]), str(result["target"]), f"{result['value']:g} {result['unit']}", result["ok"]
        )
        return
    if "goal" in result:
        yield judged(bench, path, result)
    for name, met in result.get("within_budget", {}).items():
        figure = result["milliseconds"][name]["min"]
        yield Goal(bench, name, f"<= {result['budget_ms']}", f"{figure:g} ms", met)
    for name, part in result.items():
        yield from goals(bench, part, f"{path} {name}".strip())


def judged(bench: str, path: str, part: dict[str, Any]) -> Goal:
    numbers = dict(flat(part))
    shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    goal = str(part["goal"])
    if isinstance(part.get("reached"), bool):
        return Goal(bench, path, goal, shown, part["reached"])
    found = GOAL.match(goal)
    if not found:
        return Goal(bench, path, goal, shown, None)
    key = (found["key"] or "").strip()
    values = [
        value
        for name, value in numbers.items()
        if key and (name == key or name.startswith(f"{key}_") or f" {key}_" in name)
    ]
    if not key and len(numbers) == 1:
        values = list(numbers.values())
    bound = float(found["bound"].replace(",", ""))
    met = all(SIGNS[found["sign"]](value, bound) for value in values) if values else None
    return Goal(bench, path, goal, shown, met)


def flat(part: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name} ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def promised() -> set[str]:
    """The benchmarks that docs/internals/requirements.md names."""
    return set(re.findall(r"bench/(\w+)\.py", (ROOT / "docs" / "internals" / "requirements.md").read_text("utf-8")))


def run(script: Path, results: Path, options: list[str]) -> str:
    """What went wrong, or nothing."""
    print(f"== {script.relative_to(ROOT)}", flush=True)
    done = subprocess.run(
        [sys.executable, str(script), *options], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    target = results / f"{script.stem}.json"
    try:
        json.loads(done.stdout)
    except ValueError:
        return f"{script.stem} printed no JSON (exit {done.returncode})"
    target.write_text(done.stdout, "utf-8")
    return f"{script.stem} ended with exit code {done.returncode}" if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rough figures, for a look")
    parser.add_argument("--summary", action="store_true", help="only read the results that are there")
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args()
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    scripts = [one for one in sorted((ROOT / "bench").glob("*.py")) if all(word in one.stem for word in options.words)]
    trouble = []
    if not options.summary:
        trouble = [told for one in scripts if (told := run(one, results, ["--quick"] if options.quick else []))]
    return summarise(results, trouble, {one.stem for one in scripts}, wanted=promised() if not options.words else set())


def summarise(results: Path, trouble: list[str], names: set[str], wanted: set[str]) -> int:
    there = {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted(results.glob("*.json")) if path.stem in names
    }
    trouble += [
        f"docs/internals/requirements.md names bench/{name}.py; it has no result"
        for name in sorted(wanted - there.keys())
    ]
    found = [goal for name, result in there.items() for goal in goals(name, result)]
    words = {True: "met", False: "MISSED", None: "look"}
    print(f"\n{'goal':7} {'benchmark':11} what: goal: figure")
    for goal in found:
        print(f"{words[goal.met]:7} {goal.bench:11} {goal.what}: {goal.goal}: {goal.figure}")
    for told in trouble:
        print(f"NO FIGURE: {told}")
    count = {word: sum(words[goal.met] == word for goal in found) for word in words.values()}
    print(
        f"{count['met']} goals met, {count['MISSED']} MISSED, {count['look']} to look at, {len(trouble)} without a figure"
    )
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
