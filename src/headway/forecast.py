"""When work will be through, from how long its pieces took so far: the likely figure, and a range that is honest about it.

Work goes on at the pace it has now, or its pace changes as it has been changing. Both are looked at: the first from the
last pieces, the second by a straight line through all of them. The range holds both, and it is wider the less there is
behind it, the more the pieces differ, and towards late, because work is late more often than early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

#: Fewer pieces show no trend, only chance.
TREND_PIECES = 5
#: With so few a pace may be off by so much, as a part of it.
YOUNG = 0.25
#: By how much a trend may change the pace of what is left, and what is too little to be one: the range has it anyway.
TREND_MOST = 2.5
TREND_LEAST = 0.1
#: The least and the most a forecast may be off, as a part of it.
SPREAD = (0.08, 0.6)
#: How much further the range reaches towards late.
LATE = 1.6


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until the work is through: the likely figure, and a range that holds four times out of five."""

    seconds: float
    low: float
    high: float


def forecast(past: Sequence[tuple[float, float]], left: float, pace: float, seen: float) -> Forecast:
    """``past``: (seconds, items) of the pieces of work so far, the oldest first. ``left``: items, at ``pace`` seconds each
    by the last ``seen`` of them."""
    steady = left * pace
    # Counts scatter by their square root; a little more for a pace that drifts.
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
    """Seconds per item of what is left, if its pace goes on changing as it did (None: no change that is more than chance),
    and how uncertain the pace of the pieces is, as a part of it."""
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
