"""``items``, ``item`` and ``log``: the state and history of items."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say
from headway.cli.toolkit import (
    Whole,
    cause_option,
    clock,
    item_name,
    job_argument,
    limit_option,
    open_reader,
    put,
    put_json,
    put_json_rows,
    put_table,
    with_database,
)
from headway.core.text import duration, plural, printable
from headway.ledger.values import note_of
from headway.views.jobs.items import JobLog, LogEntry
from headway.views.shape import ABSENT, iso, schema_of

if TYPE_CHECKING:
    from headway.views.jobs.items import Attempt

#: The states of an item.
STATUSES = ("pending", "processing", "retrying", "done", "dead")

#: Lines of output shown of an attempt.
PRINTED_LINES = 20

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+')
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d|^<frozen")


@click.command()
@job_argument
@click.option("--status", type=click.Choice(STATUSES), help="Only items in this state.")
@cause_option("Only items that failed of this cause.")
@limit_option(50, "How many.")
@click.option("--after", type=Whole(), default=None, metavar="IDX", help="Only items after this index.")
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
    """List items by index, one page at a time."""
    start = -1 if after is None else after
    with open_reader(database) as reader:
        found = reader.items(job, status=status, cause=cause, after=start, limit=limit, payload=not as_json)
    if as_json:
        put_json(found)
        return
    if not found.items:
        say("No item matches." if status or cause or after is not None else f"Job {job} has no items.")
        return
    rows = [
        [
            str(item.idx),
            item_name(item.key, item.payload),
            item.status,
            str(item.failures),
            clock(item.updated_at),
            "" if item.seconds is None else f"{item.seconds:.3f}",
            item.error if item.error and item.status not in ("done", "pending") else "",
        ]
        for item in found.items
    ]
    heads = ["IDX", "ITEM", "STATUS", "FAILURES", "CHANGED", "SECONDS", "ERROR"]
    put_table(
        heads, rows, right=("IDX", "FAILURES", "SECONDS"), whole=("STATUS",), drop=("SECONDS", "CHANGED", "FAILURES")
    )
    if found.next_after is not None:
        filters = (f" --status {status}" if status else "") + (f" --cause {cause}" if cause else "")
        say(f"More:  {with_database(f'headway items {job}{filters} --after {found.next_after}', database)}")


@click.command()
@job_argument
@click.argument("item", metavar="KEY|IDX")
@click.option("--payload", is_flag=True, help="Show the payload, with secrets masked.")
@click.option("--traceback", is_flag=True, help="Show tracebacks and output in full.")
@json_option
@database_option
def item(job: str, item: str, database: str | None, *, payload: bool, traceback: bool, as_json: bool) -> None:
    """Show one item: every attempt, its failures, and the time of its next attempt."""
    with open_reader(database) as reader:
        sheet = reader.item(job, item, payload=payload)
    if as_json:
        put_json(sheet)
        return
    found = sheet.item
    named = f" ({printable(found.key)})" if found.key is not None else ""
    put(f"Item {found.idx}{named} of job {job}: {found.status}, {plural(found.failures, 'failure')}")
    put(f"  payload  {'*** (show it: --payload)' if found.payload is ABSENT else _compact(found.payload)}")
    if found.meta is not None:
        put(f"  meta     {_compact(found.meta)}")
    for attempt in sheet.attempts:
        _put_attempt(attempt, whole=traceback)
    if found.next_attempt_at is not None:
        put(f"  tried again from {clock(found.next_attempt_at)}")
    if found.status == "dead":
        put(f"  Retry it:  {with_database(f'headway retry {job} --item {found.idx}', database)}")


def _compact(value: object) -> str:
    import json

    return printable(json.dumps(value, ensure_ascii=False))


def _put_attempt(attempt: Attempt, *, whole: bool) -> None:
    took = f" after {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    worker = f" on {printable(attempt.worker)}" if attempt.worker else ""
    error = f": {printable(attempt.error)}" if attempt.error else ""
    put(f"  {attempt.no}. {clock(attempt.at)}  {attempt.outcome}{took}{worker}{error}")
    for line in own_frames_first(attempt.traceback or "", whole=whole):
        put(f"       {line}")
    if attempt.printed:
        put("       It printed:")
        for line in attempt.printed.splitlines() if whole else last_lines(attempt.printed, PRINTED_LINES):
            put(f"       | {_one_line(line)}")


def last_lines(text: str, most: int) -> list[str]:
    """Return the last lines of an item's output."""
    lines = text.splitlines()
    left_out = [f"({len(lines) - most:,} lines before)"] if len(lines) > most else []
    return left_out + [_one_line(line) for line in lines[-most:]]


def own_frames_first(detail: str, *, whole: bool = False) -> list[str]:
    """Reorder a traceback: the user's own frames first, library frames folded into one line."""
    own: list[str] = []
    foreign: list[str] = []
    other: list[str] = []
    frames = 0
    target = other
    lines = detail.splitlines()
    note = [text] if (text := note_of(detail)) else []
    for raw in lines[len(note) :]:
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
        return [_one_line(raw) for raw in lines]
    folded = [f"  ({plural(frames, 'library frame')}; all of it: --traceback)"] if frames else []
    return note + own + folded + [line for line in other if line]


def _one_line(raw: str) -> str:
    return printable(raw.replace("\t", "    ")).rstrip()


@click.command()
@job_argument
@click.option("--tsv", is_flag=True, help="Columns separated by tabs, with a header.")
@json_option
@database_option
def log(job: str, database: str | None, *, tsv: bool, as_json: bool) -> None:
    """Print every ended attempt of every item, in order of the items."""
    with open_reader(database) as reader:
        entries = reader.log(job)
        if as_json:
            put_json_rows(schema_of(JobLog), {"job": job}, "log", entries)
            return
        if tsv:
            put("\t".join(LogEntry._fields))
        for entry in entries:
            at, took = iso(entry.at) or "", "" if entry.seconds is None else f"{entry.seconds:.6f}"
            if tsv:
                cells = [
                    str(entry.idx),
                    entry.key or "",
                    entry.outcome,
                    at,
                    took,
                    entry.worker or "",
                    entry.error or "",
                ]
                put("\t".join(printable(cell) for cell in cells))
            else:
                name = str(entry.idx) if entry.key is None else f"{entry.idx} ({entry.key})"
                fields = [at, name, entry.outcome, f"{took} s" if took else "", entry.error or ""]
                put("  ".join(printable(field) for field in fields if field))
