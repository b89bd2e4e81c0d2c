"""Format numbers, times and untrusted text for the terminal, web pages and logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import ceil
from typing import TextIO


def roughly(seconds: float) -> str:
    """Format a forecast with suitably low precision: ``18 min``, not ``17:53``."""
    if seconds < 57.5:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = seconds / 60
    if minutes < 19.5:
        return f"{max(1, round(minutes))} min"
    if minutes < 57.5:
        return f"{5 * round(minutes / 5)} min"
    if minutes < 352.5:
        hours, rest = divmod(15 * round(minutes / 15), 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    hours = ceil(minutes / 60 - 0.5)
    return f"{hours} h" if hours < 48 else f"{round(hours / 24)} days"


def duration(seconds: float) -> str:
    """Format a duration with at most two units: ``48 min 12 s``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            big, rest = divmod(whole, size)
            small = rest // part
            return f"{big} {unit} {small} {smaller}" if small else f"{big} {unit}"
    return f"{whole} s"


def took(seconds: float) -> str:
    """Format a duration that may be below a second: ``12 ms``, ``3.4 s``, ``48 min 12 s``."""
    if seconds < 0.0095:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.95 else duration(seconds)


def pace(rate: float | None) -> str:
    """Format a rate per second, per minute or per hour: ``41.2/s``. ``rate`` is per second."""
    if rate is None:
        return ""
    for factor, unit in ((1.0, "s"), (60.0, "min"), (3600.0, "h")):
        if rate * factor >= 0.95 or unit == "h":
            value = rate * factor
            return f"{value:,.0f}/{unit}" if value >= 100 else f"{value:.1f}/{unit}"
    raise AssertionError("the last unit takes everything")


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 item``, ``2,000 items``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(text: str) -> str:
    """Replace line breaks and control characters with spaces, so that text cannot move the cursor."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def cells(text: str) -> int:
    """Return the terminal width of a text: East Asian wide characters count 2, combining accents 0."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str, width: int) -> str:
    """Cut a text to ``width`` columns and mark the cut with dots."""
    if cells(text) <= width:
        return text
    dots = "..."[: max(0, width)]
    kept = text[: max(0, width - len(dots))]
    while cells(kept) > max(0, width - len(dots)):
        kept = kept[:-1]
    return kept + dots


#: A ``headway`` command inside a sentence. It ends at punctuation or at two spaces.
_COMMAND = re.compile(r"\bheadway [a-z]+(?: (?!\.\.\.)[^\s,;)]*[^\s.,;:)])*(?![^\s.,;:)])")


def with_option(text: str, option: str, takes: Callable[[str], bool]) -> str:
    """Append ``option`` to each command in ``text`` that accepts it, so that users can copy the command.

    ``takes`` decides whether a command accepts the option.
    """

    def typed(found: re.Match[str]) -> str:
        return f"{found[0]} {option}" if takes(found[0]) else found[0]

    return _COMMAND.sub(typed, text) if option else text


def shows_color(choice: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Decide whether to use colour: the choice, then NO_COLOR, then FORCE_COLOR, then whether it is a terminal."""
    if choice in ("always", "never"):
        return choice == "always"
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environment.get("TERM") != "dumb"
