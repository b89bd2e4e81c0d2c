"""Counters, gauges and histograms of this process."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

Labels = tuple[tuple[str, str], ...]

#: Upper bounds of the histogram buckets, seconds.
BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)


def _labels(labels: Mapping[str, str]) -> Labels:
    return tuple(labels.items()) if len(labels) < 2 else tuple(sorted(labels.items()))


@dataclass(slots=True)
class Histogram:
    """Counts per bucket of `BUCKETS`, the last one without a bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class MetricsSink(Protocol):
    """Something that wants every measurement as it happens (StatsD, a test). It must not raise or block."""

    def measured(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None: ...


class Metrics:
    """Counters, gauges and histograms of this process. Cheap enough to keep always; exported on demand."""

    def __init__(self) -> None:
        # May be taken again within: a signal handler that does anything with us counts as well.
        self._lock = threading.RLock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._sinks: list[MetricsSink] = []

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        key = (name, _labels(labels))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + value
        self._tell(name, "counter", value, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._gauges[(name, _labels(labels))] = value
        self._tell(name, "gauge", value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        key = (name, _labels(labels))
        with self._lock:
            histogram = self._histograms.get(key)
            if histogram is None:
                histogram = self._histograms[key] = Histogram()
            histogram.observe(value)
        self._tell(name, "histogram", value, labels)

    @contextmanager
    def timed(self, name: str, *, clock: Callable[[], float] = time.perf_counter, **labels: str) -> Iterator[None]:
        began = clock()
        try:
            yield
        finally:
            self.observe(name, clock() - began, **labels)

    def add_sink(self, sink: MetricsSink) -> None:
        self._sinks.append(sink)

    def value(self, name: str, **labels: str) -> float:
        """A counter's or gauge's value (0 when it was never touched)."""
        key = (name, _labels(labels))
        with self._lock:
            return self._counters.get(key, self._gauges.get(key, 0.0))

    def histogram(self, name: str, **labels: str) -> Histogram:
        key = (name, _labels(labels))
        with self._lock:
            kept = self._histograms.get(key, Histogram())
            return Histogram(list(kept.counts), kept.total)

    def collect(self) -> list[tuple[str, str, Labels, float | Histogram]]:
        """Everything as (name, kind, labels, value), a consistent copy."""
        with self._lock:
            rows: list[tuple[str, str, Labels, float | Histogram]] = []
            rows += [(name, "counter", labels, value) for (name, labels), value in list(self._counters.items())]
            rows += [(name, "gauge", labels, value) for (name, labels), value in list(self._gauges.items())]
            rows += [
                (name, "histogram", labels, Histogram(list(kept.counts), kept.total))
                for (name, labels), kept in list(self._histograms.items())
            ]
        return rows

    def renew_lock(self) -> None:
        self._lock = threading.RLock()

    def _tell(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None:
        for sink in self._sinks:
            sink.measured(name, kind, value, labels)


#: The metrics of this process.
metrics = Metrics()
# Another thread may have been counting at the moment of the fork; in the child nobody would ever let go of its lock.
os.register_at_fork(after_in_child=metrics.renew_lock)
