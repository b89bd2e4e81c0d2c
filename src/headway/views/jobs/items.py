"""Items: a page of them, one with its history, and the log of every ended attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from headway.telemetry import names_a_secret, redact
from headway.views.shape import ABSENT, Absent, Json, document

if TYPE_CHECKING:
    from headway import ledger

ItemStatus = Literal["pending", "processing", "retrying", "done", "dead"]


class Item(NamedTuple):
    """An item and its state."""

    idx: Annotated[int, "its index, from 0"]
    key: Annotated[str | None, "its key, if it has one"]
    status: Annotated[ItemStatus, "where it is"]
    failures: Annotated[int, "failed attempts that count against it"]
    updated_at: Annotated[datetime | None, "when it last changed; null if it was never tried"]
    seconds: Annotated[float | None, "how long its last attempt took"]
    worker: Annotated[str | None, "who made that attempt"]
    error: Annotated[str | None, "what its last failure said"]
    cause: Annotated[int | None, "the number of that failure's cause"]
    next_attempt_at: Annotated[datetime | None, "when it is tried again, while it is retrying"]
    meta: Annotated[Any, "what was noted with it; secrets are masked"]
    payload: Annotated[Any, "what the function is called with; only when asked for, secrets are masked"] = ABSENT


class Attempt(NamedTuple):
    """One ended attempt at an item."""

    no: Annotated[int, "1 is the first"]
    outcome: Annotated[Literal["done", "failed", "timeout", "lost"], "how it ended"]
    at: Annotated[datetime, "when it ended"]
    seconds: Annotated[float | None, "how long it took"]
    worker: Annotated[str | None, "who made it"]
    error: Annotated[str | None, "what it said"]
    cause: Annotated[int | None, "the number of its cause"]
    traceback: Annotated[
        str | None, "its traceback or a program's stderr; if not kept, a line that says so and that of its cause"
    ]
    printed: Annotated[str | None, "what it printed, as far as that was kept; long output without its middle"] = None


class LogEntry(NamedTuple):
    """One ended attempt, as a line of the log."""

    idx: Annotated[int, "the item's index"]
    key: Annotated[str | None, "the item's key, if it has one"]
    outcome: Annotated[Literal["done", "failed", "timeout", "lost"], "how it ended"]
    at: Annotated[datetime, "when it ended"]
    seconds: Annotated[float | None, "how long it took"]
    worker: Annotated[str | None, "who made it"]
    error: Annotated[str | None, "what it said"]


class Items(NamedTuple):
    """`headway items`: a page of a job's items, by index."""

    job: Annotated[str, "the job's id"]
    items: Annotated[tuple[Item, ...], "the items"]
    next_after: Annotated[int | None, "`--after` of the next page; null on the last"]

    def as_json(self) -> Json:
        return document(self)


class ItemSheet(NamedTuple):
    """`headway item`: one item with all its attempts."""

    job: Annotated[str, "the job's id"]
    item: Annotated[Item, "the item"]
    attempts: Annotated[tuple[Attempt, ...], "its ended attempts, the first one first"]

    def as_json(self) -> Json:
        return document(self)


class JobLog(NamedTuple):
    """`headway log`: all ended attempts of all items, in order of the items."""

    job: Annotated[str, "the job's id"]
    log: Annotated[tuple[LogEntry, ...], "the attempts; the command writes one per line as it reads them"]
    next_after: Annotated[int | Absent | None, "`after` of the next page, null on the last; only from a server"] = (
        ABSENT
    )

    def as_json(self) -> Json:
        return document(self)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_items(
    job: ledger.Job,
    *,
    status: str | None = None,
    cause: int | None = None,
    after: int = -1,
    limit: int = 50,
    payload: bool = False,
) -> Items:
    """Read the items after the index ``after``. One more is read to detect a next page."""
    found = job.items(status=status, cause=cause, after=after, limit=limit + 1)
    page = tuple(
        item_view(info)._replace(payload=masked_payload(info.payload)) if payload else item_view(info)
        for info in found[:limit]
    )
    return Items(job.id, page, page[-1].idx if len(found) > limit else None)


def read_item(job: ledger.Job, name: str | int, *, payload: bool = False) -> ItemSheet:
    """Read an item by key or index. A number is always an index."""
    info = job.item(name)
    view = item_view(info)
    if payload:
        view = view._replace(payload=masked_payload(info.payload))
    attempts = [attempt_view(attempt) for attempt in job.history(info.idx)]
    if info.status == "dead" and attempts and attempts[-1].cause == info.cause:
        # The dead letter stores a longer error than the attempt.
        attempts[-1] = attempts[-1]._replace(error=info.error)
    return ItemSheet(job.id, view, tuple(attempts))


def read_log(job: ledger.Job, *, after: int = -1) -> Iterator[LogEntry]:
    """Yield every ended attempt, reading page by page in constant memory."""
    from headway.ledger.values import utc

    for idx, key, outcome, at, seconds, worker, error in job.log(after):
        yield LogEntry(idx, key, outcome, utc(at), seconds, worker, error)  # type: ignore[arg-type]  # one of the words


def read_log_page(job: ledger.Job, *, after: int = -1, limit: int = 1000) -> JobLog:
    """Read about ``limit`` ended attempts of items after ``after``, never splitting the attempts of an item."""
    page: list[LogEntry] = []
    for entry in read_log(job, after=after):
        if len(page) >= limit and entry.idx != page[-1].idx:
            return JobLog(job.id, tuple(page), page[-1].idx)
        page.append(entry)
    return JobLog(job.id, tuple(page), None)


def item_view(info: ledger.ItemInfo) -> Item:
    return Item(
        idx=info.idx,
        key=info.key,
        status=info.status,
        failures=info.attempts,
        updated_at=info.updated_at,
        seconds=info.seconds,
        worker=info.worker,
        error=info.error,
        cause=info.cause,
        next_attempt_at=info.next_attempt_at,
        meta=None if info.meta is None else masked(json.loads(info.meta)),
    )


def attempt_view(attempt: ledger.Attempt) -> Attempt:
    return Attempt(
        attempt.no, attempt.outcome, attempt.at, attempt.seconds, attempt.worker, attempt.error, attempt.cause,
        attempt.detail, attempt.printed,
    )  # fmt: skip


def masked_payload(text: str | None) -> Any:
    """Parse a payload and mask its secrets. A damaged payload is shown as text."""
    if text is None:
        return None
    try:
        return masked(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return redact(str(text))


def masked(value: Any) -> Any:
    """Mask the secrets of a payload or meta, recognised by name or format."""
    match value:
        case dict():
            return {name: "***" if names_a_secret(name) else masked(part) for name, part in value.items()}
        case list():
            return [masked(part) for part in value]
        case str():
            return redact(value)
        case _:
            return value
