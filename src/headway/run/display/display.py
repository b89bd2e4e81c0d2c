"""Progress displays of a run: two live lines on a terminal, plain lines in a log, NDJSON for programs.

A display never stops the work: when its stream is gone (a closed terminal, a broken pipe), it falls silent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from textwrap import wrap
from typing import ClassVar, Protocol, TextIO
from unicodedata import east_asian_width

from headway.core.text import duration, pace, printable, roughly, shows_color
from headway.run.display.estimate import Estimator, RunSnapshot
from headway.run.display.summary import interrupted, summary

__all__ = [
    "PROGRESS_KEYS",
    "Display",
    "Estimator",
    "RunSnapshot",
    "bar",
    "describe_wait",
    "interrupted",
    "open_display",
    "summary",
    "waiting",
]

KINDS = ("auto", "bar", "plain", "json", "none")

#: Minimum interval between redraws of the live lines, seconds.
REDRAW_SECONDS = 0.1
#: A plain line is printed after this many seconds *and* this much progress, percent.
PLAIN_SECONDS = 30.0
PLAIN_PERCENT = 5.0
#: Minimum intervals of the notebook line and of NDJSON progress, seconds.
LINE_SECONDS = 0.25
JSON_SECONDS = 1.0
#: The keys of an NDJSON progress line. They are stable; new ones may be added.
PROGRESS_KEYS = {
    "total": "items of the job; null while a stream of them is still open",
    "kept": "done items that an earlier run did",
    "done": "items of the job that are done, the kept ones included",
    "running": "items being worked on",
    "retrying": "items that failed and wait for another try",
    "dead": "items of the job that failed for good",
    "failures": "failed runs of items in this run",
    "percent": "of the job that is done; null without a total",
    "rate": "items finished per second, in this run; null before the first",
    "eta_seconds": "seconds left, the likely figure; null while it cannot be said",
    "eta_low_seconds": "the lower end of its range",
    "eta_high_seconds": "the upper end of its range",
    "stalled_seconds": "for how long nothing has finished, once that is unusual; else null",
    "last_error": "type of the last error of this run; null if there is none",
    "last_error_count": "how often an error of that type came",
    "paused_by": "who asked the run to pause; null while it goes on",
    "waits_seconds": "for how long the whole job starts nothing (RetryLater); null while it does not wait",
    "wait_reason": "why it waits; null while it does not",
    "postponed": "how often RetryLater postponed an item in this run",
}
#: A bar narrower than this is left out.
SHORTEST_BAR = 10
LONGEST_BAR = 60

_GREEN, _BLUE, _DIM, _RED, _YELLOW, _RESET = (f"\x1b[{code}m" for code in (32, 34, 2, 31, 33, 0))

#: Begin and end of a synchronised update; other terminals ignore these sequences.
_HOLD, _SHOW = "\x1b[?2026h", "\x1b[?2026l"


class Display(Protocol):
    """How a run reports its progress, ten times a second or on events."""

    #: Whether it redraws terminal lines, so that other code must not write there directly.
    live: ClassVar[bool]

    def begin(self, text: str) -> None:
        """Introduce the run, once, before any other call."""

    def show(self, snapshot: RunSnapshot) -> None:
        """Show the progress. Called often; the display decides when to draw or print."""

    def say(self, text: str) -> None:
        """Print a message."""

    def give_way(self, text: str) -> None:
        """Make room for other output: ``text`` is an unfinished line or a prompt."""

    def end(self, snapshot: RunSnapshot) -> None:
        """End the display; later output starts on a new line."""

    def conclude(self, lines: Sequence[str], facts: Mapping[str, object]) -> None:
        """Print the summary after `end`: ``lines`` for people, the same as ``facts`` for programs."""


def open_display(
    kind: str,
    *,
    stream: TextIO | None,
    color: str = "auto",
    environment: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
    columns: Callable[[], int] | None = None,
    shared: bool = False,
) -> Display:
    """Open the display of a kind in `KINDS`.

    ``auto`` is the bar on a capable terminal, one line in a notebook, else plain lines. Without a stream (a service
    may have closed it), nothing is shown. ``shared`` means that other code writes to the terminal too.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    if stream is None:
        return _Silent(_Writer(None), clock)
    if kind == "auto":
        kind = "bar" if stream.isatty() and environment.get("TERM") != "dumb" else "plain"
        if type(stream).__module__.startswith("ipykernel"):
            kind = "line"
    writer = _Writer(stream)
    match kind:
        case "bar":
            width = columns or (lambda: terminal_columns(stream, environment))
            colored = shows_color(color, stream, environment)
            return _Bar(writer, clock, width, colored=colored, ascii_only=not _is_unicode(stream), shared=shared)
        case "line":
            return _Line(writer, clock)
        case "plain":
            return _Plain(writer, clock)
        case "json":
            return _Json(writer, clock)
        case _:
            return _Silent(writer, clock)


