"""How a slot of a fleet ends when it is asked to stop, once or several times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.ledger import Ledger
from headway.ledger.control import Control
from headway.ledger.fleet import fleet
from headway.ledger.fleet.share import Share
from headway.queue.worker.execution import RunningTask
from headway.run.fleet import slot

FUNCTION = """
import os, time

def wait(item):
    open("begun", "w").close()
    while not os.path.exists("free"):
        time.sleep(0.01)
"""


@pytest.fixture
def started(postgres_with_tables: str, tmp_path: Path, quick_cli: Callable[..., Any]) -> Iterator[str]:
    """Start a fleet for the job `ads` of one item; return the address of its database."""
    (tmp_path / "work.py").write_text(FUNCTION)
    (tmp_path / "items.jsonl").write_text("0\n")
    words = ("run", "work:wait", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach")
    begun = quick_cli(*words, "--database", postgres_with_tables)
    assert begun.returncode == 0, begun.stderr
    yield postgres_with_tables
    sys.modules.pop("work", None)  # the slot imported it here; other tests have modules of that name


@pytest.mark.parametrize("job_is_stopped_first", [False, True], ids=["worker ends", "job stopped, then worker ends"])
def test_a_slot_that_is_asked_to_stop_twice_finishes_what_runs(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, job_is_stopped_first: bool
):
    """The item ends only after the slot has asked three times more what is wanted of it."""
    asked = Share.asked
    stopping = False
    later = 0

    def observed(share: Share, run: int) -> Control:
        nonlocal stopping, later
        found = asked(share, run)
        if stopping:
            later += 1
        elif (tmp_path / "begun").exists():
            if job_is_stopped_first and not found.stopping:
                share._request("stop", "anna", "", stopping=1)
            else:
                stopping = True  # from the next time on
        if later > 3:
            (tmp_path / "free").touch()
        return found

    monkeypatch.setattr(Share, "asked", observed)
    claim: Any = SimpleNamespace(id="t", kind=slot.KIND, user_id="", role="admin", attempts=0)
    task = RunningTask(claim, lambda *_: None, lambda: False, lambda: stopping)
    with Ledger.open(started) as ledger:
        job = ledger.job("ads")
        known = fleet.read(ledger.database, job.no)
        assert known is not None
        ended = slot.serve(task, "ads", known.run, started, lambda _, stored: stored)
        assert ended == {"ended": "its worker is stopping", "done": 1, "failures": 0}
        assert (job.info().done, job.info().failures) == (1, 0)
