"""Counters, gauges and histograms of this process."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Mapping
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
        """Count a value in its bucket."""
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """The number of observed values."""
        return sum(self.counts)


class MetricsSink(Protocol):
    """Receives every measurement at once, such as for StatsD. It must not raise or block."""

    def measured(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None:
        """Receive a measurement. ``kind`` is counter, gauge or histogram."""


class Metrics:
    """Counters, gauges and histograms of this process. Always collected, because that is cheap; exported on demand."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may count while its thread holds the lock.
        self._lock = threading.RLock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._sinks: list[MetricsSink] = []

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add ``value`` to a counter."""
        key = (name, _labels(labels))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + value
        self._tell(name, "counter", value, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[(name, _labels(labels))] = value
        self._tell(name, "gauge", value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        key = (name, _labels(labels))
        with self._lock:
            histogram = self._histograms.get(key)
            if histogram is None:
                histogram = self._histograms[key] = Histogram()
            histogram.observe(value)
        self._tell(name, "histogram", value, labels)

    def add_sink(self, sink: MetricsSink) -> None:
        """Send every later measurement to ``sink`` too."""
        self._sinks.append(sink)

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a counter or gauge, 0 if it was never set."""
        key = (name, _labels(labels))
        with self._lock:
            return self._counters.get(key, self._gauges.get(key, 0.0))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return a copy of a histogram."""
        key = (name, _labels(labels))
        with self._lock:
            kept = self._histograms.get(key, Histogram())
            return Histogram(list(kept.counts), kept.total)

    def collect(self) -> list[tuple[str, str, Labels, float | Histogram]]:
        """Return a consistent copy of every metric as (name, kind, labels, value)."""
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
        """Replace the lock in a forked child, where a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def _tell(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None:
        for sink in self._sinks:
            sink.measured(name, kind, value, labels)


#: The metrics of this process.
metrics = Metrics()
os.register_at_fork(after_in_child=metrics.renew_lock)
