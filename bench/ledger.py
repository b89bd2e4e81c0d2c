"""How fast and how small the ledger of one SQLite file is: `ProgressManager` beside bare sqlite3.

    python bench/ledger.py [--quick | --full]

`mark_done` (synchronous=FULL, one fsynced commit each) and a bare upsert with its commit take turns in blocks, and so
do `is_done` and a bare SELECT by key, so that what disturbs the machine disturbs both. A ratio is the median over pairs
of neighbouring blocks. ``--full`` adds a million items to the look at growth.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import Report, median, percentile, say, scratch

from headway import ProgressManager

#: 100 bytes as JSON text.
META = {"ad": "x" * 91}
BLOCK = 100
WARM = 1000

Step = Callable[[int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 seconds, rough figures")
    parser.add_argument("--full", action="store_true", help="a million items besides")
    options = parser.parse_args()
    assert len(json.dumps(META, separators=(",", ":"))) == 100, "the meta of the target has 100 bytes"
    report = Report("ledger", quick=options.quick)
    size = 20_000 if options.quick else 100_000
    with scratch() as place:
        measure_mark_done(report, place, calls=1_000 if options.quick else 5_000)
        measure_large(report, place, size)
        measure_memory(report, place, size)
        measure_index_share(report, place, items=5_000 if options.quick else 20_000)
        sizes = [2_000, 20_000] if options.quick else [10_000, 100_000]
        measure_growth(report, place, [*sizes, 1_000_000] if options.full else sizes)
    report.print()


# ---- one item at a time -----------------------------------------------------------------------------------------


def measure_mark_done(report: Report, place: Path, calls: int) -> None:
    say(f"mark_done, {calls:,} calls")
    # The document's own loop never registers its items: then the call makes each one known on the way.
    for name, register, least in (("mark_done", True, 0.8), ("mark_done of an item not registered", False, None)):
        bare = Bare(place / f"bare{register}.db")
        with ProgressManager(place / f"mark{register}.db") as progress:
            if register:
                progress.register(range(WARM + calls + 1))
            mark_done = partial(_mark_done, progress)
            # A log that grows costs more to sync than one that is written over: both get theirs to its full size.
            take_turns(mark_done, bare.mark_done, 0, WARM)
            ours, theirs = take_turns(mark_done, bare.mark_done, WARM, calls)
            judge(report, name, "bare upsert + commit", ours, theirs, least=least, p99_ms=10 if register else None)
        bare.close()


def _mark_done(progress: ProgressManager, idx: int) -> None:
    progress.mark_done(idx, META)


class Bare:
    """What one would write without a library: one table, one connection, one upsert per commit."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "CREATE TABLE items (idx INTEGER PRIMARY KEY, status TEXT, meta TEXT, updated_at REAL)"
        )

    def mark_done(self, idx: int) -> None:
        self._connection.execute(
            "INSERT INTO items VALUES (?, 'done', ?, ?) ON CONFLICT (idx) DO UPDATE SET status = excluded.status, "
            "meta = excluded.meta, updated_at = excluded.updated_at",
            (idx, json.dumps(META), time.time()),
        )

    def fill(self, count: int) -> None:
        self._connection.execute("BEGIN")
        rows = ((idx, json.dumps(META), 0.0) for idx in range(count))
        self._connection.executemany("INSERT INTO items VALUES (?, 'done', ?, ?)", rows)
        self._connection.execute("COMMIT")

    def is_done(self, idx: int) -> bool:
        row = self._connection.execute("SELECT status FROM items WHERE idx = ?", (idx,)).fetchone()
        return row is not None and row[0] == "done"

    def close(self) -> None:
        self._connection.close()


def take_turns(ours: Step, theirs: Step, first: int, calls: int) -> tuple[list[list[float]], list[list[float]]]:
    """Blocks of both, one after the other; every call's seconds."""
    timings: tuple[list[list[float]], list[list[float]]] = ([], [])
    for start in range(first, first + calls, BLOCK):
        for step, blocks in zip((ours, theirs), timings, strict=True):
            block = []
            for idx in range(start, start + BLOCK):
                began = time.perf_counter()
                step(idx)
                block.append(time.perf_counter() - began)
            blocks.append(block)
    return timings


def judge(
    report: Report,
    name: str,
    other: str,
    ours: list[list[float]],
    theirs: list[list[float]],
    *,
    least: float | None = None,
    p99_ms: float | None = None,
) -> None:
    for who, blocks, most in ((name, ours, p99_ms), (other, theirs, None)):
        calls = [call for block in blocks for call in block]
        report.add(f"{who}: p50", 1000 * percentile(calls, 0.5), "ms")
        report.add(f"{who}: p99", 1000 * percentile(calls, 0.99), "ms", most=most)
        report.add(f"{who}: rate", BLOCK / median([sum(block) for block in blocks]), "calls/s")
    ratios = [sum(their) / sum(our) for our, their in zip(ours, theirs, strict=True)]
    report.add(f"{name} / {other}", median(ratios), "x", least=least)


