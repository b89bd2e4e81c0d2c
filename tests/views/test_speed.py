"""The rate and the forecast of a run, from its counts by the minute."""

from __future__ import annotations

import pytest

from headway.views.jobs.series import Point, Series
from headway.views.jobs.speed import items_in_progress, speed

NOW = 30 * 60.0


def of(*counts: int, seconds: float = 0.0) -> Series:
    """Return a series whose last minute ends at `NOW`."""
    first = 30 - len(counts)
    return Series(1, tuple(Point(first + no, count, 0, count * seconds) for no, count in enumerate(counts)))


def test_a_run_that_finishes_nothing_has_no_rate():
    assert speed(of(60, 60, 60, 60, 60, 60), 1440.0, NOW, 1000, 360).rate == pytest.approx(1.0)
    silent = speed(of(60, 60, 60, 60, 0, 0, 0), 1380.0, NOW, 1000, 240)
    assert (silent.rate, silent.forecast) == (None, None)


def test_a_bursty_run_keeps_its_rate_between_two_bursts():
    bursts = of(60, 0, 0, 60, 0, 0, 60, 0, 0, 60, 0, 0)
    assert speed(bursts, NOW - 720, NOW, 1000, 240).rate == pytest.approx(1 / 3, rel=0.1)


def test_the_time_left_is_the_remaining_items_divided_by_the_rate():
    slowing = of(*range(120, 30, -3))
    found = speed(slowing, 0.0, NOW, 3000, slowing.done)
    assert found.rate is not None
    assert found.forecast is not None
    assert found.forecast.likely == pytest.approx(3000 / found.rate)
    assert found.forecast.early <= found.forecast.likely <= found.forecast.late
    assert found.forecast.late > 1.3 * found.forecast.likely  # the trend widens the range


def test_items_that_a_fleet_has_not_counted_yet_belong_to_the_current_minute():
    assert speed(of(0, 0), NOW - 60, NOW, 1000, 120).rate == pytest.approx(2.0)


def test_items_in_progress_are_those_noted_or_the_mean_of_the_last_minutes():
    found = speed(of(600, 600, 600, seconds=0.4), NOW - 180, NOW, 1000, 1800)
    assert found.at_work == pytest.approx(4.0)
    assert items_in_progress(0, 1000, found.at_work) == 4
    assert items_in_progress(6, 1000, found.at_work) == 6
    assert items_in_progress(0, 2, found.at_work) == 2
