"""Whether a run ends when it is said to: the real estimates, on runs in simulated time whose end is known.

Everybody looks ten times at each run. A look counts when a forecast is shown at that moment; before a pause nobody can know
of it, so such looks do not count. The runs are others than those by which the figures of the estimate were chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from headway.core.forecast import forecast
from headway.run.display.estimate import Estimator
from headway.views.jobs.series import Point, Series
from headway.views.jobs.speed import speed
from tests.run.simulated import SHAPES, SimulatedRun, looks, simulate

SEEDS = range(1000, 1005)
#: What comes only at the end cannot be known before it has begun.
UNKNOWABLE = {"a slow tail"}


@dataclass(frozen=True, slots=True)
class Look:
    """What was shown at one moment, and what came."""

    low: float
    likely: float
    high: float
    left: float

    @property
    def right(self) -> bool:
        return self.low <= self.left <= self.high


def _moments(run: SimulatedRun, seed: int) -> Iterator[float]:
    for at in looks(run, seed, every=0.1):
        if run.paused is None or at >= run.paused[1]:
            yield at


def on_the_terminal(run: SimulatedRun, seed: int) -> Iterator[Look]:
    """Of the run itself, which is told several times a second where it is."""
    now = 0.0
    estimator = Estimator(lambda: now)
    estimator.update(run.at(0.0))
    step = run.end / 1000
    for at in _moments(run, seed):
        while now < at:
            now = min(at, now + step)
            estimator.update(run.at(now))
        if (found := estimator.forecast) is not None:
            yield Look(found.low, found.seconds, found.high, run.end - at)


def elsewhere(run: SimulatedRun, seed: int) -> Iterator[Look]:
    """Of `headway show` and the pages, which have the counts by the minute."""
    began = 60_017.0
    for at in _moments(run, seed):
        now, snapshot = began + at, run.at(at)
        counts = [
            Point(minute, _done(run, min(now, minute * 60 + 60) - began) - _done(run, minute * 60 - began), 0, 0.0)
            for minute in range(int(now - 1800) // 60, int(now) // 60 + 1)
        ]
        assert snapshot.total is not None
        left = snapshot.total - snapshot.position - snapshot.dead
        found = speed(Series(1, tuple(counts)), began, now, left, snapshot.done).forecast
        if found is not None:
            yield Look(found.early, found.likely, found.late, run.end - at)


def _done(run: SimulatedRun, at: float) -> int:
    return run.at(at).done if at > 0 else 0


@cache
def _run(shape: str, seed: int) -> SimulatedRun:
    return simulate(shape, seed)


def _all_looks(where: Callable[[SimulatedRun, int], Iterator[Look]]) -> dict[str, list[Look]]:
    found: dict[str, list[Look]] = defaultdict(list)
    for shape in SHAPES:
        for seed in SEEDS:
            found[shape] += where(_run(shape, seed), seed)
    return found


@pytest.mark.parametrize("where", [on_the_terminal, elsewhere])
def test_the_range_contains_the_true_end_four_times_out_of_five(
    where: Callable[[SimulatedRun, int], Iterator[Look]],
):
    found = _all_looks(where)
    every = [look for shape in found.values() for look in shape]
    assert len(every) >= 300
    assert min(len(shape) for shape in found.values()) >= 15
    assert sum(look.right for look in every) / len(every) >= 0.8
    shares = {shape: sum(look.right for look in some) / len(some) for shape, some in found.items()}
    assert {shape: share for shape, share in shares.items() if share < 0.5 and shape not in UNKNOWABLE} == {}
    # A range that says everything would be right as well, and say nothing.
    widths = sorted(look.high / look.low for look in every)
    assert widths[len(widths) // 2] < 2.5


def test_work_that_gets_slower_is_forecast_later_than_its_pace_says_and_work_that_gets_faster_earlier():
    steady = [(10.0, 10.0)] * 20
    slower = [(10.0 + step, 10.0) for step in range(20)]
    faster = [(30.0 - step, 10.0) for step in range(20)]
    assert forecast(steady, 100, 1.0, 60).seconds == pytest.approx(100)
    assert forecast(slower, 100, 2.9, 60).seconds > 1.05 * 290
    assert forecast(faster, 100, 1.1, 60).seconds < 0.95 * 110
    assert forecast(slower, 100, 2.9, 60).low < 290  # it may as well stay as it is


def test_chance_is_no_trend():
    wild = [(10.0 * (1 + place * 7 % 5), 10.0) for place in range(20)]
    found = forecast(wild, 100, 3.0, 60)
    assert found.seconds == pytest.approx(300)
    assert found.high - found.low > forecast([(30.0, 10.0)] * 20, 100, 3.0, 60).high - found.low


@pytest.mark.parametrize("past", [[], [(0.0, 0.0)] * 9, [(0.0, 5.0)] * 9, [(5.0, 0.0)] * 9, [(1e-300, 1e9)] * 9])
def test_whatever_the_past_was_a_forecast_is_a_range_in_order(past: list[tuple[float, float]]):
    found = forecast(past, 10, 0.5, 1)
    assert 0 <= found.low <= found.seconds <= found.high < 1000
