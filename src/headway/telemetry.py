"""What headway says about itself: structured log lines, redaction of secrets, metrics.

Library use stays quiet (a NullHandler on the ``headway`` logger) until the program configures logging or calls
`configure`. Field names are fixed by `FIELDS`, so that a line can be found by the same word everywhere.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import IO, Any, Protocol, Self

from headway.errors import MissingExtra

Field = str | int | float | bool | None

#: Every structured field a headway log line may carry.
FIELDS = frozenset(
    [
        "operation",
        "job",
        "project_id",
        "jobID",
        "taskID",
        "tag",
        "version",
        "eventID",
        "error",
        "idx",
        "run",
        "worker",
        "attempt",
        "count",
        "total",
        "done",
        "failed",
        "dead",
        "seconds",
        "path",
        "queue",
        "key",
        "sink",
        "event",
        "cause",
        "old",
        "new",
        "reason",
    ]
)

logging.getLogger("headway").addHandler(logging.NullHandler())


class Log:
    """A logger whose calls take the facts as keywords: ``log.info("item failed", job=..., idx=...)``."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"headway.{name}")

    def debug(self, message: str, **fields: Field) -> None:
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Field) -> None:
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Field) -> None:
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Field) -> None:
        self._write(logging.ERROR, message, fields)

    def critical(self, message: str, **fields: Field) -> None:
        self._write(logging.CRITICAL, message, fields)

    def _write(self, level: int, message: str, fields: Mapping[str, Field]) -> None:
        if self._logger.isEnabledFor(level):
            unknown = fields.keys() - FIELDS
            if unknown:
                raise ValueError(f"unknown log field(s) {sorted(unknown)}: add them to telemetry.FIELDS")
            self._logger.log(level, message, extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """``2026-11-15T14:02:11Z WARNING ledger: item failed  job=ads idx=17`` or the same as one JSON object.

    Values are JSON-encoded in both forms: a line break inside an error cannot forge a second log line, and what a
    terminal would obey (escape codes, reversed text) is shown instead.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        name = record.name.removeprefix("headway.")
        fields: Mapping[str, Field] = getattr(record, "fields", {})
        clean = {key: redact(value) if isinstance(value, str) else value for key, value in fields.items()}
        message = redact(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            clean.setdefault("error", redact(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"))
        if self._as_json:
            line = {"t": when, "level": record.levelname, "logger": name, "message": message, **clean}
            return _encoded(line)
        facts = "".join(f" {key}={_encoded(value)}" for key, value in clean.items())
        return f"{when} {record.levelname} {name}: {_encoded(message)[1:-1]}{facts}"


#: What JSON leaves as it is although a terminal obeys it, a line splitter splits at it, or UTF-8 cannot write it.
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _encoded(value: object) -> str:
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def configure(*, level: str = "INFO", as_json: bool = False, stream: IO[str] | None = None) -> None:
    """Send headway's log to ``stream`` (stderr); calling it again replaces the earlier choice."""
    logger = logging.getLogger("headway")
    for handler in [handler for handler in logger.handlers if isinstance(handler.formatter, LineFormatter)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(as_json=as_json))
    logger.addHandler(handler)
    logger.setLevel(level)


# ---------------------------------------------------------------------------------------------------------------------
# Redaction

_SENSITIVE = (
    r"(?:pass(?:words?|wd|phrase)?|pwd|secrets?|token|credentials?|auth|signature"
    r"|(?:api|access|private|secret|client|master|signing|encryption|account)[-_]?key)"
)
# No pattern begins with a repetition, and what comes from outside is repeated once: the time grows with the text, not
# with its square, so that an error of a megabyte cannot hold up a run.


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """What a secret looks like, and what is left of it. Compiled when first needed: that takes longer than a short command."""
    return (
        # scheme://user:password@host; a password may hold anything but spaces and quotes, a port is none
        (
            re.compile(r"""(://[^\s:/@'"]{0,256}):(?!\d{1,5}(?![^\s/?#,'"]))[^\s'"]{1,512}@""", re.IGNORECASE),
            r"\1:***@",
        ),
        (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), "***"),
        (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{6,}", re.IGNORECASE), r"\1 ***"),
        (
            re.compile(
                r"""(\b(?:proxy-)?authorization\\*['"]?\s*[:=]\s*\\*['"]?\w{1,32}\s)\s*[^\s'"\\]+""", re.IGNORECASE
            ),
            r"\1***",
        ),
        (re.compile(r"""(\b(?:set-)?cookie\\*['"]?\s*[:=]\s*\\*['"]?)[^\r\n'"\\]+""", re.IGNORECASE), r"\1***"),
        # password=..., "api_key": "...", X-Auth-Token: ..., also as JSON inside JSON
        (
            re.compile(
                rf"""({_SENSITIVE}\b\\*['"]?\s*[:=]\s*)(?!(?:bearer|basic)\b)"""
                r"""(\\*"[^"]*"|\\*'[^']*'|[^\s,;&)}\]]+)""",
                re.IGNORECASE,
            ),
            r"\1***",
        ),
        # Well-known shapes of keys.
        (re.compile(r"\b(?:sk|pk|rk)[-_](?:live|test|proj|ant)?[-_A-Za-z0-9]{16,}"), "***"),
        (
            re.compile(
                r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abposr]-[\w-]{10,}|A(?:KIA|SIA)[A-Z0-9]{16})"
            ),
            "***",
        ),
        (re.compile(r"\bAIza[\w-]{30,64}"), "***"),
        (re.compile(r"\beyJ[\w-]{8,512}\.[\w-]{8,8192}\.[\w-]{0,4096}"), "***"),
    )