def terminal_columns(stream: TextIO, environment: Mapping[str, str]) -> int:
    """Return the width of the terminal; 80 if unknown."""
    if environment.get("COLUMNS", "").isdecimal() and int(environment["COLUMNS"]) > 0:
        return int(environment["COLUMNS"])
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # not a terminal, or no descriptor
        return 80


def _is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") in ("utf8", "utf8sig")


class _Writer:
    """Writes until the stream is gone. It escapes characters that the stream's encoding lacks."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text.encode(self._encoding, "backslashreplace").decode(self._encoding))
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._stream = None


# ---------------------------------------------------------------------------------------------------------------------
# Content of the lines


def _state(snapshot: RunSnapshot, estimator: Estimator) -> str:
    """Return the remaining time, or why there is no forecast."""
    if snapshot.paused_by:
        return f"paused by {printable(snapshot.paused_by)}"
    if snapshot.wait_seconds:
        return _waits(snapshot.wait_seconds, snapshot.wait_reason)
    silence, forecast = estimator.stalled, estimator.forecast
    if silence is not None:
        return f"stalled {duration(int(silence))}"
    if snapshot.only_retries:
        return "waiting to retry"
    return f"~{roughly(forecast.seconds)} left" if forecast else ""


def _waits(seconds: float, reason: str) -> str:
    return _waits_until(datetime.now().astimezone() + timedelta(seconds=seconds), reason)


def _waits_until(until: datetime, reason: str) -> str:
    """Format the wait of a job: ``waits until 14:05:10: the server answered 429``."""
    local = until.astimezone()
    today = local.date() == datetime.now().astimezone().date()
    moment = local.strftime("%H:%M:%S" if today else "%d %b %H:%M")
    return f"waits until {moment}" + (f": {printable(reason)}" if reason else "")


def waiting(until: datetime, reason: str) -> str:
    """Return the message that a job which is not running waits."""
    return f"The job {_waits_until(until, reason)}."


def describe_wait(seconds: float, reason: str) -> str:
    """Return the message that a running job begins to wait."""
    return f"The job {_waits(seconds, reason)}. Running items are finished; no attempt is counted."


def _tenths(percent: float) -> float:
    """Round to tenths, but never up to 100.0."""
    return percent if percent >= 100.0 else min(99.9, round(percent, 1))


def _position(snapshot: RunSnapshot) -> str:
    return f"{snapshot.position:,}" + (f"/{snapshot.total:,}" if snapshot.total is not None else "")


def _counts(snapshot: RunSnapshot) -> list[str]:
    kept = f" ({snapshot.kept:,} kept)" if snapshot.kept else ""
    return [
        f"done {snapshot.position:,}{kept}",
        f"running {snapshot.running:,}",
        f"retrying {snapshot.retrying:,}",
        f"dead {snapshot.dead:,}",
    ]


def _last_error(snapshot: RunSnapshot) -> str:
    if not snapshot.last_error:
        return ""
    return f"last error: {printable(snapshot.last_error)} x{snapshot.last_error_count:,}"


def bar(kept: float, done: float, width: int, *, ascii_only: bool = False, colored: bool = False) -> str:
    """Draw a bar of ``width`` cells. ``kept`` and ``done`` are shares of 1, drawn in different styles."""
    full = min(1.0, kept + done) * width
    old = min(int(min(1.0, kept) * width + 0.5), int(full))
    new = int(full) - old
    if ascii_only:
        tip = ">" if new and full < width else ""
        strokes = ("=" * old, "#" * (new - len(tip)) + tip, "." * (width - old - new))
    else:
        tip = "╸" if full - int(full) >= 0.5 else ""
        strokes = ("─" * old, "━" * new + tip, " " * (width - old - new - len(tip)))
    if not colored:
        return "".join(strokes)
    return f"{_BLUE}{strokes[0]}{_GREEN}{strokes[1]}{_RESET}{strokes[2]}"


def cells(text: str) -> int:
    """Return the terminal columns that the text takes."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def _clip(text: str, width: int) -> str:
    while cells(text) > width:
        text = text[:-1]
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Displays


