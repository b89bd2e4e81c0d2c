"""From an exception to what is remembered of it, and from many of them to few causes.

A cause is the exception's type, its message with the parts that differ from item to item replaced, and the topmost
frame of the user's own code. Line numbers stay out: an edited file must not split a cause.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from headway.ledger.values import DETAIL_LIMIT, ERROR_LIMIT, Failure
from headway.telemetry import redact

_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = str(Path(__file__).resolve().parent.parent)

_VARIABLE_PARTS = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "{id}"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "{time}"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "{address}"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "{id}"),
    # inv-00421, page_7, A17b: a word that has both letters and digits
    (re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*\b"), "{id}"),
    (re.compile(r"(?<![\w{])[-+]?\d+(?:[.,]\d+)*(?![\w}])"), "{n}"),
)


def normalise(message: str, name: str | None = None) -> str:
    """``message`` without what differs between items; ``name`` is the item's own key."""
    line = " ".join(message.split())
    if name and len(name) >= 3:
        line = line.replace(name, "{id}")
    for pattern, word in _VARIABLE_PARTS:
        line = pattern.sub(word, line)
    return line[:200]


def describe(error: BaseException) -> Failure:
    """An exception, redacted and bounded."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure itself
        message = "(its message cannot be shown)"
    return Failure(
        type=name.rpartition(".")[2][:80],
        message=bounded_error(message),
        frame=_own_frame(error.__traceback__)[:120],
        detail=_own_first(error),
    )


def bounded_error(message: str) -> str:
    """Redacted, printable, of bounded length; what was cut is said."""
    text = redact(message.encode("utf-8", "replace").decode()).replace("\0", "\N{SYMBOL FOR NULL}")
    return text if len(text) <= ERROR_LIMIT else f"{text[: ERROR_LIMIT - 20]}... ({len(text)} characters)"


def _is_own(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return False
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    return not path.startswith(_LIBRARIES) and not path.startswith(_OURS)


def _own_frame(trace: TracebackType | None) -> str:
    """``file.py:function`` of the innermost frame that is neither a library's nor ours."""
    frames = traceback.extract_tb(trace)
    for frame in reversed(frames):
        if _is_own(frame.filename):
            return f"{Path(frame.filename).name}:{frame.name}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""


def _own_first(error: BaseException) -> str:
    """The traceback without our own frames."""
    shown = traceback.TracebackException.from_exception(error, limit=-30)
    shown.stack = traceback.StackSummary.from_list(
        [frame for frame in shown.stack if not frame.filename.startswith(_OURS)]
    )
    text = redact("".join(shown.format()).encode("utf-8", "replace").decode()).replace("\0", "\N{SYMBOL FOR NULL}")
    return text if len(text) <= DETAIL_LIMIT else "...\n" + text[-DETAIL_LIMIT:]
