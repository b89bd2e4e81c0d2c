"""Marks of charts: deploys, kills, pauses and changed settings, numbered in the chart and listed below it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from headway.views.history import Mark

#: Marks of one chart. The list below the chart tells how many earlier ones are left out.
MOST = 6
#: A chart of a job has the starts and ends of its runs beside its axis already.
_QUIET = frozenset({"started", "resumed", "ended"})


class ChartMarks(NamedTuple):
    """The newest marks of a chart, and the number of earlier ones."""

    marks: tuple[Mark, ...] = ()
    hidden: int = 0

    @property
    def times(self) -> list[datetime]:
        return [mark.at for mark in self.marks]


def marks_for(
    marks: Iterable[Mark], *, job: str | None = None, queue: str | None = None, most: int = MOST
) -> ChartMarks:
    """Select the marks that may explain a curve: of a job or a queue, or without either of everything."""
    found = [mark for mark in marks if mark.kind not in _QUIET and _is_about(mark, job, queue)]
    return ChartMarks(tuple(found[-most:]), max(0, len(found) - most))


def _is_about(mark: Mark, job: str | None, queue: str | None) -> bool:
    """Return whether a mark concerns the job or the queue. Deploys, settings and workers concern everything."""
    words = mark.text.split()
    named = words[1] if words[0] == "queue" and len(words) > 1 else None
    if queue is not None:
        return mark.job is None and named in (None, queue)
    return job is None or mark.job == job or (mark.job is None and named is None)
