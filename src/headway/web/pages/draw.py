"""Charts as SVG, rendered on the server so that pages are complete without a script.

Horizontal positions are percentages and text is never scaled, so a chart fits any width. Colours are classes of the style
sheet, because the content security policy forbids inline styles. A chart has a sentence as its label; one that only repeats
an adjacent number is hidden from screen readers.

The attribute ``data-chart`` holds the values of a chart as JSON. The script shows them as tooltips (`static/extra.js`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

from headway.core.text import took

#: Minimum width of a bar segment, of 1000, so that 64 of 120,000 stay visible.
LEAST = 5
#: Maximum points of a sparkline.
POINTS = 20


def _svg(
    content: str, *, cls: str, height: int, label: str = "", box: str = "", data: object = None, count: int = 0
) -> Markup:
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    view = f' viewBox="{box}" preserveAspectRatio="none"' if box else ""
    if data is not None:
        text = json.dumps(data, separators=(",", ":")).replace("&", "&amp;").replace("'", "&#39;")
        view += f" data-count={count} data-chart='{text}'"
    return Markup(f'<svg class="{cls}" {role} height="{height}"{view}>{content}</svg>')  # noqa: S704 - escaped above


def stamp(seconds: float, form: str = "%H:%M") -> Markup:
    """Return a time of an axis in UTC. The script rewrites it when the page shows local time."""
    text = f"{datetime.fromtimestamp(seconds, UTC):{form}}"
    return Markup(f"<tspan data-t={seconds:.0f}>{text}</tspan>")  # noqa: S704 - digits and names of days


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def spark(
    values: Sequence[float], *, label: str = "", height: int = 20, top: float | None = None, cls: str = "sa"
) -> Markup:
    """Draw a sparkline; nothing for less than two values.

    ``top`` is the upper end of the scale, which rows of a table share; by default the maximum. More than `POINTS` values
    are averaged in groups.
    """
    if len(values) < 2:
        return Markup("")
    if (step := -(-len(values) // POINTS)) > 1:
        ends = range(len(values), step - 1, -step)
        values = [sum(values[end - step : end]) / step for end in ends][::-1]
    width, most = 120, (max(values) if top is None else top) or 1
    xs = [round(i * width / (len(values) - 1)) for i in range(len(values))]
    ys = [round(height - 2 - min(1.0, value / most) * (height - 4)) for value in values]
    path, last = f"M-9 {height + 9}V{ys[0]}H0", 0
    for at in range(1, len(ys)):
        if at + 1 < len(ys) and ys[at] == ys[at + 1] == ys[last]:
            continue  # draw a flat stretch as one line
        path += f"L{xs[at]} {ys[at]}" if ys[at] != ys[last] else f"H{xs[at]}"
        last = at
    drawn = f'<path class="ln {cls}" d="{path}h9V{height + 9}"/>'
    return _svg(drawn, cls="b", height=height, label=label, box=f"0 0 {width} {height}")


def bins(counts: Sequence[int], *, label: str, height: int = 20) -> Markup:
    """Draw counts over time as columns on a base line, which shows bursts."""
    most = max(counts, default=0) or 1
    path = "".join(
        f"M{i * 5} {height}v-{max(2, round(n / most * (height - 1)))}h4V{height}z" for i, n in enumerate(counts) if n
    )
    width = len(counts) * 5
    drawn = f'<path class="f-dead" d="{path}"/><path class="st-line" d="M0 {height}H{width}"/>'
    return _svg(drawn, cls="b", height=height, label=label, box=f"0 0 {width} {height}")


def bar(parts: Mapping[str, int], total: int, *, height: int = 10, label: str = "") -> Markup:
    """Draw a stacked bar of ``parts`` (kept, done, retry, dead) in the given order; the rest is pending."""
    drawn, x, total = f'<rect class="f-pend" width="1000" height="{height}"/>', 0.0, max(1, total)
    for name, count in parts.items():
        if count <= 0:
            continue
        width = max(LEAST, min(1000.0, count / total * 1000))
        x = min(x, 1000 - width)
        y, tall = {"retry": (height * 0.4, height * 0.6), "dead": (-2, height + 4)}.get(name, (0, height))
        left, top = f' x="{_n(x)}"' if x else "", f' y="{_n(y)}"' if y else ""
        drawn += f'<rect class="f-{name}"{left}{top} width="{_n(width)}" height="{_n(tall)}"/>'
        x += width
        if name in ("kept", "done") and x < 1000:
            drawn += f'<rect class="f-bg" x="{_n(x)}" width="2" height="{height}"/>'
            x += 2
    return _svg(drawn, cls="bar", height=height, label=label, box=f"0 0 1000 {height}")


def share(part: float, whole: float, *, cls: str = "done", height: int = 8) -> Markup:
    """Draw a share as a thin bar."""
    width = 100 * part / whole if whole else 0
    drawn = f'<rect class="f-line" width="100%" height="{height}"/>'
    drawn += f'<rect class="f-{cls}" width="{_n(width)}%" height="{height}"/>'
    return _svg(drawn, cls="bar", height=height)


def _nice(value: float) -> float:
    """Return the smallest round number that is at least ``value``."""
    if value <= 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return float(next(step * power for step in (1, 1.5, 2, 3, 4, 6, 8, 10) if step * power >= value))


class Line(NamedTuple):
    """One line of a chart: its name, its class in the style sheet, and its values."""

    name: str
    cls: str
    values: Sequence[int]


def chart(
    lines: Iterable[tuple[str, str, Sequence[int]]],
    ticks: Sequence[tuple[float, str]],
    *,
    per: str,
    label: str,
    start: int,
    step: int,
    height: int = 168,
    marks: Sequence[datetime] = (),
) -> Markup:
    """Draw counts over time; the class ``sa`` fills the area below a line.

    ``ticks`` are (percent, text) of the time axis. ``start`` is the first point, in minutes since the epoch, and ``step``
    the minutes between points. ``marks`` are numbered from 1.
    """
    named = [Line(*line) for line in lines]
    most = _nice(max([1, *(value for line in named for value in line.values)]))
    base, inner = height - 20, height - 28
    drawn = _grid(most, per, base, inner, (0, 0.5, 1)) + _axis(ticks, height - 3)
    paths = ""
    for line in named:
        count = len(line.values)
        if count < 2 or not (line.cls == "sa" or any(line.values)):
            continue
        points = " ".join(
            f"{round(i * 1000 / (count - 1))},{round(inner - value / most * inner + 1)}"
            for i, value in enumerate(line.values)
        )
        if line.cls == "sa":
            points = f"-9,{inner + 9} -9,{inner + 1} {points} 1009,{inner + 1} 1009,{inner + 9}"
        paths += f'<polyline class="ln {line.cls}" points="{points}"/>'
    drawn += (
        f'<svg class="b" y="7" width="100%" height="{inner + 2}" viewBox="0 0 1000 {inner + 2}" '
        f'preserveAspectRatio="none">{paths}</svg>'
    )
    last = max(len(line.values) for line in named) - 1
    drawn += _numbered(Span(start * 60, (start + step * last) * 60), marks, 9, base)
    data = {
        "t": start * 60,
        "s": step * 60,
        "n": [line.name for line in named],
        "v": [_sparse(line.values) for line in named],
    }
    return _svg(drawn, cls="ch", height=height, label=label, data=data, count=max(len(line.values) for line in named))


def _numbered(span: Span, marks: Sequence[datetime], top: float, base: float) -> str:
    """Draw a line with a number at each mark. Numbers of close marks stand below each other."""
    drawn, last, low = "", -math.inf, 0
    for no, mark in enumerate(marks, 1):
        x = span.at(mark)
        low = low + 1 if x - last < 2.5 else 0
        last = x
        drawn += (
            f'<line class="mk" x1="{_n(x)}%" x2="{_n(x)}%" y1="{top}" y2="{base}"/>'
            f'<text class="tx in {"te" if x > 97 else ""}" x="{_n(x)}%" dx="3" y="{top + 9 + 12 * (low % 8)}">{no}</text>'
        )
    return drawn


def _sparse(values: Sequence[int]) -> object:
    """Return values for the script: mostly empty ones as a map from index to value, which is shorter."""
    if 2 * sum(map(bool, values)) > len(values):
        return list(values)
    return {i: value for i, value in enumerate(values) if value}


def _grid(most: float, per: str, base: float, inner: float, parts: Sequence[float]) -> str:
    """Draw horizontal grid lines with their values; the top one has the unit."""
    drawn = ""
    for part in parts:
        y = base - inner * part
        drawn += f'<line class="gr" x1="0" x2="100%" y1="{_n(y)}" y2="{_n(y)}"/>'
        if part and (most > 1 or part == 1):
            text = f"{most * part:,.0f}" if most * part >= 2 or part == 1 else f"{most * part:g}"
            drawn += f'<text class="tx" x="0" y="{_n(y - 4)}">{text}{f" {per}" if part == 1 else ""}</text>'
    return drawn


def _axis(ticks: Sequence[tuple[float, str]], y: float, *, apart: float = 0) -> str:
    """Draw the labels of an axis. A label less than ``apart`` percent after the previous one is left out."""
    drawn, last = "", -math.inf
    for at, text in ticks:
        cls = "te" if at > 90 else "tm" if at > 10 else ""
        if at - last < apart:
            continue
        last = at
        drawn += f'<text class="tx {cls}" x="{_n(at)}%" y="{_n(y)}">{escape(text)}</text>'
    return drawn


def histogram(
    bins: Sequence[tuple[float, int]], marks: Sequence[tuple[float, str]], *, label: str, what: str = "items"
) -> Markup:
    """Draw counts by duration on a logarithmic axis, with a y-axis in ``what``.

    ``bins`` are (lower bound in seconds, count), ``marks`` are (seconds, text).
    """
    most, count = _nice(max((n for _, n in bins), default=1)), len(bins)
    shapes = "".join(
        f"M{i * 20 + 1} 80V{80 - max(2, round(n / most * 78))}h18V80z" for i, (_, n) in enumerate(bins) if n
    )
    low, high = bins[0][0], bins[-1][0] * (bins[-1][0] / bins[-2][0] if count > 1 else 2)

    def at(seconds: float) -> float:
        return min(99.0, max(0.0, 100 * math.log(max(seconds, low) / low) / math.log(high / low)))

    drawn = (
        f"{_grid(most, what, 106, 78, (0, 0.5, 1))}"
        f'<svg y="26" width="100%" height="80" viewBox="0 0 {count * 20} 80" preserveAspectRatio="none">'
        f'<path class="f-done" d="{shapes}"/></svg>'
    )
    ticks = decades(low, high)
    drawn += _axis([(at(seconds), _short(seconds)) for seconds in ticks], 122, apart=12)
    drawn += "".join(
        f'<line class="st-mut" x1="{_n(at(seconds))}%" x2="{_n(at(seconds))}%" y1="106" y2="110"/>' for seconds in ticks
    )
    for place, (seconds, text) in enumerate(marks):
        x = at(seconds)
        # Marks near the left end are labelled above the y-axis.
        y, anchor = 11 + 13 * place if x > 30 else 8, "te" if x > 80 else ""
        drawn += (
            f'<line class="st-ink" x1="{_n(x)}%" x2="{_n(x)}%" y1="{y + 3}" y2="106"/>'
            f'<text class="tx in {anchor}" x="{_n(x + (-1 if anchor else 1))}%" y="{y}">{escape(text)}</text>'
        )
    bounds = [*(bound for bound, _ in bins), high]
    names = [f"{took(left)} to {took(right)}" for left, right in pairwise(bounds)]
    data = {"l": names, "n": [what], "v": [_sparse([n for _, n in bins])]}
    return _svg(drawn, cls="ch", height=126, label=label, data=data, count=len(bins))


#: Round durations in seconds, about a factor of three apart. Every other one is used when the range is wide.
_NAMED = (
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10_800, 36_000, 86_400, 604_800
)  # fmt: skip


def decades(low: float, high: float) -> list[float]:
    """Return the round durations within a range: every other one if these are at least three."""
    coarse = [one for one in _NAMED[::2] if low <= one <= high]
    return coarse if len(coarse) >= 3 else [one for one in _NAMED if low <= one <= high]


class Axis:
    """A logarithmic axis of durations for several rows, between two round durations."""

    def __init__(self, seconds: Iterable[float]) -> None:
        found = list(seconds) or [0.1, 10.0]
        self.low = max((one for one in _NAMED if one <= min(found)), default=_NAMED[0])
        self.high = min(
            (one for one in _NAMED if one >= max(found) and one > self.low), default=max(_NAMED[-1], *found)
        )

    def at(self, seconds: float) -> float:
        return min(100.0, max(0.0, 100 * math.log(max(seconds, self.low) / self.low) / math.log(self.high / self.low)))

    @property
    def ticks(self) -> list[float]:
        return decades(self.low, self.high)


def spread(axis: Axis, p50: float, p95: float, *, label: str) -> Markup:
    """Draw p50 as a dot and p95 as the end of a line."""
    left, right = axis.at(p50), axis.at(p95)
    drawn = "".join(
        f'<line class="gr" x1="{_n(axis.at(seconds))}%" x2="{_n(axis.at(seconds))}%" y1="1" y2="13"/>'
        for seconds in axis.ticks
    )
    drawn += (
        f'<line class="st-done" stroke-width="2" x1="{_n(left)}%" x2="{_n(right)}%" y1="7" y2="7"/>'
        f'<line class="st-done" stroke-width="2" x1="{_n(right)}%" x2="{_n(right)}%" y1="3" y2="11"/>'
        f'<circle class="f-done" cx="{_n(left)}%" cy="7" r="4"/>'
    )
    return _svg(drawn, cls="ch spr", height=14, label=label)


def scale(axis: Axis) -> Markup:
    """Draw the axis itself, for the head of a column."""
    return _svg(_axis([(axis.at(one), _short(one)) for one in axis.ticks], 11, apart=45), cls="ch", height=13)


def _short(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.0f} h"


class Span:
    """Maps times to percentages of a chart's width."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.length = start, max(1.0, end - start)

    def at(self, moment: float | datetime) -> float:
        seconds = moment.timestamp() if isinstance(moment, datetime) else moment
        return min(100.0, max(0.0, 100 * (seconds - self.start) / self.length))


