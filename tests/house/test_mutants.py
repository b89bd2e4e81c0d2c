"""The tool that changes the source tells the noticed change from the unnoticed one, and touches nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutants

ROOT = Path(__file__).parents[2]
SOURCE = "def double(n):\n    return n * 2\n\n\ndef half(n):\n    return n / 2\n"
KILLED = ("return n * 2", "return n * 3", "")
SURVIVES = ("return n / 2", "return n // 2", "")
EXPLAINED = ("return n / 2", "return n * 0.5", 'survives = "the same for every number"')
BROKEN = ("def double(n):", "def double(n:", "")


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "src" / "toy.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_toy.py").write_text(
        "import toy\n\n\ndef test_double():\n    assert toy.double(2) == 4\n\n\ndef test_half():\n    assert toy.half(2) == 1\n"
    )
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def write(toy: Path, *changes: tuple[str, str, str], file: str = "src/toy.py", test: str = "tests/test_toy.py") -> None:
    entries = [
        f"[[mutant]]\nfile = '{file}'\nold = '{old}'\nnew = '{new}'\ntests = ['{test}']\nwhy = 'sums are wrong'\n{more}\n"
        for old, new, more in changes
    ]
    (toy / "tests" / "mutants" / "toy.toml").write_text("".join(entries))


def run(toy: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools" / "mutants.py"), "--root", str(toy), *options]
    # The toy needs no plugins but those of the tool's own options, and loading ours takes most of the time.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout,xdist.plugin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | plugins)
    return done.returncode, done.stdout + done.stderr


def test_a_noticed_change_is_killed_and_a_survivor_is_reported_with_its_reason(toy: Path):
    write(toy, KILLED, SURVIVES, EXPLAINED)
    code, told = run(toy)
    assert code == 1
    assert "killed " in told
    assert "explained " in told
    assert "survived " in told
    assert "  - return n / 2\n  + return n // 2\n" in told
    assert told.count("sums are wrong") == 3
    assert "3 mutants, 1 not noticed or broken" in told
    assert (toy / "src" / "toy.py").read_text() == SOURCE, "the real tree is never touched"


def test_all_noticed_or_explained_is_success(toy: Path):
    write(toy, KILLED, EXPLAINED)
    assert run(toy)[0] == 0


def test_a_change_that_keeps_the_module_from_being_imported_proves_nothing(toy: Path):
    write(toy, BROKEN)
    code, told = run(toy)
    assert code == 1
    assert "broken " in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("return n", "return m", ""), "occurs 2 times"),
        (("return x", "return m", ""), "occurs 0 times"),
        (("return n * 2", "return n * 2", ""), "changes nothing"),
        (("return n * 2", "return n", "speed = 3"), "unknown ['speed']"),
    ],
)
def test_a_change_that_does_not_apply_is_an_error_before_anything_is_run(
    toy: Path, change: tuple[str, str, str], told: str
):
    write(toy, change)
    code, output = run(toy)
    assert code == 1
    assert told in output


def test_tests_that_fail_without_any_change_are_an_error(toy: Path):
    write(toy, KILLED)
    (toy / "src" / "toy.py").write_text(SOURCE.replace("n / 2", "n / 3"))
    code, told = run(toy)
    assert code == 1
    assert "do not pass on the unchanged source" in told


def test_mutants_can_be_chosen_by_room_and_by_text(toy: Path):
    write(toy, KILLED, SURVIVES)
    assert run(toy, "--match", "n * 2")[0] == 0
    assert "no such mutants" in run(toy, "--only", "other")[1]
    assert run(toy, "--check")[0] == 0


def test_a_missing_test_is_reported_before_any_test_runs(toy: Path):
    write(toy, KILLED, test="tests/test_toy.py::test_thrice")
    code, told = run(toy, "--check")
    assert code == 1
    assert "test_thrice" in told
    assert "1 mutants, 1 that do not apply" in told


def test_every_mutant_of_ours_still_applies():
    assert mutants.load(ROOT)[1] == []
