"""Numbers, times and foreign text as people read them: the same words on the terminal, in pages and in logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import ceil
from typing import TextIO


def roughly(seconds: float) -> str:
    """A forecast in words as coarse as it deserves: ``18 min``, not ``17:53``."""
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
    """A time that has passed, in two units at most: ``48 min 12 s``."""
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
    """How long one thing took, which may have been short: ``12 ms``, ``3.4 s``, ``48 min 12 s``."""
    if seconds < 0.0095:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.95 else duration(seconds)


def pace(rate: float | None) -> str:
    """``41.2/s``; slow work by the minute or the hour."""
    if rate is None:
        return ""
    for factor, unit in ((1.0, "s"), (60.0, "min"), (3600.0, "h")):
        if rate * factor >= 0.95 or unit == "h":
            value = rate * factor
            return f"{value:,.0f}/{unit}" if value >= 100 else f"{value:.1f}/{unit}"
    raise AssertionError("the last unit takes everything")


def plural(count: int, noun: str) -> str:
    """``1 item``, ``2,000 items``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(text: str) -> str:
    """``text`` on one line and without control characters: what an error says must not move the cursor."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def cells(text: str) -> int:
    """Columns the text takes on a terminal: letters of East Asia take two, accents that stand apart none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str, width: int) -> str:
    """At most ``width`` columns; what was left out is said by dots."""
    if cells(text) <= width:
        return text
    dots = "..."[: max(0, width)]
    kept = text[: max(0, width - len(dots))]
    while cells(kept) > max(0, width - len(dots)):
        kept = kept[:-1]
    return kept + dots


#: A command in a sentence: up to what ends a sentence or a part of it, or a wider gap.
_COMMAND = re.compile(r"\bheadway [a-z]+(?: (?!\.\.\.)[^\s,;)]*[^\s.,;:)])*(?![^\s.,;:)])")


def with_option(text: str, option: str, takes: Callable[[str], bool]) -> str:
    """``text`` with ``option`` after each command in it that takes it, so that it can be typed as it stands."""

    def typed(found: re.Match[str]) -> str:
        return f"{found[0]} {option}" if takes(found[0]) else found[0]

    return _COMMAND.sub(typed, text) if option else text


def shows_color(choice: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to colour: the flag, then NO_COLOR, then FORCE_COLOR, then whether anybody would see it."""
    if choice in ("always", "never"):
        return choice == "always"
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environment.get("TERM") != "dumb"