# ---- a hundred thousand -----------------------------------------------------------------------------------------


def measure_large(report: Report, place: Path, count: int) -> None:
    say(f"{count:,} items with 100 bytes of meta")
    path = place / "large.db"
    bare = Bare(place / "bare-large.db")
    bare.fill(count)
    with ProgressManager(path) as progress:
        progress.register(range(count))
        batches = mark_all(progress, count)
        report.add("mark_many(1000)", 1000 * median(batches), "ms", most=100)
        report.add("mark_many(1000): p99", 1000 * percentile(batches, 0.99), "ms")
        draw = random.Random(1)
        order = [draw.randrange(count) for _ in range(20_000)]
        ours, theirs = take_turns(
            lambda idx: progress.is_done(order[idx]), lambda idx: bare.is_done(order[idx]), 0, len(order)
        )
        judge(report, f"is_done at {count:,}", "bare SELECT by key", ours, theirs, least=0.5, p99_ms=5)
        report.add("size on disk with the write-ahead log", on_disk(path) / 2**20, "MB", most=100, items=count)
    bare.close()


def mark_all(progress: ProgressManager, count: int, batch: int = 1000) -> list[float]:
    """Seconds of each `mark_many`."""
    took = []
    for start in range(0, count, batch):
        began = time.perf_counter()
        progress.mark_many([(idx, META) for idx in range(start, start + batch)])
        took.append(time.perf_counter() - began)
    return took


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


_CHILD = """
import json, sys
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
import sqlite3
bare = resident()
from headway import ProgressManager
imported = resident()
path, count = sys.argv[1], int(sys.argv[2])
with ProgressManager(path) as progress:
    for idx in range(count, count + 500):
        progress.mark_done(idx, {"ad": "x" * 91})
    for idx in range(0, count, max(1, count // 5000)):
        assert progress.is_done(idx)
    progress.mark_many([(idx, {"ad": "x" * 91}) for idx in range(count + 500, count + 1500)])
    progress.stats()
    print(json.dumps({"bare": bare, "imported": imported, "used": resident()}))
"""


def measure_memory(report: Report, place: Path, count: int) -> None:
    """In a process of its own, on the file of `measure_large`."""
    out = subprocess.run(
        [sys.executable, "-c", _CHILD, str(place / "large.db"), str(count)],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = json.loads(out.stdout)
    used = found["used"] - found["imported"]
    report.add("memory that ProgressManager adds in use", used, "MB", most=10, items=count)
    report.add("memory that importing it adds to Python with sqlite3", found["imported"] - found["bare"], "MB")


# ---- where the bytes go -----------------------------------------------------------------------------------------


def measure_index_share(report: Report, place: Path, items: int) -> None:
    say("share of the indexes")
    for size in (10, 50, 100, 200):
        path = place / f"meta{size}.db"
        with ProgressManager(path) as progress:
            progress.register(range(items))
            for start in range(0, items, 1000):
                progress.mark_many([(idx, {"a": "x" * (size - 8)}) for idx in range(start, start + 1000)])
        connection = sqlite3.connect(path)
        try:
            rows = dict(connection.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name"))
        except sqlite3.OperationalError:
            report.leave_out("share of the indexes: this SQLite was built without dbstat")
            return
        finally:
            connection.close()
        indexes = sum(pages for name, pages in rows.items() if name.startswith(("idx_", "sqlite_autoindex_")))
        total = sum(rows.values())
        report.add(
            f"indexes with {size} bytes of meta", 100 * indexes / total, "% of the file", bytes_per_item=total // items
        )


def measure_growth(report: Report, place: Path, sizes: list[int]) -> None:
    say("growth")
    per_item: dict[int, tuple[float, float, float]] = {}
    for count in sizes:
        path = place / f"growth{count}.db"
        with ProgressManager(path) as progress:
            progress.register(range(count))
            writing = median(mark_all(progress, count)) / 1000
            draw = random.Random(2)
            reads = []
            for _ in range(2_000):
                idx = draw.randrange(count)
                began = time.perf_counter()
                progress.is_done(idx)
                reads.append(time.perf_counter() - began)
            per_item[count] = (1e6 * writing, 1e6 * median(reads), on_disk(path) / count)
        path.unlink()
        say(f"  {count:,}: " + "{:.1f} us written, {:.1f} us asked, {:.0f} bytes an item".format(*per_item[count]))
    names = ("mark_many, per item", "is_done", "size on disk, per item")
    for position, name in enumerate(names):
        small, large = per_item[sizes[0]][position], per_item[sizes[-1]][position]
        values = {f"{count}": round(per_item[count][position], 1) for count in sizes}
        report.add(f"{name}: {sizes[-1]:,} items against {sizes[0]:,}", large / small, "x", values=values)


if __name__ == "__main__":
    main()