class Forecast(NamedTuple):
    """The expected end of a job: earliest, likely and latest, in seconds since the epoch."""

    early: float
    likely: float
    late: float


class Timeline(NamedTuple):
    """All runs of a job on one time axis."""

    span: Span
    #: (start, end, count, class) of each interval.
    columns: Sequence[tuple[float, float, int, str]]
    #: (start, end, text) of the times without a run.
    gaps: Sequence[tuple[float, float, str]]
    #: (time, text, second line) of starts and ends.
    events: Sequence[tuple[float, str, str]]
    #: The current time, while a run is active.
    now: float | None
    forecast: Forecast | None
    per: str
    label: str
    #: Times of the numbered marks.
    marks: Sequence[datetime] = ()

    def draw(self) -> Markup:
        """Draw the timeline."""
        most = _nice(max([count for *_, count, _ in self.columns], default=1))
        drawn = (
            '<defs><pattern id="gap" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path class="gr" d="M0 0v6"/></pattern></defs>'
        )
        drawn += self._gaps() + self._columns(most) + _grid(most, self.per, _BOTTOM, _BASE, (0.5, 1))
        drawn += _numbered(self.span, self.marks, _TOP, _BOTTOM)
        drawn += self._forecast() + f'<line class="gr" x1="0" x2="100%" y1="{_BOTTOM}" y2="{_BOTTOM}"/>'
        if self.now is not None:
            here = self.span.at(self.now)
            drawn += (
                f'<line class="st-ink" x1="{_n(here)}%" x2="{_n(here)}%" y1="14" y2="{_BOTTOM}"/>'
                f'<text class="tx in {"te" if here > 92 else "tm"}" x="{_n(here)}%" y="10">now, {stamp(self.now)}</text>'
            )
        end, step = self.columns[0][1], self.columns[-1][0] - self.columns[-2][0] if len(self.columns) > 1 else 60
        first = end - step  # the first column may begin later than its interval
        x = [round(self.span.at(first + step / 2), 2), round(100 * step / self.span.length, 4)]
        data = {
            "t": round(first),
            "s": round(step),
            "x": x,
            "n": ["items done"],
            "v": [_sparse([n for *_, n, _ in self.columns])],
        }
        return _svg(
            drawn + self._events(), cls="ch", height=_BOTTOM + 38, label=self.label, data=data, count=len(self.columns)
        )

    def _gaps(self) -> str:
        drawn = ""
        for start, end, text in self.gaps:
            left, right = self.span.at(start), self.span.at(end)
            drawn += f'<rect fill="url(#gap)" x="{_n(left)}%" y="{_TOP}" width="{_n(right - left)}%" height="{_BASE}"/>'
            if right - left > 6:
                cls = "tx tm wide" if right - left > 9 else "tx tm wide nt"  # hidden on narrow screens
                y = _TOP + _BASE // 2
                drawn += f'<text class="{cls}" x="{_n((left + right) / 2)}%" y="{y}">{escape(text)}</text>'
        return drawn

    def _columns(self, most: float) -> str:
        paths: dict[str, str] = {}
        at: dict[str, int] = {}
        for start, end, count, cls in self.columns:
            if count:
                left, right = round(20 * self.span.at(start)), round(20 * self.span.at(end))
                tall, across = max(1, round(_BASE * count / most)), max(1, right - left - 1)
                # Relative steps along the base line keep the path short.
                step = f"h{left - at[cls]}" if cls in at else f"M{left} {_BASE}"
                paths[cls] = f"{paths.get(cls, '')}{step}v-{tall}h{across}v{tall}"
                at[cls] = left + across
        inner = "".join(f'<path class="f-{cls}" d="{path}"/>' for cls, path in paths.items())
        box = f'viewBox="0 0 2000 {_BASE}" preserveAspectRatio="none"'
        return f'<svg y="{_TOP}" width="100%" height="{_BASE}" {box}>{inner}</svg>'

    def _forecast(self) -> str:
        if self.forecast is None or self.now is None:
            return ""
        left, middle, right = (self.span.at(moment) for moment in self.forecast)
        return (
            f'<rect class="ar" x="{_n(left)}%" y="{_TOP}" width="{_n(max(0.4, right - left))}%" height="{_BASE}"/>'
            f'<line class="st-done da" x1="{_n(middle)}%" x2="{_n(middle)}%" y1="{_TOP}" y2="{_BOTTOM}"/>'
        )

    def _events(self) -> str:
        drawn, taken, narrow = "", -100.0, -100.0
        for moment, text, more in self.events:
            place = self.span.at(moment)
            drawn += f'<line class="st-mut" x1="{_n(place)}%" x2="{_n(place)}%" y1="{_BOTTOM}" y2="{_BOTTOM + 6}"/>'
            # Labels of ends stand left of their mark, those of starts right. Overlapping ones are left out, more of them
            # on a phone; the table below the chart has all.
            side = "te" if place > 88 or (place > 10 and "started" not in text and "resumed" not in text) else ""
            if (place - 9 if side else place) < taken:
                continue
            taken = place if side else place + 9
            wide = "wide" if (place - 24 if side else place) < narrow else ""
            narrow = narrow if wide else place if side else place + 24
            drawn += (
                f'<text class="tx in {side} {wide}" x="{_n(place)}%" y="{_BOTTOM + 19}">{escape(text)}</text>'
                f'<text class="tx wide {side}" x="{_n(place)}%" y="{_BOTTOM + 33}">{escape(more)}</text>'
            )
        return drawn


