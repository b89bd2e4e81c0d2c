"""How long the items of a job took: half of them, 19 of 20, and which took longest.

A job of a million items must not be read as a million rows. Of a large job as many items are looked at as make the share
right to a percent or so, found by their indices; ``looked_at`` says how many. Which items took longest is exact for all that
took a tenth of a second or more, because those have an index; below that, the slowest are those among the ones looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway._sql import marks

if TYPE_CHECKING:
    from headway import ledger
    from headway._sql import Row, Tx

#: Up to so many items every row is read.
EXACT = 5000
#: Of more items so many are looked at: then p95 lies between the true p94 and p96 in 19 of 20 cases.
SAMPLE = 2000
#: The slowest that are named.
SLOWEST = 5
#: Shares of a whole in an order that comes close to no other: the sample of a job is the same at every look, spread
#: evenly, and no pattern in the items (every tenth is slow) falls in with its steps.
_GOLDEN = 0.6180339887498949


class SlowItem(NamedTuple):
    """An item that took long."""

    idx: Annotated[int, "the item's index"]
    key: Annotated[str | None, "its key, if it has one"]
    seconds: Annotated[float, "how long its successful run took"]


class Durations(NamedTuple):
    """How long the successful runs of items took."""

    p50: Annotated[float, "half of the items took no longer, in seconds"]
    p95: Annotated[float, "19 of 20 items took no longer"]
    slowest: Annotated[tuple[SlowItem, ...], "those that took longest, the slowest first"]
    looked_at: Annotated[int, "how many items are behind p50 and p95: all that are done, or of many a sample"]


def read_durations(job: ledger.Job, total: int) -> Durations | None:
    """Of the items that are done; None while no time was recorded. ``total``: how many items the job has."""
    with job.database.read() as tx:
        took = sorted(
            (max(0.0, seconds), idx)
            for idx, status, seconds in _rows(tx, job.no, total)
            if status == "done" and seconds is not None
        )
        # The condition of the index, word for word, or a planner cannot know that it has them all; and its order alone, or
        # one without statistics reads and sorts all of it.
        slow = tx.all(
            "SELECT idx, seconds FROM progress WHERE job = ? AND status = 'done' AND seconds >= 0.1 "
            "ORDER BY seconds DESC LIMIT ?",
            (job.no, SLOWEST),
        )
        if not took and not slow:
            return None
        known = {idx for idx, _ in slow}
        slow += [(idx, seconds) for seconds, idx in reversed(took[-SLOWEST:]) if idx not in known]
        slow = sorted(slow, key=lambda row: (-row[1], row[0]))[:SLOWEST]
        keys: dict[int, str | None] = dict(
            tx.all(
                f"SELECT idx, key FROM input_products WHERE job = ? AND idx IN ({marks(len(slow))})",
                (job.no, *(idx for idx, _ in slow)),
            )
        )
    seconds = [one for one, _ in took] or sorted(one for _, one in slow)
    return Durations(
        round(percentile(seconds, 0.50), 6), round(percentile(seconds, 0.95), 6),
        tuple(SlowItem(idx, keys.get(idx), round(one, 6)) for idx, one in slow), len(seconds),
    )  # fmt: skip


def percentile(ordered: Sequence[float], part: float) -> float:
    """The value that so large a part of the ``ordered`` ones does not exceed."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _rows(tx: Tx, job: int, total: int) -> list[Row]:
    """(idx, status, seconds) of all items that were tried, or of a sample."""
    from headway.ledger.store.index_range import rows_at

    columns = "idx, status, seconds"
    if total <= EXACT:
        return tx.all(f"SELECT {columns} FROM progress WHERE job = ?", (job,))
    # Asked apart: for both at once SQLite reads everything in between.
    ends = tx.one(
        "SELECT (SELECT min(idx) FROM progress WHERE job = ?), (SELECT max(idx) FROM progress WHERE job = ?)",
        (job, job),
    )
    if ends is None or ends[0] is None:
        return []
    first, last = ends
    probes = {first + int(no * _GOLDEN % 1.0 * (last - first + 1)) for no in range(1, SAMPLE + 1)}
    found = rows_at(tx, columns, job, sorted(probes))
    if len(found) >= SAMPLE / 20:
        return found
    # Indices with wide gaps in between: then the first ones, which are at least some.
    return tx.all(f"SELECT {columns} FROM progress WHERE job = ? ORDER BY idx LIMIT (SELECT ?)", (job, SAMPLE))