class _Base:
    """What displays have in common: the estimator, and the lines of the summary."""

    live: ClassVar[bool] = False

    def __init__(self, writer: _Writer, clock: Callable[[], float]) -> None:
        self._write, self._clock = writer.write, clock
        self._estimator = Estimator(clock)

    def begin(self, text: str) -> None:
        self.say(text)

    def say(self, text: str) -> None:
        """Print a message."""

    def give_way(self, text: str) -> None:
        """Do nothing: only the bar has to make room."""

    def conclude(self, lines: Sequence[str], facts: Mapping[str, object]) -> None:
        self._write("".join(f"{line}\n" for line in lines))


class _Bar(_Base):
    """Two live lines.

    The cursor rests at the start of the first line. So clearing to the end of the screen removes both, even after the
    terminal was resized. On a shared terminal it rests on an empty line above them. Password prompts appear there:
    getpass, ssh and sudo bypass our streams. The newline after the answer then moves the cursor to the bar.
    """

    live: ClassVar[bool] = True

    def __init__(
        self,
        writer: _Writer,
        clock: Callable[[], float],
        columns: Callable[[], int],
        *,
        colored: bool,
        ascii_only: bool,
        shared: bool,
    ) -> None:
        super().__init__(writer, clock)
        self._columns = columns
        self._above = "\n" if shared else ""
        self._colored, self._ascii = colored, ascii_only
        self._drawn_at = float("-inf")
        self._drawn = self._ended = False
        #: Whether an unfinished line of other code is where the bar would be.
        self._begun = False

    def begin(self, text: str) -> None:
        for line in wrap(text, max(20, self._columns() - 1), subsequent_indent="  ", break_on_hyphens=False):
            self.say(line)

    def show(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        if not self._begun and self._clock() - self._drawn_at >= REDRAW_SECONDS:
            self._draw(snapshot, above=self._above, after=f"\x1b[{1 + len(self._above)}A\r")

    def say(self, text: str) -> None:
        self._clear()
        self._write(text + "\n")
        self._begun = False
        self._drawn_at = float("-inf")  # redraw below the message at once

    def give_way(self, text: str) -> None:
        self._clear()
        if text:
            self._write(text)
            self._begun = True

    def end(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        self._ended = True
        if self._begun:
            self._write("\n")
        self._draw(snapshot, after="\n")
        self._drawn = False

    def _clear(self) -> None:
        if self._drawn:
            self._write("\r\x1b[J")
        self._drawn = False

    def _draw(self, snapshot: RunSnapshot, *, above: str = "", after: str) -> None:
        # Leave the last column free: some terminals wrap when it is written.
        room = max(1, self._columns() - 1)
        start = "\r\x1b[J" if self._drawn else ""
        # One write within a synchronised update, so that a half-drawn state is never visible.
        lines = f"{self._first_line(snapshot, room)}\n{self._second_line(snapshot, room)}"
        self._write(f"{_HOLD}{start}{above}{lines}{after}{_SHOW}")
        self._drawn_at, self._drawn = self._clock(), True

    def _first_line(self, snapshot: RunSnapshot, room: int) -> str:
        state = "" if self._ended else _state(snapshot, self._estimator)
        fields = [_position(snapshot), pace(self._estimator.rate) or "-", *([state] if state else [])]
        percent = snapshot.percent
        if percent is None or snapshot.total is None:
            return self._fit([f" {fields[0]} done", *fields[1:]], room)
        head = f"{_tenths(percent):5.1f}%"
        while fields and room - cells("   ".join(["", *fields])) - len(head) - 1 < SHORTEST_BAR:
            fields.pop()
        tail = "   ".join(["", *fields]) if fields else ""
        width = min(LONGEST_BAR, room - len(head) - 1 - cells(tail))
        if width < SHORTEST_BAR:
            return _clip(head, room)
        total = snapshot.total or 1
        kept = snapshot.kept / total
        done = snapshot.done / total if snapshot.total else 1.0
        drawn = bar(kept, done, width, ascii_only=self._ascii, colored=self._colored)
        return f"{head} {drawn}{tail}".rstrip()

    def _second_line(self, snapshot: RunSnapshot, room: int) -> str:
        between = " - " if self._ascii else " · "
        fields = _counts(snapshot)
        # If space is short, drop zero counts first, then the least important ones.
        droppable = [field for field in fields if field.endswith(" 0")]
        droppable += [field for field in (fields[1], fields[2], fields[0]) if field not in droppable]
        while len(fields) > 1 and cells(between.join(fields)) + 1 > room:
            fields.remove(droppable.pop(0))
        line = _clip(" " + between.join(fields), room)
        error = _last_error(snapshot)
        padding = room - cells(line) - cells(error)
        if not self._colored:
            return line + (" " * min(padding, 9) + error if error and padding >= 2 else "")
        painted = line
        for word, paint, count in (("dead", _RED, snapshot.dead), ("retrying", _YELLOW, snapshot.retrying)):
            if count:
                painted = painted.replace(f"{word} {count:,}", f"{paint}{word} {count:,}{_RESET}")
        return painted + (f"{' ' * min(padding, 9)}{_DIM}{error}{_RESET}" if error and padding >= 2 else "")

    def _fit(self, fields: list[str], room: int) -> str:
        fields = [field for field in fields if field]
        while len(fields) > 1 and cells("   ".join(fields)) > room:
            fields.pop()
        return _clip("   ".join(fields), room)


class _Line(_Base):
    """One line that is rewritten from its start. All notebook front ends (JupyterLab, VS Code) support that."""

    def __init__(self, writer: _Writer, clock: Callable[[], float]) -> None:
        super().__init__(writer, clock)
        self._drawn_at = float("-inf")
        self._length = 0

    def show(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        if self._clock() - self._drawn_at >= LINE_SECONDS:
            self._drawn_at = self._clock()
            self._draw(self._text(snapshot))

    def say(self, text: str) -> None:
        self._draw(printable(text), end="\n")

    def end(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        self._draw(self._text(snapshot, ended=True), end="\n")

    def _text(self, snapshot: RunSnapshot, *, ended: bool = False) -> str:
        percent = f"{_tenths(snapshot.percent):.1f}%" if snapshot.percent is not None else ""
        state = "" if ended else _state(snapshot, self._estimator)
        counts = [field for field in _counts(snapshot) if not field.endswith(" 0")]
        fields = [percent, _position(snapshot), pace(self._estimator.rate), state, " · ".join(counts)]
        return "   ".join(field for field in [*fields, _last_error(snapshot)] if field)

    def _draw(self, text: str, *, end: str = "") -> None:
        self._write(f"\r{text:<{self._length}}{end}")  # padded, because the previous text may be longer
        self._length = 0 if end else len(text)


class _Plain(_Base):
    """Lines for a log: few, timestamped, without control characters."""

    def __init__(self, writer: _Writer, clock: Callable[[], float]) -> None:
        super().__init__(writer, clock)
        self._printed_at = clock()
        self._printed: RunSnapshot | None = None
        self._stalled = False

    def show(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        stalled = self._estimator.stalled is not None
        self._printed = self._printed or snapshot
        if stalled != self._stalled or (self._is_time() and self._has_moved(snapshot, self._printed)):
            self._stalled = stalled
            self._print(snapshot)

    def say(self, text: str) -> None:
        self._write(f"{_now()} {printable(text)}\n")

    def end(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        self._print(snapshot, ended=True)

    def _is_time(self) -> bool:
        return self._clock() - self._printed_at >= PLAIN_SECONDS

    @staticmethod
    def _has_moved(snapshot: RunSnapshot, printed: RunSnapshot) -> bool:
        """Return whether progress is at least 5 %, or any where there is no percentage."""
        if snapshot.percent is None or printed.percent is None:
            return snapshot.position != printed.position
        return snapshot.percent - printed.percent >= PLAIN_PERCENT

    def _print(self, snapshot: RunSnapshot, *, ended: bool = False) -> None:
        percent = f"{_tenths(snapshot.percent):.1f}%" if snapshot.percent is not None else ""
        state = "" if ended else _state(snapshot, self._estimator)
        fields = [percent, _position(snapshot), pace(self._estimator.rate), state]
        fields += [*_counts(snapshot), _last_error(snapshot)]
        self._write(f"{_now()} {'  '.join(field for field in fields if field)}\n")
        self._printed_at, self._printed = self._clock(), snapshot


class _Json(_Base):
    """NDJSON with the keys of `PROGRESS_KEYS`."""

    def __init__(self, writer: _Writer, clock: Callable[[], float]) -> None:
        super().__init__(writer, clock)
        self._printed_at = float("-inf")

    def begin(self, text: str) -> None:
        self._put("begin", message=text)

    def show(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        if self._clock() - self._printed_at >= JSON_SECONDS:
            self._printed_at = self._clock()
            self._progress("progress", snapshot)

    def say(self, text: str) -> None:
        self._put("message", message=text)

    def end(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        self._progress("end", snapshot)

    def conclude(self, lines: Sequence[str], facts: Mapping[str, object]) -> None:
        self._put("summary", message="\n".join(lines), **facts)

    def _progress(self, event: str, snapshot: RunSnapshot) -> None:
        estimator = self._estimator
        forecast, percent, rate, silence = estimator.forecast, snapshot.percent, estimator.rate, estimator.stalled
        self._put(
            event, total=snapshot.total, kept=snapshot.kept, done=snapshot.position, running=snapshot.running,
            retrying=snapshot.retrying, dead=snapshot.dead, failures=snapshot.failures,
            percent=None if percent is None else round(percent, 2), rate=None if rate is None else round(rate, 3),
            eta_seconds=round(forecast.seconds, 1) if forecast else None,
            eta_low_seconds=round(forecast.low, 1) if forecast else None,
            eta_high_seconds=round(forecast.high, 1) if forecast else None,
            stalled_seconds=None if silence is None else round(silence, 1), last_error=snapshot.last_error or None,
            last_error_count=snapshot.last_error_count, paused_by=snapshot.paused_by or None,
            waits_seconds=round(snapshot.wait_seconds, 1) or None, wait_reason=snapshot.wait_reason or None,
            postponed=snapshot.postponed,
        )  # fmt: skip

    def _put(self, event: str, **facts: object) -> None:
        self._write(json.dumps({"t": _now(), "event": event, **facts}) + "\n")


class _Silent(_Base):
    """Shows only the final summary."""

    def show(self, snapshot: RunSnapshot) -> None:
        """Show nothing."""

    def end(self, snapshot: RunSnapshot) -> None:
        """Show nothing."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
