"""Structured log lines without secrets, and metrics."""

from headway.telemetry.log import FIELDS, Field, LineFormatter, Log, configure
from headway.telemetry.measurements import BUCKETS, Histogram, Metrics, MetricsSink, metrics
from headway.telemetry.prometheus import MetricsServer, exposition, serve_metrics
from headway.telemetry.redaction import error_message, error_text, forget_secrets, names_a_secret, redact

__all__ = [
    "BUCKETS", "FIELDS", "Field", "Histogram", "LineFormatter", "Log", "Metrics", "MetricsServer", "MetricsSink",
    "configure", "error_message", "error_text", "exposition", "forget_secrets", "metrics", "names_a_secret",
    "redact", "serve_metrics",
]  # fmt: skip
