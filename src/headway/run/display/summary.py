"""The final summary of a run, with the next command to type."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Protocol

from headway.core.text import cut, duration, pace, plural, printable
from headway.run.display.estimate import RunSnapshot

#: Maximum number of causes in a summary.
MOST_CAUSES = 10


class CauseLike(Protocol):
    """The part of `headway.ledger.Cause` that a summary uses."""

    @property
    def no(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def dead(self) -> int: ...


def summary(
    job: str,
    snapshot: RunSnapshot,
    *,
    seconds: float,
    retries: int,
    causes: Sequence[CauseLike] = (),
    options: str = "",
    columns: int = 120,
) -> list[str]:
    """Return the summary lines of a finished run: counts, then dead items by cause, most first.

    ``options`` is appended to the suggested commands (``--database sqlite:///other.db``), so that they can be copied.
    The rate is that of this run only.
    """
    rate = pace(snapshot.done / seconds if seconds > 0 and snapshot.done else None)
    kept = f" ({snapshot.kept:,} kept)" if snapshot.kept else ""
    facts = [
        f"{snapshot.position:,} done{kept}",
        f"{snapshot.dead:,} dead",
        f"{retries:,} {'retry' if retries == 1 else 'retries'}",
        *([f"{snapshot.postponed:,} postponed"] if snapshot.postponed else []),
    ]
    lines = [f"Run {job} finished in {duration(seconds)}: " + ", ".join([*facts, *([rate] if rate else [])])]
    deadly = sorted((cause for cause in causes if cause.dead), key=lambda cause: -cause.dead)
    if deadly:
        shown = deadly[:MOST_CAUSES]
        lines += _with_commands(
            shown, [f"headway retry {job} --cause {cause.no} {options}".rstrip() for cause in shown], columns
        )
        if len(deadly) > len(shown):
            more = plural(len(deadly) - len(shown), "more cause")
            lines.append(f"  ... and {more}:  headway dead list {job} {options}".rstrip())
        lines.append(f"Details:  headway dead show {job} {options}".rstrip())
    return [part for line in lines for part in _wrapped(line, columns)]


def cause_lines(causes: Sequence[CauseLike], *, columns: int = 120) -> list[str]:
    """Return an aligned line per cause; its number is the value for ``--cause``.

    41  #1  UpstreamTimeout     GET https://store.internal/... timed out
    """
    pairs = [(f"{cause.dead:,}", f"#{cause.no}", cause) for cause in causes]
    wide = max(len(count) for count, _, _ in pairs)
    numbered = max(len(no) for _, no, _ in pairs)
    named = min(30, max(len(cause.type) for cause in causes))
    room = max(8, columns - wide - numbered - named - 8)
    return [
        f"  {count:>{wide}}  {no:<{numbered}}  {cut(printable(cause.type), named):<{named}}  "
        f"{cut(printable(cause.message), room)}".rstrip()
        for count, no, cause in pairs
    ]


def _with_commands(causes: Sequence[CauseLike], commands: Sequence[str], columns: int) -> list[str]:
    """Put each cause's command to its right. Put only the first command below if they do not fit."""
    longest = max(len(command) for command in commands)
    lines = cause_lines(causes, columns=max(60, columns - longest - 4))
    width = max(len(line) for line in lines)
    if width + 4 + longest > columns:
        return [*cause_lines(causes, columns=columns), f"  {commands[0]}"]
    return [f"{line:<{width}}    {command}" for line, command in zip(lines, commands, strict=True)]


def _wrapped(line: str, columns: int) -> list[str]:
    """Wrap a line that is too long between words. Commands stay whole, to be copied."""
    if len(line) <= columns or "headway " in line:
        return [line]
    return wrap(line, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def interrupted(job: str, snapshot: RunSnapshot, command: str, *, columns: int = 120) -> list[str]:
    """Return the progress of an interrupted run and how to continue."""
    of = f" of {snapshot.total:,}" if snapshot.total is not None else ""
    where, how = f"Run {job} is at {snapshot.position:,}{of}. Continue:", f"  {command}"
    return [where + how] if len(where + how) <= columns else [where, how]
