"""In which order a run executes its items."""

from __future__ import annotations

import time
from pathlib import Path

import headway

ITEMS = 400


def test_a_retry_runs_when_it_is_due_although_hundreds_of_items_wait(tmp_path: Path):
    log = tmp_path / "executed"

    def work(item: int) -> None:
        with log.open("a") as file:
            file.write(f"{item}\n")
        time.sleep(0.01)
        if item == 0:
            raise ValueError("never works")

    headway.map(
        work, range(ITEMS), job="j", database=f"sqlite:///{tmp_path}/headway.db", mode="thread", workers=1, retries=2,
        retry_delay=0.1, last_pass=False, progress="none",
    )  # fmt: skip
    executed = [int(line) for line in log.read_text().split()]
    assert sorted(executed) == [0, 0, *range(ITEMS)]
    positions = [position for position, item in enumerate(executed) if item == 0]
    assert positions[-1] < ITEMS - 50, "three tries take about two seconds, and the items four"
