"""How long the items of a job took: p50, p95 and the slowest.

A large job is sampled; `looked_at` has the sample's size. The slowest items are exact if they took at least 0.1 s, because
an index leads to them. Otherwise they are the slowest of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

if TYPE_CHECKING:
    from headway import ledger

#: How many of the slowest items are listed.
SLOWEST = 5


class SlowItem(NamedTuple):
    """An item that took long."""

    idx: Annotated[int, "the item's index"]
    key: Annotated[str | None, "its key, if it has one"]
    seconds: Annotated[float, "how long its successful attempt took"]


class Durations(NamedTuple):
    """How long the successful attempts took."""

    p50: Annotated[float, "seconds that half of the items did not exceed"]
    p95: Annotated[float, "seconds that 95 % of the items did not exceed"]
    slowest: Annotated[tuple[SlowItem, ...], "the slowest items, slowest first"]
    looked_at: Annotated[int, "number of items behind p50 and p95: all done items, or a sample of many"]


def read_durations(job: ledger.Job, total: int) -> Durations | None:
    """Read the durations of done items, or None if no time was recorded. ``total`` is the job's number of items."""
    from headway.ledger.store.queries import statistics

    with job.database.read() as tx:
        took = sorted(statistics.durations(tx, job.no, total))
        slow = statistics.slowest(tx, job.no, SLOWEST)
        if not took and not slow:
            return None
        known = {idx for idx, _ in slow}
        slow += [(idx, seconds) for seconds, idx in reversed(took[-SLOWEST:]) if idx not in known]
        slow = sorted(slow, key=lambda row: (-row[1], row[0]))[:SLOWEST]
        keys = statistics.keys_of(tx, job.no, [idx for idx, _ in slow])
    seconds = [one for one, _ in took] or sorted(one for _, one in slow)
    return Durations(
        round(percentile(seconds, 0.50), 6), round(percentile(seconds, 0.95), 6),
        tuple(SlowItem(idx, keys.get(idx), round(one, 6)) for idx, one in slow), len(seconds),
    )  # fmt: skip


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the value that this part of the ``ordered`` values does not exceed."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
