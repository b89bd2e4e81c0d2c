"""The example runs by one command, on any store by its address."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.states.conftest import Place

EXAMPLE = Path(__file__).parents[2] / "examples" / "partitions" / "run.py"


@pytest.mark.stores(("sqlite", pytest.param("redis", marks=pytest.mark.faults)))
def test_four_processes_and_three_tags_survive_a_kill_in_the_middle(place: Place):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), place.url], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "task 2  was killed with SIGKILL" in done.stdout
    assert "Everything is finished: 12 of 12 states, killed once: True" in done.stdout
