"""Forecast when work will finish: an estimate and a range.

Two models are combined. In the first the current pace continues; in the second the pace follows a linear trend through
all pieces so far. The range covers both. It is wider with fewer data and with more scatter. It extends further towards
late, because work is late more often than early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

#: Fewer pieces are not enough for a trend.
TREND_PIECES = 5
#: Relative uncertainty of the pace when there are too few pieces for a trend.
YOUNG = 0.25
#: The largest factor by which a trend may change the pace.
TREND_MOST = 2.5
#: Smaller relative changes are ignored: the range covers them.
TREND_LEAST = 0.1
#: Minimum and maximum relative uncertainty of a forecast.
SPREAD = (0.08, 0.6)
#: Factor by which the range extends further towards late.
LATE = 1.6


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until the work finishes: an estimate and an 80 % range."""

    seconds: float
    low: float
    high: float


def forecast(past: Sequence[tuple[float, float]], left: float, pace: float, seen: float) -> Forecast:
    """Forecast the remaining time.

    ``past`` has (seconds, items) of each piece so far, oldest first. ``left`` is the number of remaining items. ``pace`` is
    the current number of seconds per item, measured over the last ``seen`` items.
    """
    steady = left * pace
    # Counts scatter by their square root. The factor of 1.2 allows for a drifting pace.
    spread = SPREAD[0] + 1.2 * sqrt(1.0 / max(1.0, seen) + 1.0 / (left + 1.0))
    ahead, doubt = _trend([piece for piece in past if piece[1] > 0 and piece[0] > 0], left)
    ratio = 1.0 if ahead is None else min(TREND_MOST, max(1 / TREND_MOST, ahead / pace))
    if abs(ratio - 1.0) < TREND_LEAST:
        ratio = 1.0
    spread = min(SPREAD[1], sqrt(spread**2 + doubt**2))
    changed = steady * ratio
    early, late = min(steady, changed), max(steady, changed)
    return Forecast(sqrt(early * late), early * (1.0 - spread), late * (1.0 + LATE * spread))


def _trend(pieces: Sequence[tuple[float, float]], left: float) -> tuple[float | None, float]:
    """Return the pace of the remaining items by the trend, and the relative uncertainty of the pace.

    The pace is in seconds per item, or None if there is no significant trend.
    """
    if len(pieces) < TREND_PIECES:
        return None, YOUNG
    weight = sum(items for _, items in pieces)
    middles, before = [], 0.0
    for _, items in pieces:
        middles.append(before + items / 2)
        before += items
    paces = [seconds / items for seconds, items in pieces]
    shares = [items / weight for _, items in pieces]
    x = sum(share * at for share, at in zip(shares, middles, strict=True))
    y = sum(share * pace for share, pace in zip(shares, paces, strict=True))
    sxx = sum(share * (at - x) ** 2 for share, at in zip(shares, middles, strict=True))
    sxy = sum(share * (at - x) * (pace - y) for share, at, pace in zip(shares, middles, paces, strict=True))
    if sxx <= 0 or y <= 0:
        return None, 0.0
    slope = sxy / sxx
    rest = sum(
        share * (pace - y - slope * (at - x)) ** 2 for share, at, pace in zip(shares, middles, paces, strict=True)
    )
    error = sqrt(rest / max(1, len(pieces) - 2))
    doubt = error / y
    if abs(slope) * sqrt(sxx) < 3.0 * error:
        return None, doubt
    return max(0.0, y + slope * (before + left / 2 - x)), doubt
