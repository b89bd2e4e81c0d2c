"""When a pool records what its items came to, and what it lets run beside an item that may have killed a slot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headway.core.lifecycle import Shutdown
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError
from headway.ledger import Ledger, NewItem
from headway.run.display.display import open_display
from headway.run.output.results import Keep
from headway.run.pool.backlog import Backlog, MakeBacklog
from headway.run.pool.local import LocalRunner
from headway.run.pool.loop import RunLoop
from headway.run.pool.runner import Ending, HeldJob, RunContext, Settings
from tests.services.waiting import eventually

Run = Callable[..., Ending]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a.db"


@pytest.fixture
def run(url: str) -> Run:
    """`run(function, count, workers=.., commit_seconds=..)`: a pool works so many items off."""

    def run(function: Callable[[int], Any], count: int, *, backlog: MakeBacklog = Backlog, **options: Any) -> Ending:
        with Ledger.open(url) as ledger:
            job = ledger.create("t", max_retries=0)
            job.register(NewItem(idx, str(idx)) for idx in range(count))
            job.seal(settle=False)
            hold = ledger.hold(job, {})
            settings = Settings(policy=RetryPolicy(0, 0.0), last_pass=False, **options)
            held = HeldJob(job.held_by(hold), hold, lambda running: ledger.renew(hold, running))
            context = RunContext(open_display("none", stream=None), Shutdown())
            return RunLoop(held, settings, context, Keep(), lambda parts: LocalRunner(parts, function), backlog).run()

    return run


def results(url: str) -> list[Any]:
    with Ledger.open(url) as ledger:
        return [json.loads(text or "null") for _, _, text in ledger.job("t").results_by_index(-1)]


# ---- what does not wait for company ---------------------------------------------------------------------------------

#: How long the pools here may wait with recording, and how long their items wait for it.
COMMIT_SECONDS = 60.0
PATIENCE = 30.0


def is_recorded(url: str, count: int, patience: float = PATIENCE) -> bool:
    """Whether so many items are done, long before the next time all are recorded."""
    with Ledger.open(url, create=False) as ledger:
        until = time.monotonic() + patience
        while ledger.job("t").info().done < count:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True


def test_what_was_written_down_as_running_is_recorded_when_it_ends(url: str, run: Run):
    """Or a kill in between would charge an item that has ended."""

    def work(item: int) -> bool | None:
        if item == 1:
            time.sleep(1.3)  # it is noted after a second
        return is_recorded(url, 2) if item == 2 else None

    assert run(work, 3, workers=1, commit_seconds=COMMIT_SECONDS).done == 3
    assert results(url)[2] is True


def test_much_is_recorded_at_once(url: str, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.run.pool.outcomes.COMMIT_MOST", 50)

    def work(item: int) -> bool | None:
        return is_recorded(url, 51) if item == 60 else None

    assert run(work, 61, workers=1, commit_seconds=COMMIT_SECONDS).done == 61
    assert results(url)[60] is True


def test_few_short_items_wait_for_each_other(url: str, run: Run):
    """Without that the two tests above would show nothing."""

    def work(item: int) -> bool | None:
        return is_recorded(url, 3, patience=1.0) if item == 3 else None

    assert run(work, 4, workers=1, commit_seconds=COMMIT_SECONDS).done == 4
    assert results(url)[3] is False


def test_the_last_failure_that_is_allowed_is_recorded_at_once_because_nothing_may_begin_before(run: Run):
    def work(item: int) -> None:
        if item == 1:
            time.sleep(0.2)  # the one before it is recorded by now
            raise ValueError

    began = time.monotonic()
    ending = run(work, 5, workers=1, max_failures=1, commit_seconds=30.0)
    assert (ending.outcome, ending.dead) == ("stopped", 1)
    assert time.monotonic() - began < 20


# ---- suspects of the death of a slot --------------------------------------------------------------------------------


class Spell(NamedTuple):
    """When an item ran, and when it was written down as running before that, by the database's clock."""

    began: float
    ended: float
    noted_at: float | None

    @property
    def noted(self) -> bool:
        return self.noted_at is not None


def suspecting(*suspects: int) -> MakeBacklog:
    """A backlog in which these items may have killed a slot."""

    class Suspecting(Backlog):
        def refill(self, now: float) -> None:
            super().refill(now)
            for item in [each for each in self.ready if each.idx in suspects]:
                self.ready.remove(item)
                self.slot_suspects.append(item)

    return Suspecting


def sleeping(url: str, seconds: list[float]) -> Callable[[int], Spell]:
    return spelled(url, lambda item: time.sleep(seconds[item]))


def spelled(url: str, run: Callable[[int], object]) -> Callable[[int], Spell]:
    def work(item: int) -> Spell:
        with Ledger.open(url, create=False) as ledger:
            row = ledger.database.one("SELECT updated_at FROM progress WHERE idx = ? AND worker IS NOT NULL", (item,))
        began = time.monotonic()
        run(item)
        return Spell(began, time.monotonic(), row[0] if row else None)

    return work


def spells(url: str) -> list[Spell]:
    return [Spell(*found) for found in results(url)]


def test_suspects_begin_one_after_the_other_and_each_is_written_down_before(
    url: str, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "headway.run.pool.local.NOTE_SECONDS", 600.0
    )  # none of them runs for long, however busy the machine
    assert run(sleeping(url, [0.3] * 4), 4, workers=3, backlog=suspecting(0, 1, 2, 3)).done == 4
    found = sorted(spells(url))
    assert all(one.noted for one in found)
    assert all(one.ended <= next_one.began for one, next_one in pairwise(found))


def test_a_suspect_waits_until_what_is_not_written_down_has_ended(url: str, run: Run):
    assert run(sleeping(url, [0.6, 0.1]), 2, workers=3, backlog=suspecting(1)).done == 2
    common, suspect = spells(url)
    assert (common.noted, suspect.noted) == (False, True)
    assert suspect.began >= common.ended


def test_a_suspect_that_runs_for_long_keeps_nobody_waiting(url: str, run: Run, tmp_path: Path):
    other_begun = tmp_path / "begun"

    def wait_for_the_other(item: int) -> None:
        if item == 0:
            eventually(other_begun.exists)
        else:
            other_begun.touch()

    assert run(spelled(url, wait_for_the_other), 2, workers=3, backlog=suspecting(0, 1)).done == 2
    long, other = spells(url)
    assert long.noted_at is not None
    assert other.noted_at is not None
    # At its beginning it may have killed this process. Both moments are the pool's own: the delay of a busy machine only
    # adds to the time between them.
    assert other.noted_at >= long.noted_at + 0.9


# ---- the end --------------------------------------------------------------------------------------------------------


class RestoredAtTheEnd(Backlog):
    """The database goes back to a moment at which fewer items were registered, when everything is done."""

    def find_more(self, now: float) -> bool:
        self._job.database.run(lambda tx: tx.execute("DELETE FROM input_products WHERE idx >= 5"))
        self._job.database.run(lambda tx: tx.execute("DELETE FROM progress WHERE idx >= 5"))
        self._job.database.run(lambda tx: tx.execute("UPDATE jobs SET total = 5, done = 5"))
        return super().find_more(now)


def test_a_run_whose_job_lost_registered_items_ends_with_an_error(run: Run):
    with pytest.raises(HeadwayError, match="only 5 items of job t were registered"):
        run(str, 8, workers=1, backlog=RestoredAtTheEnd)
