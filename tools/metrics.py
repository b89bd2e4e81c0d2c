"""Write docs/reference/metrics.md: every metric with its kind, labels and meaning.

    python tools/metrics.py > docs/reference/metrics.md

`make docs` fails when the page differs from what this prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from headway.telemetry.catalog import METRICS

_HEAD = """\
# Metrics

<!-- Written by `tools/metrics.py`; change headway.telemetry.catalog, not this page. -->

Every process counts for itself and keeps its numbers in memory.

- `headway serve` answers `/metrics` for Prometheus to a token of the role `viewer`.
- `headway.telemetry.serve_metrics(port)` serves the numbers of any other process on 127.0.0.1. It needs the extra `metrics`.
- `headway.telemetry.exposition()` returns the same text.
- `headway.telemetry.metrics.add_sink(sink)` passes on every measurement as it happens.

| metric | kind | meaning |
|---|---|---|
"""


def page() -> Iterator[str]:
    """Yield the reference page in pieces."""
    yield _HEAD
    for name, metric in METRICS.items():
        labels = f"{{{metric.labels}}}" if metric.labels else ""
        yield f"| `{name}{labels}` | {metric.kind} | {metric.help} |\n"


if __name__ == "__main__":
    sys.stdout.writelines(page())
