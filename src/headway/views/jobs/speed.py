"""The rate, the forecast and the number of items in progress of a running job.

The definitions are the only ones: `headway show`, the pages, the live updates and the API use them. They need nothing
but the counts by the minute.

- The *rate* is current: successful items per second over the newest minutes of this run that span at least
  `PACE_SECONDS` and hold `PACE_ITEMS`, or over the whole run. Items of earlier runs never count. A paused run has no rate,
  and neither has a run that has finished nothing for an unusually long time.
- The *likely* time left is the remaining items divided by that rate. The range around it follows the trend of the pace.
- The items *in progress* are those that the run has noted as running (it notes an item after one second), or the mean
  number of items at work over the newest minutes, whichever is larger. The mean covers items that are too short to be
  noted.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headway.core import forecast
from headway.views.jobs.series import Series

#: Minimum of items for a forecast.
FORECAST_ITEMS = 30
#: The rate covers the newest minutes with at least this many seconds and items.
PACE_SECONDS = 90.0
PACE_ITEMS = 60
#: Up to this many gaps are pauses, which do not lower the rate. More gaps mean a bursty workload.
PAUSES = 2
#: Length of the history that the rate and the forecast use, in seconds.
PAST_SECONDS = 1800.0


class Forecast(NamedTuple):
    """When a job will finish, in seconds from now."""

    early: Annotated[float, "lower end of the range"]
    likely: Annotated[float, "remaining items divided by the current rate"]
    late: Annotated[float, "upper end of the range"]


class Speed(NamedTuple):
    """How fast a run is now."""

    rate: float | None = None
    forecast: Forecast | None = None
    #: Mean number of items at work.
    at_work: float = 0.0


class _Piece(NamedTuple):
    """A minute of the run in which an item succeeded, with the gap before it."""

    seconds: float
    items: float
    gap: float


def speed(past: Series, began: float, now: float, remaining: int, done_in_run: int) -> Speed:
    """Measure a run that is not paused. ``past`` has steps of one minute, ``began`` and ``now`` are Unix times."""
    past = _with_unsettled(past, began, now, done_in_run)
    at_work = _at_work(past, began, now, remaining)
    pieces, silent = _pieces(past, began, now, done_in_run)
    if not pieces or silent > max(PACE_SECONDS, 2 * max(piece.gap for piece in pieces)):
        return Speed(at_work=at_work)
    is_bursty = sum(piece.gap > 0 for piece in pieces) > PAUSES
    lengths = [(piece.seconds + (piece.gap if is_bursty else 0.0), piece.items) for piece in pieces]
    # In a bursty run the gap before the last burst stands for the one after it, unless that is longer already.
    overdue = max(0.0, silent - pieces[-1].gap) if is_bursty else silent
    lengths[-1] = (lengths[-1][0] + overdue, lengths[-1][1])
    seconds = seen = 0.0
    for length, items in reversed(lengths):
        seconds, seen = seconds + length, seen + items
        if seconds >= PACE_SECONDS and seen >= PACE_ITEMS:
            break
    rate = seen / max(1.0, seconds)
    if done_in_run < FORECAST_ITEMS or remaining <= 0:
        return Speed(rate, None, at_work)
    found = forecast.forecast(lengths[1:-1], remaining, 1 / rate, seen)
    likely = remaining / rate
    return Speed(rate, Forecast(min(found.low, likely), likely, max(found.high, likely)), at_work)


def _with_unsettled(past: Series, began: float, now: float, done_in_run: int) -> Series:
    """Add the items that a fleet has done but not yet counted by the minute to the current minute.

    Only a run whose beginning is in ``past`` tells their number. In a longer run they are few.
    """
    points = [point for point in past.points if point.minute * 60.0 < now]
    if not points or began < points[0].minute * 60.0:
        return past
    inside = [point for point in points if (point.minute + past.step) * 60.0 > began]
    counted = sum(point.done for point in inside)
    missing = done_in_run - counted
    if missing <= 0 or not inside:
        return past
    each = sum(point.seconds for point in inside) / counted if counted else 0.0
    last = inside[-1]._replace(done=inside[-1].done + missing, seconds=inside[-1].seconds + missing * each)
    return past._replace(points=(*points[:-1], last))


def items_in_progress(noted: int, pending: int, at_work: float) -> int:
    """Return how many items are in progress. ``noted`` items are recorded as running, ``pending`` ones are unfinished."""
    return max(noted, min(pending, round(at_work)))


def _pieces(past: Series, began: float, now: float, done_in_run: int) -> tuple[list[_Piece], float]:
    """Return the productive minutes of the run, and the seconds since the last of them."""
    pieces: list[_Piece] = []
    silent = 0.0
    inside = [point for point in past.points if began - 60 * past.step < point.minute * 60.0 < now]
    for point in inside:
        start, end = max(began, point.minute * 60.0), min(now, (point.minute + past.step) * 60.0)
        items = point.done
        if start == began:  # the previous run may have finished items in the same minute
            items = min(items, max(0, done_in_run - sum(other.done for other in inside if other.minute > point.minute)))
        if items == 0:
            silent += end - start
            continue
        pieces.append(_Piece(end - start, float(items), silent if pieces else 0.0))
        silent = 0.0
    return pieces, silent


def _at_work(past: Series, began: float, now: float, remaining: int) -> float:
    """Return the mean number of items at work over the minutes that cover the last `PACE_SECONDS`."""
    seconds = spent = 0.0
    for point in reversed(past.points):
        start, end = max(began, point.minute * 60.0), min(now, (point.minute + past.step) * 60.0)
        if end > start:
            seconds, spent = seconds + end - start, spent + point.seconds
            if seconds >= PACE_SECONDS:
                break
    return min(float(remaining), spent / max(1.0, seconds)) if seconds else 0.0
