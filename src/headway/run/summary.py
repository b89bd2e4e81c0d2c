"""What a run says when it is over, with the next command to type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.run.estimate import RunSnapshot
from headway.wording import cut, duration, pace, printable


class CauseLike(Protocol):
    """What a summary says of a cause; `headway.ledger.Cause` has it."""

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
    """The lines a finished run ends with: counts, then what is dead, by cause, most first.

    ``options`` is appended to the commands shown (``--database sqlite:///other.db``), so that they can be typed as they
    stand. The rate is that of this run alone.
    """
    rate = pace(snapshot.done / seconds if seconds > 0 and snapshot.done else None)
    kept = f" ({snapshot.kept:,} kept)" if snapshot.kept else ""
    facts = [
        f"{snapshot.position:,} done{kept}",
        f"{snapshot.dead:,} dead",
        f"{retries:,} {'retry' if retries == 1 else 'retries'}",
    ]
    lines = [f"Run {job} finished in {duration(seconds)}: " + ", ".join([*facts, *([rate] if rate else [])])]
    deadly = sorted((cause for cause in causes if cause.dead), key=lambda cause: -cause.dead)
    if deadly:
        lines += _beside(cause_lines(deadly, columns=columns), _commands(job, deadly[0].no, options))
    return lines


def _commands(job: str, cause: int, options: str) -> list[str]:
    tail = f"{job} --cause {cause}{' ' + options if options else ''}"
    return [f"headway dead show {tail}", f"headway dead retry {tail}"]


def cause_lines(causes: Sequence[CauseLike], *, columns: int = 120) -> list[str]:
    """``  41  UpstreamTimeout     GET https://store.internal/... timed out``, in columns."""
    pairs = [(f"{cause.dead:,}", cause) for cause in causes]
    wide = max(len(count) for count, _ in pairs)
    named = min(30, max(len(cause.type) for cause in causes))
    room = max(20, columns - wide - named - 8)
    rows = [(count, cut(printable(cause.type), named), cut(printable(cause.message), room)) for count, cause in pairs]
    return [f"  {count:>{wide}}  {type:<{named}}  {message}".rstrip() for count, type, message in rows]


def _beside(lines: list[str], commands: list[str]) -> list[str]:
    """Commands to the right of the first lines; lines of their own where there are fewer causes than commands."""
    width = max(len(line) for line in lines[: len(commands)])
    lines = lines + [""] * (len(commands) - len(lines))
    beside = [f"{line:<{width}}    {command}" for line, command in zip(lines, commands, strict=False)]
    return beside + lines[len(commands) :]


def interrupted(job: str, snapshot: RunSnapshot, command: str) -> list[str]:
    """How far an interrupted run came and how to go on."""
    of = f" of {snapshot.total:,}" if snapshot.total is not None else ""
    return [f"Run {job} is at {snapshot.position:,}{of}. Continue:  {command}"]
