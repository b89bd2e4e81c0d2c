"""Change the source in small ways that matter, one at a time, and see whether the named tests notice.

    python tools/mutants.py [--only ROOM] [--req ID] [--match TEXT] [--jobs N] [--check] [--list]

Each `tests/mutants/ROOM.toml` lists changes:

    [[mutant]]
    file = "src/headway/ledger/store/recorder.py"
    old = '''text that occurs exactly once in the file'''
    new = '''what it is replaced by'''
    tests = ["tests/ledger/test_manager.py::test_name"]     # at least one of these must fail
    why = "what a user would lose"
    req = "S3-01"                                           # the requirement this change undoes, if it undoes one
    survives = "why no test can notice"                     # only for a change that is known to survive

The tree is copied aside, so the real one is never touched. The named tests must pass on the unchanged copy first; then
each change is made in a copy and its tests are run until one fails. ``--check`` only says whether every change still
applies. Exits 1 when a change survives without an explanation, no longer applies, or keeps its module from being imported.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Seconds for the tests of one mutant, and for all tests on the unchanged copy.
LIMIT, BASELINE_LIMIT = 300, 3600
#: A change that makes a test hang is noticed after so long. The unchanged copy keeps within it too.
LIMITED = ("--timeout", "100")
OPTIONAL = {"survives", "req"}
REQUIRED = {"file": str, "old": str, "new": str, "tests": list, "why": str}


@dataclass(frozen=True)
class Mutant:
    room: str
    number: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    survives: str | None = None
    req: str | None = None

    @property
    def name(self) -> str:
        return f"{self.room} {self.number}"


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    #: killed, survived, broken (the tests could not be run)
    outcome: str
    seconds: float
    output: str


def load(root: Path) -> tuple[list[Mutant], list[str]]:
    """All mutants, and what is wrong with the lists."""
    mutants: list[Mutant] = []
    wrong: list[str] = []
    for path in sorted((root / "tests" / "mutants").glob("*.toml")):
        try:
            entries = tomllib.loads(path.read_text("utf-8")).get("mutant", [])
        except tomllib.TOMLDecodeError as error:
            wrong.append(f"{path.stem}: not TOML: {error}")
            continue
        for number, entry in enumerate(entries, 1):
            missing = [key for key, kind in REQUIRED.items() if not isinstance(entry.get(key), kind)]
            unknown = entry.keys() - REQUIRED.keys() - OPTIONAL
            if missing or unknown or not entry["tests"]:
                wrong.append(f"{path.stem} {number}: wrong or missing {missing}, unknown {sorted(unknown)}")
                continue
            mutant = Mutant(path.stem, number, **(entry | {"tests": tuple(entry["tests"])}))
            wrong += [f"{mutant.name}: {problem}" for problem in misfits(mutant, root)]
            mutants.append(mutant)
    return mutants, wrong


def misfits(mutant: Mutant, root: Path) -> Iterator[str]:
    source = root / mutant.file
    if not source.is_file():
        yield f"{mutant.file} does not exist"
    elif (count := source.read_text("utf-8").count(mutant.old)) != 1:
        yield f"its old text occurs {count} times in {mutant.file}, not once: {mutant.old.strip().splitlines()[0]!r}"
    if mutant.old == mutant.new:
        yield "it changes nothing"
    for test in mutant.tests:
        if not (root / test.partition("::")[0]).exists():
            yield f"{test} does not exist"


class Copy:
    """The tree as it is now, committed or not, in a directory of its own."""

    _stamp = time.time() + 1

    def __init__(self, root: Path, directory: Path) -> None:
        self.path = directory
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        for name in filter(None, listing.stdout.decode().split("\0")):
            if (root / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, directory / name)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.path / mutant.file
        before = path.read_text("utf-8")
        self._write(path, before.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, "utf-8")
        # Python knows a compiled file by the second and the size of its source: no two of ours share a second.
        Copy._stamp += 1
        os.utime(path, (Copy._stamp, Copy._stamp))

    def run(self, tests: Sequence[str], limit: float, *options: str) -> tuple[int | None, str]:
        """pytest's exit code (None: it took too long) and what it said."""
        environment = os.environ | {"PYTHONPATH": str(self.path / "src")}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            *LIMITED,
            *options,
            *tests,
        ]
        process = subprocess.Popen(
            command, cwd=self.path, env=environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return _finish(process, limit)
        finally:
            _kill_group(process.pid)


def _finish(process: subprocess.Popen[str], limit: float) -> tuple[int | None, str]:
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)
        return None, process.communicate()[0]
    return process.returncode, output


