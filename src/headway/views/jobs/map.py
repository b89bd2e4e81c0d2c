"""A job as a picture: where its items stand, in order; how long they take; who does them.

A job of a million items must not be read as a million rows. What is not done is little and has an index, so it is
counted exactly in every cell. What is done is nearly all of it: of a large job one item of each cell is looked at, by its
key, and says for its cell whether it was done in this run, before, or not at all. Durations and shares come from the same
rows; ``sampled`` says how many were looked at when it was not all of them. (p50, p95 and the slowest: `durations`.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway._sql import Row
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway import ledger

#: Cells of a map, at most.
CELLS = 1200
#: Up to so many items every row is read.
EXACT = 10_000
#: Histogram: bins per factor of ten.
BINS_PER_DECADE = 8

Base = Literal["kept", "done", "pending"]


class Cell(NamedTuple):
    """What in a cell of the map is not simply done or pending."""

    retrying: Annotated[int, "items that wait for another try"]
    processing: Annotated[int, "items that somebody works on"]
    dead: Annotated[int, "items that failed for good"]


class Worker(NamedTuple):
    """What one worker did."""

    name: Annotated[str, "who"]
    items: Annotated[int, "items among those looked at that it finished"]


class Stretch(NamedTuple):
    """Cells of the map in a row that look alike."""

    base: Annotated[Base, "what most of their items are; kept: done before the newest run began"]
    cells: Annotated[int, "how many cells"]


class Bin(NamedTuple):
    """How many took about as long; eight of them to a factor of ten."""

    seconds: Annotated[float, "so long at least"]
    amount: Annotated[int, "how many"]


class ItemMap(NamedTuple):
    """The items of a job as cells, in the order of their indices."""

    size: Annotated[int, "items in a cell"]
    cells: Annotated[int, "how many cells"]
    bases: Annotated[tuple[Stretch, ...], "the cells from the first to the last"]
    marks: Annotated[dict[int, Cell], "by its number (0 is the first): a cell with something else in it"]
    sampled: Annotated[int | None, "how many items were looked at; null: all"]
    durations: Annotated[tuple[Bin, ...], "how long items took, the shortest first"]
    workers: Annotated[tuple[Worker, ...], "who finished those of this run, the busiest first"]


class JobMap(NamedTuple):
    """`/api/v1/jobs/ID/map`: the items of a job as a picture of at most 1,200 cells."""

    job: Annotated[str, "the job's id"]
    map: Annotated[ItemMap | None, "the map; null of a job without items, or whose indices lie far apart"]

    def as_json(self) -> Json:
        return document(self)


def read_job_map(job: ledger.Job) -> JobMap:
    """What was done before the newest run began is *kept*."""
    runs = job.runs()
    return JobMap(job.id, read_map(job, since=runs[-1].started_at.timestamp() if runs else None))


def read_map(job: ledger.Job, *, since: float | None) -> ItemMap | None:
    """The map of a job; None when it has no items, or when its indices lie too far apart for a picture.

    ``since`` is when the run in progress began: what was done before it is *kept*.
    """
    from headway.ledger.store.index_range import OPEN, rows_at
    from headway.ledger.store.report import Live

    with job.database.read() as tx:
        row = tx.one("SELECT max(idx) FROM input_products WHERE job = ?", (job.no,))
        total = tx.one("SELECT total FROM jobs WHERE no = ?", (job.no,))
        if row is None or row[0] is None or total is None or row[0] >= 4 * max(total[0], CELLS):
            return None
        last = int(row[0])
        size = cell_size(last + 1)
        cells = last // size + 1
        condition, parameters = Live(tx, job.no).condition()
        odd = tx.all(
            "SELECT p.idx / ?, sum(CASE WHEN p.status = 'failed' AND d.idx IS NULL THEN 1 ELSE 0 END), "
            f"sum(CASE WHEN coalesce({condition}, 1 = 0) THEN 1 ELSE 0 END), sum(CASE WHEN d.idx IS NULL THEN 0 ELSE 1 END) "
            "FROM progress p LEFT JOIN dead_letters d ON d.job = p.job AND d.idx = p.idx "
            # Said apart, the index of what is not done is used whatever columns are asked for.
            f"WHERE p.job = ? AND p.idx IN (SELECT o.idx FROM progress o WHERE o.job = ? AND {OPEN}) GROUP BY 1",
            (size, *parameters, job.no, job.no),
        )
        columns = "idx, status, updated_at, seconds, worker"
        exact = last < EXACT
        if exact:
            rows = tx.all(f"SELECT {columns} FROM progress WHERE job = ? ORDER BY idx", (job.no,))
        else:
            middles = [min(last, cell * size + size // 2) for cell in range(cells)]
            rows = rows_at(tx, columns, job.no, middles)
    found = {
        int(cell): Cell(int(retrying), int(running), int(dead))
        for cell, retrying, running, dead in odd
        if retrying or running or dead
    }
    bases = _bases(rows, cells, size, since, every=exact)
    took = [seconds for _, status, _, seconds, _ in rows if status == "done" and seconds is not None]
    names = Counter(
        worker for _, status, at, _, worker in rows if status == "done" and worker and (since is None or at >= since)
    )
    return ItemMap(
        size, cells, bases, found, None if exact else len(rows),
        durations(took),
        tuple(Worker(name, count) for name, count in names.most_common(12)),
    )  # fmt: skip


def cell_size(items: int) -> int:
    """The smallest round number of items to a cell with which there are not too many cells."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if -(-items // (step * factor)) <= CELLS:
                return step * factor
        step *= 10


def _bases(rows: Sequence[Row], cells: int, size: int, since: float | None, *, every: bool) -> tuple[Stretch, ...]:
    """Runs of cells by what most of their items are; of a cell that was sampled, by what its one item is."""
    touched, kept = [0] * cells, [0] * cells
    for idx, _, updated_at, _, _ in rows:
        touched[idx // size] += 1
        kept[idx // size] += since is not None and updated_at < since
    runs: list[Stretch] = []
    for cell in range(cells):
        there = touched[cell]
        least = size / 2 if every and cell < cells - 1 else 0.5
        base: Base = "pending" if there < least else "kept" if 2 * kept[cell] > there else "done"
        if runs and runs[-1].base == base:
            runs[-1] = Stretch(base, runs[-1].cells + 1)
        else:
            runs.append(Stretch(base, 1))
    return tuple(runs)


def durations(seconds: Sequence[float]) -> tuple[Bin, ...]:
    """How many took how long: bins that grow by the same factor, none left out between the first and the last."""
    if not seconds:
        return ()
    counts = Counter(math.floor(BINS_PER_DECADE * math.log10(max(one, 0.0001))) for one in seconds)
    first, last = min(counts), max(counts)
    # A few bins at least, on both sides: one column alone says nothing.
    first, last = min(first, last - 8), max(last, first + 8)
    return tuple(Bin(10 ** (place / BINS_PER_DECADE), counts.get(place, 0)) for place in range(first, last + 1))
