"""A requirement is proved by a test that ran and passed, by nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import trace

ROOT = Path(__file__).parents[2]
PAGE = """# Requirements
## Done (003)
| ID | What holds |
|---|---|
| S3-01 | the first |
| S3-02 | the second, measured by bench/ledger.py |
## Later (002) (open)
| S2-01 | not yet |
"""
TESTS = """
import pytest

@pytest.mark.req("S3-01")
def test_too(): pass

@pytest.mark.req("S3-01")
def test_passes(): pass

@pytest.mark.req("S3-02")
def test_fails(): assert 0

@pytest.mark.req("S3-03")
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.req("S3-04"))])
def test_many(n): pass

@pytest.mark.req("S3-05")
def test_skips(): pytest.skip("no server")

@pytest.mark.req("S3-06")
@pytest.mark.xfail
def test_expected(): assert 0

@pytest.mark.req("S3-07")
@pytest.mark.slow
def test_deselected(): pass

@pytest.fixture
def broken():
    yield
    raise ValueError

@pytest.mark.req("S3-08")
def test_teardown(broken): pass

@pytest.mark.req("S3-09")
class TestGroup:
    def test_in_class(self): pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_the_results_list_the_outcome_of_every_test_that_ran(tmp_path: Path, workers: list[str]):
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "__init__.py", "services"):
        (tmp_path / "tests" / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--results", "out.json", *workers,
               "tests/test_it.py"]  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["exit"] == 1
    found = {test["test"].partition("::")[2]: (test["outcome"], test["requirements"]) for test in written["tests"]}
    assert found == {
        "test_too": ("passed", ["S3-01"]),
        "test_passes": ("passed", ["S3-01"]),
        "test_fails": ("failed", ["S3-02"]),
        "test_many[1]": ("passed", ["S3-03"]),
        "test_many[2]": ("passed", ["S3-03", "S3-04"]),
        "test_skips": ("skipped", ["S3-05"]),
        "test_expected": ("xfailed", ["S3-06"]),
        "test_teardown": ("failed", ["S3-08"]),
        "TestGroup::test_in_class": ("passed", ["S3-09"]),
    }


def test_results_are_appended_to_those_of_an_earlier_run(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "__init__.py", "services"):
        (tmp_path / "tests" / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "tests" / "test_it.py").write_text("def test_now(): pass\ndef test_again(): pass\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    earlier = [
        result("tests/test_it.py::test_again", "failed"),
        result("tests/test_z.py::test_before", "passed", "S3-01"),
    ]
    (tmp_path / "out.json").write_text(json.dumps({"exit": 1, "tests": earlier}))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--results", "out.json", "--append-results",
               "tests/test_it.py"]  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "exit": 1,
        "tests": [
            result("tests/test_it.py::test_again", "passed"),
            result("tests/test_it.py::test_now", "passed"),
            result("tests/test_z.py::test_before", "passed", "S3-01"),
        ],
    }


def test_a_skip_is_a_failure_under_ci(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "__init__.py", "services"):
        (tmp_path / "tests" / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "tests" / "test_it.py").write_text("import pytest\n\ndef test_skips(): pytest.skip('no server')\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_it.py"]
    for environment, code in (({}, 0), ({"CI": "true"}, 1)):
        basics = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=basics | environment, check=False
        )
        assert done.returncode == code, done.stdout


TOOLS = ("ruff", "mypy", "lint-imports", "python", "sphinx-build", "pytest", "coverage")


#: What `make check` sets in its own environment; the verb under test starts without it.
OF_MAKE = {"CI", "IGNORE", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}


def make(verb: str, tools: Path, broken: str = "") -> tuple[int, list[str]]:
    """The exit code of a verb, and what the tools it ran said: none of them does anything, and the broken one fails."""
    for name in TOOLS:
        (tools / name).write_text(f'#!/bin/sh\necho "{name} CI=$CI $*"\n[ {name} != "{broken}" ]\n')
        (tools / name).chmod(0o755)
    (tools / ".installed").touch()
    command = ["make", "-s", "-C", str(ROOT), verb, f"BIN={tools}", f"SETUP={tools}/.installed"]
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("broken", TOOLS)
def test_whichever_step_of_make_check_fails_it_fails_and_the_steps_beside_it_have_their_say(
    tmp_path: Path, broken: str
):
    code, lines = make("check", tmp_path, broken)
    assert code != 0
    ran = {line.partition(" ")[0] for line in lines}
    before = {"ruff", "mypy", "lint-imports", "python", "sphinx-build"}
    assert ran >= before
    assert ran & {"pytest", "coverage"} == (set() if broken in before else {"pytest", broken})


@pytest.mark.parametrize(("verb", "told"), [("test", "pytest CI="), ("check", "pytest CI=true")])
def test_make_check_lets_nothing_be_skipped_and_make_test_does(tmp_path: Path, verb: str, told: str):
    code, lines = make(verb, tmp_path)
    assert code == 0
    runs = [line for line in lines if line.startswith("pytest")]
    assert all(run.startswith(f"{told} ") for run in runs)
    assert all("--results=.test-results.json" in run for run in runs)
    assert ["--append-results" in run for run in runs] == ([False, True] if verb == "check" else [False])
    if verb == "check":
        assert "python CI=true tools/trace.py .test-results.json" in lines