#: Geometry of a timeline in pixels: height of the columns, space above, and the base line.
_BASE, _TOP = 116, 22
_BOTTOM = _BASE + _TOP


# ---------------------------------------------------------------------------------------------------------------------
# The item map


def item_map(
    bases: Sequence[tuple[str, int]],
    marks: Mapping[str, Iterable[int]],
    *,
    columns: int,
    cell: int,
    cls: str,
    name: str,
    label: str,
) -> Markup:
    """Draw one cell per group of items.

    ``bases`` are consecutive runs of (kept, done or pending, number of cells). ``marks`` are the cells with retrying,
    processing or dead items. Runs of cells share a path, so a million items take 2 KB.
    """
    count = sum(length for _, length in bases)
    rows, width = -(-count // columns), columns * 10
    paths: dict[str, str] = {}
    start = 0
    for base, length in bases:
        paths[base] = paths.get(base, "") + _cells(range(start, start + length), columns, cell)
        start += length
    drawn = "".join(f'<path class="f-{base}" d="{path}"/>' for base, path in paths.items() if path)
    for kind in ("retry", "run", "dead"):
        if path := _cells(sorted(marks.get(kind, ())), columns, cell):
            drawn += f'<path fill="url(#{name}-{kind})" d="{path}"/>'
    middle = cell / 2
    patterns = {
        "grid": f'<path class="st-bg" stroke-width="1.4" d="M0 0H10V{cell}H0z"/>',
        "dead": f'<rect class="f-dead" width="10" height="{cell}"/><path class="st-bg" stroke-width="1.4" '
        f'd="M3 {middle - 2:g}l4 4m0-4l-4 4"/>',
        "retry": f'<path class="f-retry" d="M10 {cell - 10}V{cell}H0z"/>',
        "run": f'<circle class="f-bg st-run" stroke-width="1.6" cx="5" cy="{middle:g}" r="2.6"/>',
    }
    defs = "".join(
        f'<pattern id="{name}-{kind}" width="10" height="{cell}" patternUnits="userSpaceOnUse">{inner}</pattern>'
        for kind, inner in patterns.items()
    )
    drawn = (
        f'<defs>{defs}</defs>{drawn}<rect fill="url(#{name}-grid)" width="{width}" height="{rows * cell}"/>'
        f'<rect class="cur" width="10" height="{cell}" visibility="hidden"/>'
    )
    return Markup(  # noqa: S704 - the label is escaped, everything else is numbers
        f'<svg class="{cls}" role="img" aria-label="{escape(label)}" data-map="{columns}" data-h="{cell}" '
        f'viewBox="0 0 {width} {rows * cell}">{drawn}</svg>'
    )


def _cells(cells: Sequence[int], columns: int, cell: int) -> str:
    """Return a path for ascending cells, with one rectangle per run within a row or per block of whole rows."""
    path, at, count = "", 0, len(cells)
    while at < count:
        first = cells[at]
        end = at
        while end + 1 < count and cells[end + 1] == cells[end] + 1:
            end += 1
        last = cells[end] + 1  # first .. last-1 is one run
        while first < last:
            row, column = divmod(first, columns)
            whole = (last - first) // columns if column == 0 else 0
            if whole:
                path += f"M0 {row * cell}h{columns * 10}v{whole * cell}H0z"
                first += whole * columns
                continue
            length = min(last - first, columns - column)
            path += f"M{column * 10} {row * cell}h{length * 10}v{cell}h-{length * 10}z"
            first += length
        at = end + 1
    return path
