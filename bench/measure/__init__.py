"""What every benchmark shares: figures with their targets, the state of the machine, and a place that is cleaned up.

Only ratios of things measured side by side in one run carry over to another machine; the calibration says how fast
plain Python was here at the beginning and at the end, and how much of the processor others took meanwhile.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# A script's own directory is on the path; the servers of the tests are found from the root.
sys.path.insert(1, str(ROOT))


def say(text: str) -> None:
    """Progress, for people: stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def short(value: float) -> float:
    """Four digits that mean something."""
    return float(f"{value:.4g}")


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory of our own, removed at the end however that comes; SIGTERM ends servers and workers like Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = Path(tempfile.mkdtemp(prefix="headway-bench-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


class Report:
    """Collects figures; `print` writes them as one JSON object."""

    def __init__(self, bench: str, *, quick: bool) -> None:
        self._bench, self._quick = bench, quick
        self._figures: list[dict[str, Any]] = []
        self._left_out: list[str] = []
        self._began = time.monotonic()
        self._calibration = _calibration()
        self._ticks = _ticks()

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        least: float | None = None,
        most: float | None = None,
        **facts: object,
    ) -> None:
        """A figure. ``least`` or ``most`` is the target it has to reach or to keep within."""
        figure: dict[str, Any] = {"name": name, "value": short(value), "unit": unit}
        if least is not None:
            figure |= {"target": f">= {least:g}", "ok": value >= least}
        if most is not None:
            figure |= {"target": f"<= {most:g}", "ok": value <= most}
        self._figures.append(figure | facts)
        verdict = {True: "ok", False: "MISSED", None: ""}[figure.get("ok")]
        say(f"  {name}: {short(value):g} {unit} {figure.get('target', '')} {verdict}".rstrip())

    def leave_out(self, what: str) -> None:
        """Something that could not be measured here is said, not passed over."""
        self._left_out.append(what)
        say(f"  LEFT OUT: {what}")

    def print(self) -> None:
        stolen, all_ticks = (now - then for now, then in zip(_ticks(), self._ticks, strict=True))
        machine = {
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "load": short(os.getloadavg()[0]),
            "calibration_ms": [self._calibration, _calibration()],
            "steal_percent": short(100 * stolen / max(1, all_ticks)),
        }
        judged = [figure["ok"] for figure in self._figures if "ok" in figure]
        result = {
            "bench": self._bench,
            "quick": self._quick,
            "seconds": short(time.monotonic() - self._began),
            "machine": machine,
            "reached": f"{sum(judged)} of {len(judged)}",
            "left_out": self._left_out,
            "figures": self._figures,
        }
        print(json.dumps(result, indent=1))


def _calibration() -> float:
    """Milliseconds for a fixed loop of plain Python: compare it between two runs before comparing anything else."""
    times = []
    for _ in range(3):
        began, total = time.perf_counter(), 0
        for number in range(300_000):
            total += number
        times.append(time.perf_counter() - began)
    return round(1000 * min(times), 2)


def _ticks() -> tuple[int, int]:
    """Processor time that others took from this machine, and all of it; zeros where the kernel does not say."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0, 0
    return fields[7], sum(fields)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
