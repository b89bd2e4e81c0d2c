"""How fast a job is and when it will be ready, from the counts that are kept by the minute."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headway.core import forecast
from headway.views.jobs.series import Series

#: The rate of a job is that of its last minutes.
RATE_MINUTES = 5
#: No forecast before so many items are done in these minutes.
FORECAST_ITEMS = 30
#: A forecast starts from the pace of the last minutes that have so many seconds and items together.
PACE_SECONDS = 90.0
PACE_ITEMS = 60
#: So many silences in a run are pauses; more are its manner.
PAUSES = 2
#: How far back its minutes are looked at, seconds.
PAST_SECONDS = 1800.0


class Forecast(NamedTuple):
    """When a job will be ready, in seconds from now."""

    early: Annotated[float, "not before"]
    likely: Annotated[float, "at the pace of the last minutes, and as that has been changing"]
    late: Annotated[float, "if its pace varies as it did"]


def pace(
    past: Series, began: float, now: float, remaining: int, done_in_run: int
) -> tuple[float | None, Forecast | None]:
    """Items per second of the run, over its last minutes, and when it will be ready.

    It counts this run only, never what was kept: a resumed job is not faster than it is.
    """
    start, done = began, done_in_run
    if now - began > (RATE_MINUTES + 1) * 60:
        recent = [p for p in past.points if p.minute * 60 >= now - (RATE_MINUTES + 1) * 60]
        start, done = (recent[0].minute * 60.0 if recent else now), sum(p.done for p in recent)
    rate = done / max(1.0, now - start)
    if not done or rate <= 0:
        return None, None
    if done < FORECAST_ITEMS or remaining <= 0:
        return rate, None
    pieces = _pieces(past, began, now)
    if not pieces:  # the clock was set: what was done lies before the run or after now
        return rate, None
    seconds = seen = 0.0
    for piece in reversed(pieces):
        seconds, seen = seconds + piece[0], seen + piece[1]
        if seconds >= PACE_SECONDS and seen >= PACE_ITEMS:
            break
    found = forecast.forecast(pieces[1:-1], remaining, seconds / seen, seen)
    return rate, Forecast(found.low, found.seconds, found.high)


def _pieces(past: Series, began: float, now: float) -> list[tuple[float, float]]:
    """(seconds, items) of the minutes of the run in which something ended.

    Once or twice nothing ended for a while: that was a pause and says nothing about the pace. More often: the work comes in
    bursts, and the silence before each is part of it.
    """
    pieces: list[tuple[float, float]] = []
    silences: list[float] = []
    silent, stretches = 0.0, 0
    for point in past.points:
        start, end = max(began, point.minute * 60.0), min(now, (point.minute + past.step) * 60.0)
        if end <= start:
            continue
        if point.done == 0:
            silent += end - start
            continue
        stretches += silent > 0
        pieces.append((end - start, float(point.done)))
        silences.append(silent)
        silent = 0.0
    if stretches <= PAUSES:
        return pieces
    return [(seconds + before, items) for (seconds, items), before in zip(pieces, silences, strict=True)]
