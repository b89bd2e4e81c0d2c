"""Describe exceptions for storage, and group them into causes.

A cause consists of the exception's type, its normalised message and the innermost frame of the user's own code. Line
numbers are excluded: an edited file must not split a cause.

`describe` runs just before a failure is recorded, so it never raises. If one part of the description fails (a raising
``__str__``, a missing attribute, no memory), only that part is lost.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.telemetry import error_message, redact

#: Maximum characters of an error message.
ERROR_LIMIT = 300
#: Maximum characters of a traceback.
DETAIL_LIMIT = 4000


@dataclass(frozen=True, slots=True)
class Failure:
    """The stored description of an error, redacted and limited in size."""

    type: str
    message: str
    frame: str = ""
    detail: str | None = None

    @property
    def text(self) -> str:
        """Type and message, as one line."""
        return f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message


_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = str(Path(__file__).resolve().parents[1])

#: Limits of the detail text: chained exceptions, members of a group, stack frames, notes.
_CHAIN, _MEMBERS, _FRAMES, _NOTES = 5, 5, 30, 5
_LINE = 200

# ---- causes ----------------------------------------------------------------------------------------------------------

# Status codes are kept: status 404 and status 500 are two causes, item 404 and item 500 are one.
_CODE_WORDS = (
    r"status(?:[ _]?code)?|(?:exit|return|error|response|result|reason|http|grpc|sql)[ _]?(?:code|status)|code|errno|winerror"
    r"|returncode|rc|errcode|err|error|exit(?:ed)?(?: with)?(?: status| code)?|http(?:/[\d.]+)?|signal"
)
_ANSWERS = r"(?:answered|responded|replied|returned|got|received|gave)(?:\ (?:with|a|an|http|status))*"
_COUNTED = r"(?:rows?|items?|bytes?|records?|results?|lines?|entries|values?|times?|ms|s|seconds?|of)"
_PHRASES = (
    r"client\ error|server\ error|ok|created|accepted|no\ content|moved|found|not\ modified|bad\ request|unauthori[sz]ed"
    r"|payment|forbidden|not\ found|method\ not|not\ acceptable|request\ time|conflict|gone|length\ req|precondition|payload"
    r"|request\ entity|uri\ too|unsupported|unprocessable|locked|too\ (?:early|many)|internal|not\ impl|bad\ gateway"
    r"|service\ un|gateway|http\ ver|insufficient"
)
# A status at the start of the message: "422 schema v1". Before a verb or a unit the number belongs to the item.
_STATUS = r"4(?:0\d|1[0-8]|2[1-689]|31|51)|50[0-8]|51[01]"
_OF_AN_ITEM = (
    rf"(?:{_COUNTED}|is|isn't|was|are|were|has|have|had|does|did|not|cannot|can't|and|or|in|at|columns?|pages?)"
)
_VARIABLE_PARTS = re.compile(
    rf"""
    (?P<keep>
        (?<![\w-]) (?:{_CODE_WORDS}) (?:\s+(?:is|was|of|no\.?|number))? [\s:=\#(\['"]{{1,3}}
        -?(?:\d{{1,5}}|0x[0-9a-f]{{1,8}}) (?![\w.,:-]*\d)
      | sqlstate [\s:=\[('"]{{0,3}} [0-9a-z]{{5}} \b
      | (?<![\w-]) {_ANSWERS} \s [1-5]\d\d (?![\w.,:-]*\d) (?!\s+{_COUNTED}\b)
      | (?:^|(?<=[:,;>=-]\ )|(?<=[(\[<"'])) [1-5]\d\d (?=[:,]?\ (?:{_PHRASES})\b)
      | ^(?:{_STATUS}) (?=[:,]?\ [a-z]) (?![:,]?\ {_OF_AN_ITEM}\b)
      | \bv\d{{1,3}}(?:\.\d+){{0,3}}\b(?![-_])      # a version: schema v1, API v2.1
      | <signals\.\w+:\ \d+>
      | ^\(-?\d{{1,5}} (?=,\ ['"])                   # (1205, 'Lock wait timeout exceeded')
      | \b(?:ora-\d{{5}}|e\d{{4,5}}|sqlite_\w+) \b
    )
  | (?P<id> \b[0-9a-f]{{8}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{12}}\b )
  | (?P<time> \b\d{{4}}-\d\d-\d\d (?:[T\ ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)? (?:Z|[+-]\d\d:?\d\d)?)? )
  | (?P<address> \b0x[0-9a-f]+\b )
    # inv-00421, page_7, A17b, deadbeef12: a word that has both letters and digits
  | (?P<word> \b(?=[\w-]{{0,200}}\d)(?=[\w-]{{0,200}}[a-z])[a-z0-9]+(?:[-_][a-z0-9]+)*\b )
  | (?P<n> (?<![\w{{])[-+]?\d+(?:[.,]\d+)*(?![\w}}]) )
    """,
    re.IGNORECASE | re.VERBOSE,
)
_REPLACED = {"id": "{id}", "time": "{time}", "address": "{address}", "word": "{id}", "n": "{n}"}


def normalise(message: str, name: str | None = None) -> str:
    """Replace the parts of ``message`` that vary between items. ``name`` is the item's key."""
    line = " ".join(message[:2000].split())
    # A numeric key is replaced as a number below. Replaced here, key 123 and key 7 would be different causes.
    if name and len(name) >= 3 and not name.isdecimal():
        line = line.replace(name, "{id}")
    return _VARIABLE_PARTS.sub(_replacement, line)[:200]


def _replacement(found: re.Match[str]) -> str:
    return _REPLACED.get(found.lastgroup or "", found[0])


# ---- one exception ---------------------------------------------------------------------------------------------------

# Built in advance, for when no memory or stack is left.
_INDESCRIBABLE = Failure("Exception", "(it cannot be described)")


def describe(error: BaseException) -> Failure:
    """Describe an exception, redacted and limited in size. Never raises.

    Exceptions raised by ``error`` itself are caught too, including KeyboardInterrupt and SystemExit. The run time of its
    ``__str__`` counts as the item's time.
    """
    try:
        name = _try(_type_name, error) or "Exception"
        return Failure(
            type=name,
            message=_try(_message, error, name) or "",
            frame=_try(_own_frame, _field(error, "__traceback__")) or "",
            detail=_try(_detail, error),
        )
    except BaseException:  # noqa: BLE001 - no memory, no stack
        return _INDESCRIBABLE


def bounded_error(message: str) -> str:
    """Redact an error message and limit its length. A cut is marked in the text."""
    return _storable(redact(message, ERROR_LIMIT))


_WHOLE_LENGTH = re.compile(r" \.\.\. \((\d+) characters\)")


def shortened(text: str, limit: int) -> str:
    """Cut a redacted text to ``limit`` bytes.

    A limit of at least 150 bytes keeps the beginning, the original length and the end. A smaller one keeps the beginning.
    A text that was cut before already states its original length.
    """
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    note, tail = " ...", 0
    if limit >= 150:
        cut_before = _WHOLE_LENGTH.search(text)
        note = f" ... ({cut_before[1] if cut_before else len(text)} characters) ... "
        tail = (limit - len(note)) // 3
    head = limit - len(note) - tail
    return data[:head].decode(errors="ignore") + note + data[len(data) - tail :].decode(errors="ignore")


def reported(kind: str, message: str, frame: str, detail: str = "") -> Failure:
    """Build a `Failure` from a report, for example of a program. A long ``detail`` keeps its end."""
    text = _storable(redact(detail[-4 * DETAIL_LIMIT :])).strip()
    return Failure(
        kind, bounded_error(message), frame[:120], text if len(text) <= DETAIL_LIMIT else "...\n" + text[-DETAIL_LIMIT:]
    )


def kept_text(text: str) -> str:
    """Redact a text and replace characters that a database cannot store."""
    return _storable(redact(text))


def _try(part: Callable[..., str], *arguments: Any) -> str | None:
    try:
        return part(*arguments)
    except BaseException:  # noqa: BLE001 - the other parts of the description are still useful
        return None


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{SYMBOL FOR NULL}")


def _type_name(error: BaseException) -> str:
    """Return the class name without calling ``__class__`` or a metaclass."""
    return _storable(type.__getattribute__(type(error), "__name__")[:80])


def _message(error: BaseException, name: str) -> str:
    """Return the redacted message. The type name is part of the context: ``AuthError`` marks its arguments as secret."""
    prefix = f"{name} | "
    return _storable(redact(prefix + error_message(error), ERROR_LIMIT + len(prefix))[len(prefix) :])


def _field(error: BaseException, name: str) -> Any:
    """Read a built-in field of an exception, bypassing overrides in its class."""
    return getattr(BaseException, name).__get__(error)


@lru_cache(maxsize=4096)
def _is_own(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return False
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    return not path.startswith(_LIBRARIES) and not path.startswith(_OURS)


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _own_frame(trace: TracebackType | None) -> str:
    """Return ``file.py:function`` of the innermost frame outside libraries and Headway."""
    codes = [step.tb_frame.f_code for step in _steps(trace)]
    if not codes:
        return ""
    code = next((code for code in reversed(codes) if _is_own(code.co_filename)), codes[-1])
    return _storable(f"{Path(code.co_filename).name}:{code.co_name}"[:120])


def _detail(error: BaseException) -> str:
    """Format the traceback without Headway's frames, causes first. A long text keeps its end."""
    blocks, seen, follow = [_block(error)], {id(error)}, ""
    while True:
        cause, context = _field(error, "__cause__"), _field(error, "__context__")
        if cause is not None:
            error, follow = cause, "The above exception was the direct cause of the following exception:"
        elif context is not None and not _field(error, "__suppress_context__"):
            error, follow = context, "During handling of the above exception, another exception occurred:"
        else:
            break
        if id(error) in seen or len(blocks) == _CHAIN:
            blocks.append(f"...\n\n{follow}\n\n")
            break
        seen.add(id(error))
        blocks.append(f"{_block(error)}\n{follow}\n\n")
    text = _storable(redact("".join(reversed(blocks))))
    return text if len(text) <= DETAIL_LIMIT else "...\n" + text[-DETAIL_LIMIT:]


def _block(error: BaseException) -> str:
    """Format one exception as Python does, with a limit on each part."""
    lines = [_try(_stack, _field(error, "__traceback__")) or "", _said(error)]
    lines += [f"{redact(note, _LINE)}\n" for note in (_notes(error) or [])]
    if issubclass(type(error), BaseExceptionGroup):  # isinstance would call code of the exception
        members: tuple[BaseException, ...] = BaseExceptionGroup.exceptions.__get__(error)
        for number, member in enumerate(members[:_MEMBERS], 1):
            frame = _try(_own_frame, _field(member, "__traceback__"))
            lines.append(f"  {number}. {_said(member).rstrip()}{f' ({frame})' if frame else ''}\n")
        if len(members) > _MEMBERS:
            lines.append(f"  and {len(members) - _MEMBERS} more\n")
    return "".join(lines)


def _said(error: BaseException) -> str:
    message = redact(error_message(error), DETAIL_LIMIT // 4)
    name = _try(_type_name, error) or "Exception"
    return f"{name}: {message}\n" if message else f"{name}\n"


def _stack(trace: TracebackType | None) -> str:
    steps = [step for step in _steps(trace) if not step.tb_frame.f_code.co_filename.startswith(_OURS)][-_FRAMES:]
    if not steps:
        return ""
    frames = traceback.StackSummary.extract((step.tb_frame, step.tb_lineno) for step in steps)
    shown = [line if len(line) <= 3 * _LINE else f"{redact(line, 3 * _LINE)}\n" for line in frames.format()]
    return "Traceback (most recent call last):\n" + "".join(shown)


def _notes(error: BaseException) -> list[str] | None:
    try:
        notes = object.__getattribute__(error, "__dict__").get("__notes__")
        return [note for note in notes[:_NOTES] if type(note) is str] if type(notes) is list else None
    except BaseException:  # noqa: BLE001 - notes may be anything
        return None
