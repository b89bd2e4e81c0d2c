"""The metrics in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Self

from headway.errors import MissingExtra
from headway.telemetry.catalog import METRICS
from headway.telemetry.measurements import BUCKETS, Histogram, Metrics, metrics


class MetricsServer:
    """The HTTP server of `serve_metrics`, in a thread."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(port: int, *, source: Metrics = metrics) -> MetricsServer:
    """Serve this process's metrics at ``127.0.0.1:port/metrics``.

    Port 0 selects a free port: see `MetricsServer.port`.
    """
    prometheus = _prometheus()
    return MetricsServer(*prometheus.start_http_server(port, addr="127.0.0.1", registry=_registry(prometheus, source)))


def exposition(source: Metrics = metrics) -> bytes:
    """Return the metrics in the text format of Prometheus, for your own ``/metrics`` route."""
    prometheus = _prometheus()
    text: bytes = prometheus.generate_latest(_registry(prometheus, source))
    return text


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingExtra("metrics", "Serving metrics") from error
    return prometheus_client


def _registry(prometheus: Any, source: Metrics) -> Any:
    """Return a registry that reads ``source`` at every scrape."""
    from prometheus_client import core

    families: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }

    class Collector:
        def collect(self) -> Iterator[Any]:
            found: dict[tuple[str, str, tuple[str, ...]], Any] = {}
            for name, kind, labels, value in source.collect():
                names = tuple(label for label, _ in labels)
                key = (name, kind, names)
                if key not in found:
                    found[key] = families[kind](name, METRICS[name].help if name in METRICS else name, labels=names)
                texts = [text for _, text in labels]
                if isinstance(value, Histogram):
                    found[key].add_metric(texts, buckets=list(_cumulative(value)), sum_value=value.total)
                else:
                    found[key].add_metric(texts, value)
            yield from found.values()

    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return registry


def _cumulative(histogram: Histogram) -> Iterator[tuple[str, int]]:
    total = 0
    for bound, count in zip((*BUCKETS, float("inf")), histogram.counts, strict=True):
        total += count
        yield ("+Inf" if bound == float("inf") else str(bound), total)
