"""Pictures as SVG, drawn here so that a page is whole without a script.

Horizontal places are percentages and text is never scaled, so a picture fits any width. No element has a ``style``:
colours are classes of the style sheet, because the content security policy forbids anything inline. Every picture that
says something has a sentence as its label; one that repeats what stands beside it is hidden from a screen reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from markupsafe import Markup, escape

#: The narrowest part of a bar, of 1000: 64 of 120,000 stay visible.
LEAST = 5
#: The most points of a small line.
POINTS = 40


def _svg(content: str, *, cls: str, height: int, label: str = "", box: str = "") -> Markup:
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    view = f' viewBox="{box}" preserveAspectRatio="none"' if box else ""
    return Markup(f'<svg class="{cls}" {role} height="{height}"{view}>{content}</svg>')  # noqa: S704 - escaped above


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def spark(
    values: Sequence[float], *, label: str = "", height: int = 20, top: float | None = None, cls: str = "sa"
) -> Markup:
    """A line of a number's past; nothing when there is no past. Of many values neighbours are taken together, from the
    last one back: more points than pixels take only room."""
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
            continue  # a flat stretch is one line
        path += f"L{xs[at]} {ys[at]}" if ys[at] != ys[last] else f"H{xs[at]}"
        last = at
    drawn = f'<path class="ln {cls}" d="{path}h9V{height + 9}"/>'
    return _svg(drawn, cls="b", height=height, label=label, box=f"0 0 {width} {height}")


def bins(counts: Sequence[int], *, label: str, height: int = 20) -> Markup:
    """How many in each part of a stretch of time, as columns on a line: what came in bursts is seen as bursts."""
    most = max(counts, default=0) or 1
    path = "".join(
        f"M{i * 5} {height}v-{max(2, round(n / most * (height - 1)))}h4V{height}z" for i, n in enumerate(counts) if n
    )
    width = len(counts) * 5
    drawn = f'<path class="f-dead" d="{path}"/><path class="st-line" d="M0 {height}H{width}"/>'
    return _svg(drawn, cls="b", height=height, label=label, box=f"0 0 {width} {height}")


def bar(parts: Mapping[str, int], total: int, *, height: int = 10, label: str = "") -> Markup:
    """``parts`` of ``total`` in the order given (kept, done, retrying, dead); what is left is pending."""
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
    """A part of a whole as a thin bar beside its number."""
    width = 100 * part / whole if whole else 0
    drawn = f'<rect class="f-line" width="100%" height="{height}"/>'
    drawn += f'<rect class="f-{cls}" width="{_n(width)}%" height="{height}"/>'
    return _svg(drawn, cls="bar", height=height)


def _nice(value: float) -> float:
    """The next round number from ``value`` on: 1, 2, 3 or 5 times a power of ten."""
    if value <= 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return float(next(step * power for step in (1, 1.5, 2, 3, 4, 6, 8, 10) if step * power >= value))


def chart(
    done: Sequence[int],
    failed: Sequence[int],
    ticks: Sequence[tuple[float, str]],
    *,
    per: str,
    label: str,
    height: int = 168,
) -> Markup:
    """What succeeded as an area, what failed as a dashed line, over time. ``ticks``: (percent, text) of the time axis."""
    most = _nice(max([*done, *failed, 1]))
    base, inner = height - 20, height - 28
    drawn = ""
    for part in (0, 0.5, 1):
        y = base - inner * part
        drawn += f'<line class="gr" x1="0" x2="100%" y1="{_n(y)}" y2="{_n(y)}"/>'
        if part and (most > 1 or part == 1):
            text = f"{most * part:,.0f}" if most * part >= 2 or part == 1 else f"{most * part:g}"
            drawn += f'<text class="tx" x="0" y="{_n(y - 4)}">{text}{f" {per}" if part == 1 else ""}</text>'
    drawn += _axis(ticks, height - 3)
    lines = ""
    for values, cls in ((done, "ln sa"), (failed, "ln bd")):
        if len(values) < 2 or (cls == "ln bd" and not any(values)):
            continue
        points = " ".join(
            f"{round(i * 1000 / (len(values) - 1))},{_n(inner - value / most * inner + 1)}"
            for i, value in enumerate(values)
        )
        if cls == "ln sa":
            points = f"-9,{inner + 9} -9,{inner + 1} {points} 1009,{inner + 1} 1009,{inner + 9}"
        lines += f'<polyline class="{cls}" points="{points}"/>'
    drawn += (
        f'<svg class="b" y="7" width="100%" height="{inner + 2}" viewBox="0 0 1000 {inner + 2}" '
        f'preserveAspectRatio="none">{lines}</svg><line class="st-ink x" y1="8" y2="{base}" visibility="hidden"/>'
    )
    return _svg(drawn, cls="ch", height=height, label=label)


def _axis(ticks: Sequence[tuple[float, str]], y: float, *, apart: float = 0) -> str:
    """The names of an axis. What is less than ``apart`` percent from the one before is left out in a narrow column."""
    drawn, last = "", -math.inf
    for at, text in ticks:
        cls = "te" if at > 96 else "tm" if at > 4 else ""
        if at - last < apart:
            cls += " nt"
        else:
            last = at
        drawn += f'<text class="tx {cls}" x="{_n(at)}%" y="{_n(y)}">{escape(text)}</text>'
    return drawn


def histogram(
    bins: Sequence[tuple[float, int]], marks: Sequence[tuple[float, str]], *, label: str, what: str = "items"
) -> Markup:
    """Counts by duration on a logarithmic axis. ``bins``: (lower bound in seconds, count); ``marks``: (seconds, text)."""
    most, count = max((n for _, n in bins), default=1) or 1, len(bins)
    shapes = "".join(
        f"M{i * 20 + 1} 80V{80 - max(2, round(n / most * 78))}h18V80z" for i, (_, n) in enumerate(bins) if n
    )
    low, high = bins[0][0], bins[-1][0] * (bins[-1][0] / bins[-2][0] if count > 1 else 2)

    def at(seconds: float) -> float:
        return min(99.0, max(0.0, 100 * math.log(max(seconds, low) / low) / math.log(high / low)))

    drawn = (
        '<line class="gr" x1="0" x2="100%" y1="106" y2="106"/>'
        f'<svg y="26" width="100%" height="80" viewBox="0 0 {count * 20} 80" preserveAspectRatio="none">'
        f'<path class="f-done" d="{shapes}"/></svg>'
    )
    ticks = decades(low, high)
    drawn += _axis([(at(seconds), _short(seconds)) for seconds in ticks], 122)
    drawn += "".join(
        f'<line class="st-mut" x1="{_n(at(seconds))}%" x2="{_n(at(seconds))}%" y1="106" y2="110"/>' for seconds in ticks
    )
    peak = max(range(count), key=lambda place: bins[place][1])
    placed = {round(at(seconds)) for seconds, _ in marks}
    side = 100 * (peak + 0.5) / count
    if all(abs(side - other) > 22 for other in placed):
        drawn += f'<text class="tx tm" x="{_n(side)}%" y="22">{bins[peak][1]:,} {escape(what)}</text>'
    for place, (seconds, text) in enumerate(marks):
        x = at(seconds)
        y, anchor = 11 + 13 * place, "te" if x > 80 else ""
        drawn += (
            f'<line class="st-ink" x1="{_n(x)}%" x2="{_n(x)}%" y1="{y + 3}" y2="106"/>'
            f'<text class="tx in {anchor}" x="{_n(x + (-1 if anchor else 1))}%" y="{y}">{escape(text)}</text>'
        )
    return _svg(drawn, cls="ch", height=126, label=label)


#: Durations that people name, about a factor of three apart; every other one is the coarse ladder.
_NAMED = (
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10_800, 36_000, 86_400, 604_800
)  # fmt: skip


def decades(low: float, high: float) -> list[float]:
    """Durations that people name between two, those of the coarse ladder if they are enough."""
    coarse = [one for one in _NAMED[::2] if low <= one <= high]
    return coarse if len(coarse) >= 3 else [one for one in _NAMED if low <= one <= high]


class Axis:
    """A logarithmic axis of durations that several rows share, from one that people name to another."""

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
    """Half take no longer than the dot, 19 of 20 no longer than the end of the line."""
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
    """The axis itself, as the head of a column."""
    ticks = axis.ticks
    shown = ticks[:: -(-len(ticks) // 4)]
    return _svg(_axis([(axis.at(seconds), _short(seconds)) for seconds in shown], 11, apart=45), cls="ch", height=13)


def _short(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.0f} h"


class Span:
    """A stretch of time as percentages of a picture's width."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.length = start, max(1.0, end - start)

    def at(self, moment: float | datetime) -> float:
        seconds = moment.timestamp() if isinstance(moment, datetime) else moment
        return min(100.0, max(0.0, 100 * (seconds - self.start) / self.length))


