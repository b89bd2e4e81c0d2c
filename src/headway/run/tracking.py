"""Make a plain loop resumable.

    for page in headway.track(pages, job="pages"):
        download(page)

An item is done when the loop asks for the next one. Whatever ends the loop, the same program resumes with the first
item that is not done.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TextIO, TypeVar

from headway.errors import InvalidInput, RetryLater
from headway.ledger import Done
from headway.run.display.display import Display, RunSnapshot
from headway.run.held_job import OpenItem, OpenJob
from headway.run.items import GivenItems
from headway.run.output.results import as_plain

T = TypeVar("T")

#: Items shorter than `SHORT_SECONDS` share a commit, at most `COMMIT_SECONDS` later.
SHORT_SECONDS = 0.02
COMMIT_SECONDS = 0.05
COMMIT_MOST = 1000
SHOW_SECONDS = 0.1


class Tracker(Iterator[T]):
    """The iterator that `track` returns: each item is recorded when the next one is requested.

    Only the loop refers to it. So when the loop ends, it is collected at once and releases the job.
    """

    def __init__(self, items: Generator[T, None, None], walk: _Walk) -> None:
        self._items, self._walk = items, walk

    def __iter__(self) -> Tracker[T]:
        return self

    def __next__(self) -> T:
        return next(self._items)

    def later(self, seconds: float, reason: str = "", scope: Literal["item", "job"] = "item") -> None:
        """Postpone the current item: the loop yields it again after ``seconds``, without an attempt counted.

        Call it in the loop's body and go on with ``continue``. The arguments are those of `headway.RetryLater`, which
        would end the loop if it were raised there.
        """
        self._walk.postpone(RetryLater(seconds, reason, scope))

    def close(self) -> None:
        """Record finished items and release the job. The current item is left for the next run."""
        self._items.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


class _Walk:
    """The state of a tracked loop."""

    def __init__(self, opened: OpenJob, display: Display) -> None:
        self._opened, self._display = opened, display
        self._waiting: list[Done] = []
        self._committed_at = self._shown_at = time.monotonic()
        known = opened.progress()
        self._kept, self._total, self._done = known.done, known.total, 0
        #: The postponement of the current item, and whether any item was postponed.
        self._later: RetryLater | None = None
        self._is_in_item = self._has_postponed = False

    def items(self, originals: _Originals) -> Generator[Any, None, None]:
        try:
            yield None  # `start` runs it to here
            originals.number(self._opened)
            with _above(self._display):
                yield from self._rounds(originals)
        finally:
            if not self._opened.is_parents:  # a child forked inside the loop must not record or show anything
                self._end()

    def _rounds(self, originals: _Originals) -> Generator[Any, None, None]:
        while True:
            # Failed items of other loops are left for the next run. Postponed items are this loop's own: wait for them.
            wait = self._has_postponed or self._opened.wait_left > 0
            for item in self._opened.remaining(wait=wait):
                began = time.monotonic()
                self._is_in_item = True
                yield originals.of(item)
                self._is_in_item = False
                if self._later is None:
                    self._finished(item.index, began, time.monotonic())
                else:
                    later, self._later = self._later, None
                    self._commit(time.monotonic())
                    self._opened.postpone(item.index, later, time.monotonic() - began)
                    self._has_postponed = True
            self._commit(time.monotonic())
            if wait or not self._has_postponed:
                return

    def postpone(self, later: RetryLater) -> None:
        """Postpone the current item."""
        if not self._is_in_item:
            raise InvalidInput("later() postpones the current item, and there is none.", hint="Call it in the loop.")
        self._later = later

    def _end(self) -> None:
        try:
            self._commit(time.monotonic())
            done = self._opened.progress().done  # from the ledger, because the database may have been restored
            self._kept = min(self._kept, done)
            self._done = done - self._kept
        finally:
            self._display.end(self._snapshot())
            self._opened.close()

    def _finished(self, index: int, began: float, now: float) -> None:
        self._waiting.append(Done(index, None, None, now - began))
        self._done += 1
        if (
            now - began > SHORT_SECONDS
            or now - self._committed_at > COMMIT_SECONDS
            or len(self._waiting) >= COMMIT_MOST
        ):
            self._commit(now)
        if now - self._shown_at > SHOW_SECONDS:
            self._shown_at = now
            self._display.show(self._snapshot())

    def _commit(self, now: float) -> None:
        self._committed_at = now
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._opened.record_many(waiting)

    def _snapshot(self) -> RunSnapshot:
        return RunSnapshot(self._total, self._kept, self._done, 0, 0, 0, 0)


def start(
    opened: Callable[[GivenItems], OpenJob], items: Iterable[T], *, key: str | None, limit: int, display: Display
) -> Tracker[T]:
    """Register the items and return the tracker. ``opened`` opens the job."""
    source = GivenItems(items, key=key, limit=limit, plain=_plain)
    originals = _Originals(source)  # before anything is written, because it may raise
    walk = _Walk(opened(source), display)
    items_left = walk.items(originals)
    next(items_left)  # from here on, closing the generator releases the job
    return Tracker(items_left, walk)


def _plain(value: Any) -> Any:
    """Return the JSON form that identifies an item. The loop gets the original item."""
    try:
        return json.loads(json.dumps(value, default=as_plain, allow_nan=False))
    except Exception:  # noqa: BLE001 - objects may raise anything when they are read
        return value  # the later check raises a detailed error


class _Originals:
    """The original items, found by their key or fingerprint in the ledger.

    Items with the same JSON form are distinguished only by their order. For equal items that is sufficient, because
    they are interchangeable. A path and an equal string are not: if the list is reordered, it is unknown which of
    them is done.
    """

    def __init__(self, source: GivenItems) -> None:
        self._first: dict[object, Any] = {}
        self._same: dict[object, list[Any]] = {}
        for read, item in zip(source, source.items, strict=True):
            mark = read.key if read.key is not None else read.fingerprint
            if mark not in self._first:
                self._first[mark] = item
                continue
            earlier = self._first[mark]
            if _differ(earlier, item):
                raise InvalidInput(
                    f"{source.locate(read.number)}: it has the same JSON form as an earlier item, {read.payload:.60}, but is a "
                    f"{type(item).__name__} and the earlier one a {type(earlier).__name__}.",
                    hint="Items are identified by their JSON form. Use one type for all, or dicts with a unique key=.",
                )
            self._same.setdefault(mark, [earlier]).append(item)
        self._numbers: dict[int, int] = {}

    def number(self, opened: OpenJob) -> None:
        """Number items with equal payloads by index, which is their order in the list."""
        if self._same:
            self._numbers = opened.numbers_among_equals(self._same)

    def of(self, item: OpenItem) -> Any:
        """Return the original object of an item."""
        mark = item.key if item.key is not None else item.fingerprint
        if mark in self._same:
            return self._same[mark][self._numbers.get(item.index, 0)]
        return self._first.get(mark, item.payload)


def _differ(one: Any, other: Any) -> bool:
    """Return whether two items with the same JSON form differ for the loop.

    A path and a string do; NumPy's 1 and 1 do not.
    """
    if type(one) is type(other):
        return False
    try:
        return bool(one != other)
    except Exception:  # noqa: BLE001 - objects may raise anything when they are compared
        return True


@contextmanager
def _above(display: Display) -> Iterator[None]:
    """Show what the loop prints above the bar, line by line."""
    before = sys.stdout, sys.stderr
    if display.live:
        sys.stdout, sys.stderr = (
            _Lines(stream, display) if stream is not None and stream.isatty() else stream for stream in before
        )
    try:
        yield
    finally:
        ours, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), before
        for stream in ours:
            if isinstance(stream, _Lines):
                stream.finish()


class _Lines:
    """A stream whose lines appear above the bar."""

    def __init__(self, stream: TextIO, display: Display) -> None:
        self._stream, self._display, self._rest = stream, display, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._display.say(line)
        return len(text)

    def flush(self) -> None:
        """Show an unfinished line or a prompt at once. (`input` flushes before it reads from the terminal.)"""
        rest, self._rest = self._rest, ""
        self._display.give_way(rest)

    def finish(self) -> None:
        if self._rest:
            self._display.say(self._rest)
            self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
