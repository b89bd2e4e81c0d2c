"""The item map of a job: the state of its items in the order of their indices, as cells.

Unfinished items are few and have an index, so every cell counts them exactly. Done items are nearly all of a large job:
one item per cell is read by its key and stands for its cell. The durations and the shares of the workers come from the
same rows; `sampled` has their number.
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

#: Maximum number of cells.
CELLS = 1200
#: Up to this many items, every row is read.
EXACT = 10_000
#: Bins of a histogram per factor of ten.
BINS_PER_DECADE = 8
#: How many workers are listed.
WORKERS = 12

Base = Literal["kept", "done", "pending"]


class Cell(NamedTuple):
    """The unfinished and dead items of a cell."""

    retrying: Annotated[int, "items that wait for a retry"]
    processing: Annotated[int, "items in progress"]
    dead: Annotated[int, "dead letters"]


class Worker(NamedTuple):
    """The share of one worker."""

    name: Annotated[str, "the worker"]
    items: Annotated[int, "items that it finished, of those read"]


class Stretch(NamedTuple):
    """Adjacent cells that look alike."""

    base: Annotated[Base, "state of most of their items; kept: done before the newest run began"]
    cells: Annotated[int, "number of cells"]


class Bin(NamedTuple):
    """One bin of a histogram of durations; a factor of ten has eight bins."""

    seconds: Annotated[float, "lower end of the bin"]
    amount: Annotated[int, "number of values in it"]


class ItemMap(NamedTuple):
    """The items of a job as cells, in the order of their indices."""

    size: Annotated[int, "items in a cell"]
    cells: Annotated[int, "number of cells"]
    bases: Annotated[tuple[Stretch, ...], "the cells from the first to the last"]
    marks: Annotated[
        dict[int, Cell], "number of the cell, from 0 -> its unfinished and dead items; empty cells are left out"
    ]
    sampled: Annotated[int | None, "number of items that were read; null: all"]
    durations: Annotated[tuple[Bin, ...], "durations of items, shortest first"]
    workers: Annotated[tuple[Worker, ...], "workers of this run, busiest first"]


class JobMap(NamedTuple):
    """`/api/v1/jobs/ID/map`: the items of a job as at most 1,200 cells."""

    job: Annotated[str, "the job's id"]
    map: Annotated[ItemMap | None, "the map; null for a job without items or with widely scattered indices"]

    def as_json(self) -> Json:
        return document(self)


def read_job_map(job: ledger.Job) -> JobMap:
    """Read the map of a job. Items done before the newest run began are *kept*."""
    runs = job.runs()
    return JobMap(job.id, read_map(job, since=runs[-1].started_at.timestamp() if runs else None))


def read_map(job: ledger.Job, *, since: float | None) -> ItemMap | None:
    """Read the map, or None for a job without items or with widely scattered indices.

    ``since`` is the start of the newest run: items done before are *kept*.
    """
    from headway.ledger.store.queries import statistics

    with job.database.read() as tx:
        found = statistics.last_index(tx, job.no)
        if found is None or found[0] >= 4 * max(found[1], CELLS):
            return None
        last = found[0]
        size = cell_size(last + 1)
        cells = last // size + 1
        unfinished = statistics.unfinished_by_cell(tx, job.no, size)
        exact = last < EXACT
        middles = [min(last, cell * size + size // 2) for cell in range(cells)]
        rows = statistics.tried_items(tx, job.no, None if exact else middles)
    marks = {int(cell): Cell(*(int(count) for count in counts)) for cell, *counts in unfinished if any(counts)}
    took = [seconds for _, status, _, seconds, _ in rows if status == "done" and seconds is not None]
    names = Counter(
        worker for _, status, at, _, worker in rows if status == "done" and worker and (since is None or at >= since)
    )
    return ItemMap(
        size, cells, _bases(rows, cells, size, since, every=exact), marks, None if exact else len(rows), durations(took),
        tuple(Worker(name, count) for name, count in names.most_common(WORKERS)),
    )  # fmt: skip


def cell_size(items: int) -> int:
    """Return the smallest round number of items per cell that needs at most `CELLS` cells."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if -(-items // (step * factor)) <= CELLS:
                return step * factor
        step *= 10


def _bases(rows: Sequence[Row], cells: int, size: int, since: float | None, *, every: bool) -> tuple[Stretch, ...]:
    """Return the cells by the state of most of their items, or of the one item that was read."""
    touched, kept = [0] * cells, [0] * cells
    for idx, _, updated_at, _, _ in rows:
        touched[idx // size] += 1
        kept[idx // size] += since is not None and updated_at < since
    found: list[Stretch] = []
    for cell in range(cells):
        there = touched[cell]
        least = size / 2 if every and cell < cells - 1 else 0.5
        base: Base = "pending" if there < least else "kept" if 2 * kept[cell] > there else "done"
        if found and found[-1].base == base:
            found[-1] = Stretch(base, found[-1].cells + 1)
        else:
            found.append(Stretch(base, 1))
    return tuple(found)


def durations(seconds: Sequence[float]) -> tuple[Bin, ...]:
    """Return a histogram with bins on a logarithmic scale and no bin left out."""
    if not seconds:
        return ()
    counts = Counter(math.floor(BINS_PER_DECADE * math.log10(max(one, 0.0001))) for one in seconds)
    first, last = min(counts), max(counts)
    first, last = min(first, last - 8), max(last, first + 8)  # at least nine bins: a single column shows nothing
    return tuple(Bin(10 ** (number / BINS_PER_DECADE), counts.get(number, 0)) for number in range(first, last + 1))