def test_make_test_runs_every_test_and_make_check_runs_the_watchers_tests_only_under_coverage(tmp_path: Path):
    def runs(verb: str) -> list[list[str]]:
        return [line.split() for line in make(verb, tmp_path)[1] if line.startswith("pytest")]

    def ignored(run: list[str]) -> set[str]:
        return {word.removeprefix("--ignore=") for word in run if word.startswith("--ignore=")}

    def named(run: list[str]) -> set[str]:
        return {word for word in run if word.startswith("tests/")}

    (test,) = runs("test")
    assert ignored(test) == named(test) == set()
    rest, measured = runs("check")
    assert "tests/watcher" in ignored(rest)
    assert named(rest) == set()
    assert ignored(rest) == named(measured), "no test is left out"
    assert [any(word.startswith("--cov=") for word in run) for run in (rest, measured)] == [False, True]


def result(test: str, outcome: str, *requirements: str) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "requirements": list(requirements)}


def found(tmp_path: Path, results: list[dict[str, Any]]) -> list[str]:
    return list(trace.problems(trace.requirements(PAGE), results, tmp_path))


def test_a_requirement_is_proved_by_one_test_that_passed(tmp_path: Path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "ledger.py").touch()
    results = [result("a", "passed", "S3-01", "S3-02"), result("b", "failed", "S3-01")]
    assert found(tmp_path, results) == [
        "no mutant: S3-01 the first",
        "no mutant: S3-02 the second, measured by bench/ledger.py",
    ]
    listed = with_mutants(tmp_path, 'req = "S3-01"\ntests = ["a"]', 'req = "S9-99"\ntests = ["a"]')
    assert list(trace.problems(listed, results, tmp_path)) == []


@pytest.mark.parametrize("outcome", ["skipped", "failed", "xfailed"])
def test_a_requirement_whose_only_test_did_not_pass_is_unproved(tmp_path: Path, outcome: str):
    told = found(tmp_path, [result("a", outcome, "S3-01")])
    assert told[0] == f"unproved: S3-01 the first: a ({outcome})"
    assert told[1].startswith("unproved: S3-02 the second")
    assert told[1].endswith("no test of this run is marked with it")
    assert told[2] == "S3-02 names bench/ledger.py, which does not exist"
    assert len(told) == 3, "a requirement of an open part may wait"


def test_a_mark_without_a_requirement_is_reported(tmp_path: Path):
    assert "not in docs/internals/requirements.md: S9-99, claimed by a" in found(
        tmp_path, [result("a", "passed", "S9-99")]
    )


def test_a_test_replaced_by_another_of_its_name_is_reported(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    group = "class TestB:\n    def test_c(self): pass\n    async def test_c(self): pass\n"
    source = f"def test_a(): pass\ndef helper(): pass\ndef helper(): pass\n{group}def test_a(): pass\n"
    (tmp_path / "tests" / "test_x.py").write_text(source)
    told = [one for one in found(tmp_path, []) if "twice" in one]
    assert told == [
        "tests/test_x.py: test_a is there twice; the first is never run",
        "tests/test_x.py: test_c is there twice; the first is never run",
    ]


def with_mutants(tmp_path: Path, *entries: str) -> dict[str, trace.Requirement]:
    """Read the page and one list of mutants, as `make trace` does."""
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / "room.toml").write_text("".join(f"[[mutant]]\n{entry}\n" for entry in entries))
    listed = trace.requirements(PAGE + "## Without a mutant\n| S3-02 | measured by a benchmark |\n")
    told = list(trace.add_mutants(listed, tmp_path))
    assert told == [f"not in docs/internals/requirements.md: S9-99, named by mutant room {len(entries)}"]
    return listed


@pytest.mark.parametrize(
    ("named", "proof", "counts"),
    [
        ("t.py::test_a", "t.py::test_a", True),
        ("t.py::test_a", "t.py::test_a[file]", True),
        ("t.py", "t.py::test_a", True),
        ("t.py::test_a", "t.py::test_ab", False),
        ("t.py::test_a[file]", "t.py::test_a[server]", False),
    ],
)
def test_a_mutant_counts_only_if_its_test_proved_the_requirement(tmp_path: Path, named: str, proof: str, counts: bool):
    listed = with_mutants(tmp_path, f'req = "S3-01"\ntests = ["{named}"]', 'req = "S9-99"\ntests = ["t.py"]')
    list(trace.problems(listed, [result(proof, "passed", "S3-01"), result("other", "passed", "S3-02")], tmp_path))
    assert listed["S3-01"].has_mutant is counts
    assert (listed["S3-02"].has_mutant, listed["S3-02"].excuse) == (False, "measured by a benchmark")


def test_a_mutant_whose_test_carries_another_mark_does_not_count(tmp_path: Path):
    listed = with_mutants(tmp_path, 'req = "S3-01"\ntests = ["t.py::test_a"]', 'req = "S9-99"\ntests = ["t.py"]')
    list(trace.problems(listed, [result("t.py::test_a", "passed", "S3-02")], tmp_path))
    assert not listed["S3-01"].has_mutant
