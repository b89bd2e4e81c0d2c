"""The example is what the page says: one command, a killed analyser, one message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_crawler_completes_once_although_an_analyser_was_killed():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "crawl" / "run.py", "--pages", "60"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "analyser a0 is killed" in done.stdout
    assert "DONE: 69 of 69 pages, 9 dead links" in done.stdout
    assert "job.completed was told 1 time(s)" in done.stdout
