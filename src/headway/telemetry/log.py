"""Structured log lines.

As a library Headway logs nothing (a NullHandler on the ``headway`` logger) until the program configures logging or calls
`configure`. `FIELDS` fixes the field names, so that a search for a name finds the lines of every package.
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

#: The fields that a log line may have.
FIELDS = frozenset(
    """
    operation job project_id jobID taskID tag version eventID error idx run worker attempt count total done failed
    dead seconds path queue kind key sink event cause old new reason
    """.split()  # noqa: SIM905 - one name per line would be thirty lines
)

#: Maximum characters of a message and of each field. A longer text is logged as its beginning and its end.
LINE_LIMIT = 16_384

logging.getLogger("headway").addHandler(logging.NullHandler())

#: Prefix of a message by level, which makes problems visible in a log of any format.
MARKS = {logging.WARNING: "🟡 ", logging.ERROR: "🔴 ", logging.CRITICAL: "🔴 "}


class Log:
    """A logger with structured fields: ``log.info("item failed", job=..., idx=...)``.

    The messages of warnings and errors begin with the mark of their level (`MARKS`).
    """

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"headway.{name}")

    def debug(self, message: str, **fields: Field) -> None:
        """Log at level DEBUG."""
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Field) -> None:
        """Log at level INFO."""
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Field) -> None:
        """Log at level WARNING."""
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Field) -> None:
        """Log at level ERROR."""
        self._write(logging.ERROR, message, fields)

    def critical(self, message: str, **fields: Field) -> None:
        """Log at level CRITICAL."""
        self._write(logging.CRITICAL, message, fields)

    def _write(self, level: int, message: str, fields: Mapping[str, Field]) -> None:
        if self._logger.isEnabledFor(level):
            unknown = fields.keys() - FIELDS
            if unknown:
                raise ValueError(f"Unknown log fields {sorted(unknown)}: add them to telemetry.FIELDS.")
            marked = MARKS.get(level, "") + message
            self._logger.log(level, marked, extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """Formats ``2026-11-15T14:02:11Z WARNING ledger: item failed job=ads idx=17``, or the same as a JSON object.

    Values are JSON-encoded in both forms. A line break inside an error cannot forge a second log line, and control
    characters for terminals (escape codes, reversed text) are visible.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with secrets redacted."""
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


#: Characters that JSON does not escape, but that control a terminal, break a line, or have no UTF-8 encoding.
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _encoded(value: object) -> str:
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def configure(*, level: str = "INFO", as_json: bool = False, stream: IO[str] | None = None) -> None:
    """Send Headway's log to ``stream`` (default: stderr). A second call replaces the first."""
    logger = logging.getLogger("headway")
    for handler in [handler for handler in logger.handlers if isinstance(handler.formatter, LineFormatter)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(as_json=as_json))
    logger.addHandler(handler)
    logger.setLevel(level)
