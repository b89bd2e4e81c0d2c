"""What a program imports: exactly these names, with types a checker can follow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import headway

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).with_name("public_api_calls.py")


def test_the_exported_names_are_these():
    assert sorted(headway.__all__) == [
        "FinishLine", "GiveUp", "HeadwayError", "Ledger", "ProgressManager", "Result", "RetryLater", "__version__", "amap",
        "map", "open_job", "retry_after", "track",
    ]  # fmt: skip
    assert sorted(dir(headway)) == sorted(headway.__all__)
    for name in headway.__all__:
        assert getattr(headway, name) is not None


def test_a_name_that_is_not_exported_is_an_attribute_error():
    assert not hasattr(headway, "Books")


def test_importing_headway_loads_none_of_its_parts():
    code = "import sys, headway; print([name for name in sys.modules if name.startswith('headway.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['headway._version']\n"


def test_typical_calls_have_the_types_they_are_documented_with(tmp_path: Path):
    """The file has calls that must be accepted, and with an ignore those that must not: strict mypy reports both."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(CALLS)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
