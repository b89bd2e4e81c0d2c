"""``items``, ``item`` and ``log``: what became of each item."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from headway.cli import database_option, json_option, say
from headway.cli.reading import (
    cause_option,
    clock,
    find_job,
    iso,
    job_argument,
    open_ledger,
    put,
    put_json,
    put_json_rows,
    put_table,
    with_database,
)
from headway.telemetry import names_a_secret, redact
from headway.wording import duration, plural, printable

if TYPE_CHECKING:
    from headway.ledger import Attempt, ItemInfo, Job

#: The states an item can be in, as everywhere.
STATUSES = ("pending", "processing", "retrying", "done", "dead")

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+')
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d|^<frozen")


@click.command()
@job_argument
@click.option("--status", type=click.Choice(STATUSES), help="Only items in this state.")
@cause_option("Only items that failed of this cause.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="How many.")
@click.option("--after", type=click.IntRange(0), default=None, metavar="IDX", help="Only items after this index.")
@json_option
@database_option
def items(
    job: str,
    database: str | None,
    *,
    status: str | None,
    cause: int | None,
    limit: int,
    after: int | None,
    as_json: bool,
) -> None:
    """List items by index, page by page."""
    start = -1 if after is None else after
    with open_ledger(database) as ledger:
        # One more than asked for tells whether there is a next page.
        found = find_job(ledger, job).items(status=status, cause=cause, after=start, limit=limit + 1)
    page, more = found[:limit], len(found) > limit
    if as_json:
        following = page[-1].idx if more else None
        put_json("items/1", job=job, items=[item_facts(info) for info in page], next_after=following)
        return
    if not page:
        say("No item matches." if status or cause or after is not None else f"Job {job} has no items.")
        return
    rows = [
        [
            str(info.idx),
            info.key or "",
            info.status,
            str(info.attempts),
            clock(info.updated_at),
            "" if info.seconds is None else f"{info.seconds:.3f}",
            info.error if info.error and info.status not in ("done", "pending") else "",
        ]
        for info in page
    ]
    heads = ["IDX", "KEY", "STATUS", "FAILURES", "CHANGED", "SECONDS", "ERROR"]
    put_table(heads, rows, right=("IDX", "FAILURES", "SECONDS"))
    if more:
        filters = (f" --status {status}" if status else "") + (f" --cause {cause}" if cause else "")
        say(f"More:  {with_database(f'headway items {job}{filters} --after {page[-1].idx}', database)}")


def item_facts(info: ItemInfo) -> dict[str, object]:
    """An item as ``--json`` says it; the payload is not part of it."""
    return {
        "idx": info.idx,
        "key": info.key,
        "status": info.status,
        "failures": info.attempts,
        "updated_at": iso(info.updated_at),
        "seconds": info.seconds,
        "worker": info.worker,
        "error": info.error,
        "cause": info.cause,
        "next_attempt_at": iso(info.next_attempt_at),
        "meta": masked(info.meta) if info.meta else None,
    }


def masked(text: str) -> Any:
    """A payload or meta as data, without what is a secret by its name or its shape."""
    return _masked(json.loads(text))


def _masked(value: Any) -> Any:
    match value:
        case dict():
            return {name: "***" if names_a_secret(name) else _masked(part) for name, part in value.items()}
        case list():
            return [_masked(part) for part in value]
        case str():
            return redact(value)
        case _:
            return value


@click.command()
@job_argument
@click.argument("item", metavar="KEY|IDX")
@click.option("--payload", is_flag=True, help="Show the payload; what looks like a secret in it stays masked.")
@click.option("--traceback", is_flag=True, help="Show tracebacks whole, library frames too.")
@json_option
@database_option
def item(job: str, item: str, database: str | None, *, payload: bool, traceback: bool, as_json: bool) -> None:
    """Show one item: every run of it, what failed where, and when it is tried again."""
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        info = found.item(item)
        history = found.history(info.idx)
    shown = masked(info.payload) if payload and info.payload is not None else None
    if as_json:
        attempts = [_attempt_facts(attempt) for attempt in history]
        extra = {"payload": shown} if payload else {}
        put_json("item/1", job=job, item=item_facts(info) | extra, attempts=attempts)
        return
    named = f" ({printable(info.key)})" if info.key is not None else ""
    put(f"Item {info.idx}{named} of job {job}: {info.status}, {plural(info.attempts, 'failure')}")
    if info.payload is not None:
        hidden = f"*** ({len(info.payload.encode()):,} bytes; show it: --payload)"
        put(f"  payload  {printable(_compact(shown)) if payload else hidden}")
    if info.meta is not None:
        put(f"  meta     {printable(_compact(masked(info.meta)))}")
    for attempt in history:
        _put_attempt(attempt, whole=traceback)
    if info.next_attempt_at is not None:
        put(f"  tried again from {clock(info.next_attempt_at)}")
    if info.status == "dead":
        put(f"  Retry it:  {with_database(f'headway dead retry {job} --item {info.idx}', database)}")


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _attempt_facts(attempt: Attempt) -> dict[str, object]:
    return {
        "no": attempt.no,
        "outcome": attempt.outcome,
        "at": iso(attempt.at),
        "seconds": attempt.seconds,
        "worker": attempt.worker,
        "error": attempt.error,
        "cause": attempt.cause,
        "traceback": attempt.detail,
    }


def _put_attempt(attempt: Attempt, *, whole: bool) -> None:
    took = f" after {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    worker = f" on {printable(attempt.worker)}" if attempt.worker else ""
    error = f": {printable(attempt.error)}" if attempt.error else ""
    put(f"  {attempt.no}. {clock(attempt.at)}  {attempt.outcome}{took}{worker}{error}")
    for line in own_frames_first(attempt.detail or "", whole=whole):
        put(f"       {line}")


def own_frames_first(detail: str, *, whole: bool = False) -> list[str]:
    """A traceback whose frames of the user's own code come first; those of libraries are folded into one line."""
    own: list[str] = []
    foreign: list[str] = []
    other: list[str] = []
    frames = 0
    target = other
    for raw in detail.splitlines():
        line = _one_line(raw)
        frame = _FRAME.match(line)
        if frame:
            target = foreign if _LIBRARY.search(frame["file"]) else own
            frames += target is foreign
        elif not line.startswith(" "):
            target = other
        if target is not other or not line.startswith("Traceback"):
            target.append(line)
    if whole:
        return [_one_line(raw) for raw in detail.splitlines()]
    folded = [f"  ({plural(frames, 'library frame')}; all of it: --traceback)"] if frames else []
    return own + folded + [line for line in other if line]