def _kill_group(group: int) -> None:
    """What a mutant left behind, in the group that was started for it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def judge(mutant: Mutant, copies: queue.Queue[Copy]) -> Verdict:
    copy = copies.get()
    began = time.monotonic()
    try:
        with copy.changed(mutant):
            code, output = copy.run(mutant.tests, LIMIT, "-x")
    finally:
        copies.put(copy)
    # 1: a test failed; None: a test that never ends is noticed too. Anything but these and 0 is no answer.
    outcome = {0: "survived", 1: "killed", None: "killed"}.get(code, "broken")
    return Verdict(mutant, outcome, time.monotonic() - began, output)


def baseline(copy: Copy, mutants: Sequence[Mutant], jobs: int) -> str:
    """What is wrong with the named tests on the unchanged copy; nothing if they pass."""
    probe = "import headway, sys; print(headway.__file__)" if (copy.path / "src" / "headway").exists() else "print()"
    environment = os.environ | {"PYTHONPATH": str(copy.path / "src")}
    where = subprocess.run(
        [sys.executable, "-c", probe], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    if where.stdout.strip() and not Path(where.stdout.strip()).is_relative_to(copy.path):
        return f"The tests would import {where.stdout.strip()}, not the copy."
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    code, output = copy.run(tests, BASELINE_LIMIT, "-n", str(jobs), "--dist", "worksteal")
    return (
        "" if code == 0 else f"The named tests do not pass on the unchanged source (pytest: {code}):\n{output[-5000:]}"
    )


def report(verdict: Verdict) -> bool:
    """Print it; whether it is as it should be."""
    mutant = verdict.mutant
    explained = verdict.outcome == "survived" and mutant.survives is not None
    word = "explained" if explained else verdict.outcome
    print(f"{word:9} {verdict.seconds:5.1f} s  {mutant.name:12} {mutant.file}: {mutant.why}", flush=True)
    if verdict.outcome == "killed" and mutant.survives is not None:
        print("          (it is noticed now: its `survives` can go)")
    if verdict.outcome == "killed" or explained:
        return True
    old = "".join(f"  - {line}\n" for line in mutant.old.strip("\n").splitlines())
    new = "".join(f"  + {line}\n" for line in mutant.new.strip("\n").splitlines())
    print(f"{old}{new}  by {', '.join(mutant.tests)}", flush=True)
    if verdict.outcome == "broken":
        print(verdict.output[-1500:], flush=True)
    return False


def missing_tests(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """What pytest says of named tests that are not there: one was renamed, or has other parameters by now."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "", *tests],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    if found.returncode == 0:
        return []
    said = [line for line in (found.stdout + found.stderr).splitlines() if line.startswith("ERROR")]
    return said or [f"The named tests cannot be collected:\n{found.stdout[-2000:]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ROOM", help="the mutants of tests/mutants/ROOM.toml")
    parser.add_argument("--match", metavar="TEXT", help="those whose file, texts or reason contain TEXT")
    parser.add_argument(
        "--req", metavar="ID", help="those of requirements that begin with ID (S2-14, or S2 for all of S2)"
    )
    # Tests wait for half of their time and more: four at a time keep two processors busy.
    parser.add_argument("--jobs", type=int, default=4, help="how many at a time (4)")
    parser.add_argument(
        "--check", action="store_true", help="only say whether every mutant still applies, and its tests exist"
    )
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help=argparse.SUPPRESS)
    options = parser.parse_args()
    mutants, wrong = load(options.root)
    if options.check and not wrong:
        wrong = missing_tests(options.root, mutants)
    chosen = [
        mutant
        for mutant in mutants
        if options.only in (None, mutant.room)
        and (options.req is None or (mutant.req or "").startswith(options.req))
        and (options.match or "") in f"{mutant.file}\n{mutant.old}\n{mutant.new}\n{mutant.why}"
    ]
    for problem in wrong:
        print(problem)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:12} {mutant.file}: {mutant.why}")
    if wrong or options.check or options.list:
        print(f"{len(mutants)} mutants, {len(wrong)} that do not apply")
        return 1 if wrong else 0
    if not chosen:
        print("There are no such mutants.")
        return 1
    return run(options.root, chosen, options.jobs)


def run(root: Path, chosen: Sequence[Mutant], jobs: int) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-mutants-") as directory:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            (place := Path(directory, str(number))).mkdir()
            copies.put(Copy(root, place))
        first = copies.get()
        if trouble := baseline(first, chosen, jobs):
            print(trouble)
            return 1
        copies.put(first)
        print(
            f"{len(chosen)} mutants; their tests pass on the unchanged source ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        good = 0
        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(judge, mutant, copies) for mutant in chosen]):
                good += report(done.result())
    bad = len(chosen) - good
    print(f"{len(chosen)} mutants, {bad} not noticed or broken, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