# Nothing but a digit or a separator may follow: an author, a passenger and a count of tokens are no secrets.
_SECRET_VARIABLE = re.compile(rf"{_SENSITIVE}(?![a-z])|[_-]key$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of environment variables whose name says *secret*; short ones would blank out ordinary words."""
    values = {
        value for name, value in environment.items() if len(value) >= 8 and value[0] != "/" and names_a_secret(name)
    }
    return tuple(sorted(values, key=len, reverse=True))


def names_a_secret(name: str) -> bool:
    """Whether what goes by this name is not to be shown: ``password``, ``API_TOKEN``, ``ENCRYPTION_KEY``."""
    return _SECRET_VARIABLE.search(_CAMEL.sub("_", name)) is not None


_known_secrets: tuple[str, ...] | None = None


def redact(text: str) -> str:
    """``text`` without passwords, tokens and keys: by shape, by name, and by the value of secret variables."""
    global _known_secrets
    if _known_secrets is None:
        _known_secrets = _secret_values(os.environ)
    for secret in _known_secrets:
        text = text.replace(secret, "***")
    for pattern, replacement in _patterns():
        text = pattern.sub(replacement, text)
    return text


def forget_secrets() -> None:
    """Read the environment again at the next `redact` (after settings were reloaded)."""
    global _known_secrets
    _known_secrets = None


# ---------------------------------------------------------------------------------------------------------------------
# Metrics

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
        self._lock = threading.Lock()
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
            rows += [(name, "counter", labels, value) for (name, labels), value in self._counters.items()]
            rows += [(name, "gauge", labels, value) for (name, labels), value in self._gauges.items()]
            rows += [
                (name, "histogram", labels, Histogram(list(kept.counts), kept.total))
                for (name, labels), kept in self._histograms.items()
            ]
        return rows

    def renew_lock(self) -> None:
        self._lock = threading.Lock()

    def _tell(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None:
        for sink in self._sinks:
            sink.measured(name, kind, value, labels)


#: The metrics of this process.
metrics = Metrics()
# Another thread may have been counting at the moment of the fork; in the child nobody would ever let go of its lock.
os.register_at_fork(after_in_child=metrics.renew_lock)


# ---------------------------------------------------------------------------------------------------------------------
# Prometheus


class MetricsServer:
    """``/metrics`` of this process on a thread, made by `serve_metrics`."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(port: int, *, source: Metrics = metrics) -> MetricsServer:
    """Serve the metrics to this machine (127.0.0.1) for Prometheus; port 0 takes a free one, see `MetricsServer.port`.

    The numbers belong to no one but this process: nothing is stored, nothing is sent anywhere.
    """
    prometheus = _prometheus()
    return MetricsServer(*prometheus.start_http_server(port, addr="127.0.0.1", registry=_registry(prometheus, source)))


def exposition(source: Metrics = metrics) -> bytes:
    """The metrics in the text format of Prometheus, for a ``/metrics`` of one's own."""
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
    """A registry that reads ``source`` anew at every scrape."""
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
                    found[key] = families[kind](name, name.replace("_", " "), labels=names)
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