def timeline(
    span: Span,
    columns: Sequence[tuple[float, float, int, str]],
    gaps: Sequence[tuple[float, float, str]],
    events: Sequence[tuple[float, str, str]],
    *,
    now: float | None,
    now_text: str,
    forecast: tuple[float, float, float, str] | None,
    per: str,
    label: str,
) -> Markup:
    """All runs of a job over one axis: columns (from, to, count, class), gaps while nothing ran, what happened below,
    and while it runs where it stands now and the window in which it will be ready (earliest, likely, latest, text)."""
    base, top = 116, 22
    most = _nice(max([count for *_, count, _ in columns], default=1))
    drawn = (
        '<defs><pattern id="gap" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path class="gr" d="M0 0v6"/></pattern></defs>'
    )
    scale = ""
    for part in (0.5, 1):
        y = top + base - base * part
        drawn += f'<line class="gr" x1="0" x2="100%" y1="{_n(y)}" y2="{_n(y)}"/>'
        text = f"{most * part:,.0f}" if (most * part) >= 2 or part == 1 else f"{most * part:g}"
        scale += f'<text class="tx" x="0" y="{_n(y - 4)}">{text}{f" {per}" if part == 1 else ""}</text>'
    for start, end, text in gaps:
        left, right = span.at(start), span.at(end)
        drawn += f'<rect fill="url(#gap)" x="{_n(left)}%" y="{top}" width="{_n(right - left)}%" height="{base}"/>'
        if right - left > 6:
            cls = "tx tm wide" if right - left > 9 else "tx tm wide nt"  # a tablet has no room for the words
            drawn += f'<text class="{cls}" x="{_n((left + right) / 2)}%" y="{top + base // 2}">{escape(text)}</text>'
    paths: dict[str, str] = {}
    at: dict[str, int] = {}
    for start, end, count, cls in columns:
        if count:
            left, right = round(20 * span.at(start)), round(20 * span.at(end))
            tall, across = max(1, round(base * count / most)), max(1, right - left - 1)
            # One after another along the base line: a column is four short steps from where the last one ended.
            step = f"h{left - at[cls]}" if cls in at else f"M{left} {base}"
            paths[cls] = f"{paths.get(cls, '')}{step}v-{tall}h{across}v{tall}"
            at[cls] = left + across
    inner = "".join(f'<path class="f-{cls}" d="{path}"/>' for cls, path in paths.items())
    box = f'viewBox="0 0 2000 {base}" preserveAspectRatio="none"'
    drawn += f'<svg y="{top}" width="100%" height="{base}" {box}>{inner}</svg>{scale}'
    if forecast is not None and now is not None:
        early, likely, late, _ = forecast
        left, right, middle = span.at(early), span.at(late), span.at(likely)
        drawn += (
            f'<rect class="ar" x="{_n(left)}%" y="{top}" width="{_n(max(0.4, right - left))}%" height="{base}"/>'
            f'<line class="st-done da" x1="{_n(middle)}%" x2="{_n(middle)}%" y1="{top}" y2="{top + base}"/>'
        )
    drawn += f'<line class="gr" x1="0" x2="100%" y1="{top + base}" y2="{top + base}"/>'
    if now is not None:
        here = span.at(now)
        side = "te" if here > 92 else "tm"
        drawn += (
            f'<line class="st-ink" x1="{_n(here)}%" x2="{_n(here)}%" y1="14" y2="{top + base}"/>'
            f'<text class="tx in {side}" x="{_n(here)}%" y="10">{escape(now_text)}</text>'
        )
    taken = narrow = -100.0
    for moment, text, more in events:
        place = span.at(moment)
        drawn += f'<line class="st-mut" x1="{_n(place)}%" x2="{_n(place)}%" y1="{top + base}" y2="{top + base + 6}"/>'
        # What ended stands before its mark, what began after it. A label that would lie on another is left out (the table
        # below has it); on a phone letters are wider, so more are left out there.
        side = "te" if place > 88 or (place > 10 and "started" not in text and "resumed" not in text) else ""
        if (place - 9 if side else place) < taken:
            continue
        taken = place if side else place + 9
        wide = "wide" if (place - 24 if side else place) < narrow else ""
        narrow = narrow if wide else place if side else place + 24
        drawn += (
            f'<text class="tx in {side} {wide}" x="{_n(place)}%" y="{top + base + 19}">{escape(text)}</text>'
            f'<text class="tx wide {side}" x="{_n(place)}%" y="{top + base + 33}">{escape(more)}</text>'
        )
    return _svg(drawn, cls="ch", height=top + base + 38, label=label)


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
    """One cell per group of items. ``bases``: (kept, done or pending, how many cells) one after the other; ``marks``: the
    cells in which some item is retrying, processing or dead. Runs of cells are one path: a million items take 2 KB."""
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
    """Cells, in rising order, as a path of few rectangles: runs within a row, and whole rows together."""
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
