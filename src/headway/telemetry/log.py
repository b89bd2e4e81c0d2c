"""Structured log lines.

Library use stays quiet (a NullHandler on the ``headway`` logger) until the program configures logging or calls
`configure`. Field names are fixed by `FIELDS`, so that a line can be found by the same word everywhere.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO

from headway.telemetry.redaction import error_text, redact

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
        "kind",
        "key",
        "sink",
        "event",
        "cause",
        "old",
        "new",
        "reason",
    ]
)

#: Characters of a message and of each fact. Whoever logs a text of megabytes gets its beginning and its end.
LINE_LIMIT = 16_384

logging.getLogger("headway").addHandler(logging.NullHandler())


#: What a message begins with, by level, so that trouble is seen in a log of any format.
MARKS = {logging.WARNING: "🟡 ", logging.ERROR: "🔴 ", logging.CRITICAL: "🔴 "}


class Log:
    """A logger whose calls take the facts as keywords: ``log.info("item failed", job=..., idx=...)``.

    The messages of warnings and errors begin with the mark of their level (`MARKS`).
    """

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
            marked = MARKS.get(level, "") + message
            self._logger.log(level, marked, extra={"fields": fields})


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
        clean = {key: redact(value, LINE_LIMIT) if isinstance(value, str) else value for key, value in fields.items()}
        message = redact(record.getMessage(), LINE_LIMIT)
        if record.exc_info and record.exc_info[1] is not None:
            clean.setdefault("error", error_text(record.exc_info[1], LINE_LIMIT))
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