def _one_line(raw: str) -> str:
    return printable(raw.replace("\t", "    ")).rstrip()


@click.command()
@job_argument
@click.option("--tsv", is_flag=True, help="Columns divided by tabs, with a header: for grep, cut and spreadsheets.")
@json_option
@database_option
def log(job: str, database: str | None, *, tsv: bool, as_json: bool) -> None:
    """Print every ended run of every item, in the order of the items."""
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        if as_json:
            put_json_rows("log/1", "log", (dict(zip(COLUMNS, row, strict=True)) for row in _log(found)), job=job)
            return
        if tsv:
            put("\t".join(COLUMNS))
        for idx, key, outcome, at, seconds, worker, error in _log(found):
            took = "" if seconds is None else f"{seconds:.6f}"
            if tsv:
                cells = [str(idx), key or "", outcome, at, took, worker or "", error or ""]
                put("\t".join(printable(cell) for cell in cells))
            else:
                name = str(idx) if key is None else f"{idx} ({key})"
                fields = [at, name, outcome, f"{took} s" if took else "", error or ""]
                put("  ".join(printable(field) for field in fields if field))


#: The columns of the log, in every form of it.
COLUMNS = ("idx", "key", "outcome", "at", "seconds", "worker", "error")


def _log(job: Job) -> Iterator[tuple[int, str | None, str, str, float | None, str | None, str | None]]:
    from headway.ledger.values import utc

    for idx, key, outcome, at, seconds, worker, error in job.log():
        yield idx, key, outcome, iso(utc(at)) or "", seconds, worker, error
