"""The rate and the forecast of a run, on a clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from headway.core.text import duration, pace, roughly
from headway.run.display.estimate import Estimator, RunSnapshot


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


START = RunSnapshot(total=1000, kept=0, done=0, running=4, retrying=0, dead=0, failures=0)


@dataclass
class Bench:
    """An estimator that is told, second after second, how far a run is."""

    snapshot: RunSnapshot = START
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.clock)
        self.estimator.update(self.snapshot)

    def go(self, seconds: float, *, per_second: float = 0.0, step: float = 0.5, **changes: int) -> Bench:
        done, end = float(self.snapshot.done), self.clock.now + seconds
        while self.clock.now < end - 1e-9:
            self.clock.now += step
            done += per_second * step
            self.snapshot = replace(self.snapshot, done=int(done), **changes)  # type: ignore[arg-type]  # counts only
            self.estimator.update(self.snapshot)
        return self


def test_there_is_no_rate_before_anything_has_finished():
    assert Bench().go(5).estimator.rate is None


def test_the_rate_is_that_of_this_run_and_ignores_what_was_kept():
    bench = Bench(replace(START, total=200_000, kept=100_000)).go(60, per_second=40)
    assert bench.estimator.rate == pytest.approx(40, rel=0.02)


def test_the_rate_follows_a_change_of_pace():
    bench = Bench(replace(START, total=100_000)).go(120, per_second=100).go(120, per_second=10)
    assert bench.estimator.rate == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize(
    ("seconds", "per_second", "shown"),
    [
        (14.5, 100.0, False),  # many items, too early
        (16.0, 100.0, True),
        (100.0, 0.25, False),  # 25 items: long enough, too few
        (130.0, 0.25, True),
        (16.0, 1.5, False),  # 24 items
        (21.0, 1.5, True),
    ],
)
def test_a_forecast_needs_thirty_items_and_fifteen_seconds(seconds: float, per_second: float, shown: bool):
    bench = Bench(replace(START, total=100_000)).go(seconds, per_second=per_second)
    assert (bench.estimator.forecast is not None) is shown


def test_a_steady_run_is_forecast_right():
    forecast = Bench(replace(START, total=10_000, kept=4_000)).go(100, per_second=20).estimator.forecast
    assert forecast is not None
    assert forecast.seconds == pytest.approx((6_000 - 2_000) / 20, rel=0.05)
    assert forecast.low < forecast.seconds < forecast.high


def test_the_forecast_includes_the_retry_backlog():
    without = Bench().go(40, per_second=10).estimator.forecast
    backlog = Bench().go(40, per_second=10, retrying=300).estimator.forecast
    assert without is not None
    assert backlog is not None
    assert backlog.seconds > without.seconds * 1.3


def test_dead_letters_of_earlier_runs_are_neither_finished_by_this_run_nor_left_to_do():
    bench = Bench(replace(START, total=1000, kept=300, dead=200)).go(20, per_second=10)
    forecast = bench.estimator.forecast
    assert bench.estimator.rate == pytest.approx(10, rel=0.05)
    assert forecast is not None
    assert forecast.seconds == pytest.approx(30, rel=0.05)


def test_dead_letters_of_earlier_runs_do_not_make_up_for_items_not_yet_finished():
    assert Bench(replace(START, dead=200)).go(20, per_second=1).estimator.forecast is None


def test_an_unknown_total_has_a_rate_and_no_forecast():
    bench = Bench(replace(START, total=None)).go(60, per_second=5)
    assert bench.estimator.rate == pytest.approx(5, rel=0.05)
    assert bench.estimator.forecast is None


def test_silence_is_called_a_stall_and_ends_with_the_next_finished_item():
    bench = Bench().go(30, per_second=10).go(14)
    assert bench.estimator.stalled is None
    bench.go(26)
    assert bench.estimator.stalled == pytest.approx(40, abs=1)
    assert bench.estimator.forecast is None
    bench.go(1, per_second=10)
    assert bench.estimator.stalled is None


def test_failures_are_no_sign_of_life():
    bench = Bench().go(30, per_second=10)
    for failures in range(1, 60):
        bench.go(1, failures=failures)
    assert bench.estimator.stalled is not None


def test_a_run_of_long_items_that_finish_in_bursts_is_not_stalled():
    bench = Bench(replace(START, total=100))
    for burst in range(1, 6):
        bench.go(60)
        bench.go(0.5, per_second=0.0)
        bench.snapshot = replace(bench.snapshot, done=burst * 8)
        bench.estimator.update(bench.snapshot)
    bench.go(70)
    assert bench.estimator.stalled is None


def test_waiting_for_the_moment_of_a_retry_is_no_stall():
    assert Bench().go(30, per_second=10).go(60, running=0, retrying=5).estimator.stalled is None


def test_a_run_that_is_through_is_not_stalled():
    bench = Bench(replace(START, total=100)).go(10, per_second=10)
    assert bench.go(60).estimator.stalled is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "5 s"),
        (12, "10 s"),
        (33, "35 s"),
        (57, "55 s"),
        (58, "1 min"),
        (100, "2 min"),
        (17 * 60 + 53, "18 min"),
        (22 * 60, "20 min"),
        (58 * 60, "1 h"),
        (2 * 3600 + 11 * 60, "2 h 15 min"),
        (9.2 * 3600, "9 h"),
        (47 * 3600, "47 h"),
        (3 * 86400, "3 days"),
    ],
)
def test_a_forecast_is_rounded_coarsely(seconds: float, words: str):
    assert roughly(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (3.21, "3.2 s"),
        (59, "59 s"),
        (60, "1 min"),
        (48 * 60 + 12, "48 min 12 s"),
        (3600, "1 h"),
        (3600 + 61, "1 h 1 min"),
        (90061, "1 d 1 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, words: str):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("rate", "words"),
    [(None, ""), (41.23, "41.2/s"), (12345.6, "12,346/s"), (0.5, "30.0/min"), (0.001, "3.6/h"), (0.0001, "0.4/h")],
)
def test_a_pace_is_said_in_the_unit_that_fits(rate: float | None, words: str):
    assert pace(rate) == words
