"""``dead``: permanent failures by cause; and ``retry``, which makes them pending again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say
from headway.cli.jobs.items import last_lines
from headway.cli.toolkit import (
    cause_option,
    clock,
    confirm,
    item_name,
    job_argument,
    limit_option,
    open_ledger,
    open_reader,
    optional_job_argument,
    put,
    put_json,
    put_table,
    with_database,
    yes_option,
)
from headway.core.text import cut, plural, printable
from headway.errors import UsageError
from headway.telemetry import redact
from headway.views.jobs.dead import find_cause, retried
from headway.views.jobs.listing import find_job
from headway.views.shape import plain

if TYPE_CHECKING:
    from headway.ledger import Job
    from headway.views.jobs.job import Cause


#: Lines of output shown of the first item of a cause.
SHOWN_LINES = 5
#: Causes that `dead show` shows.
SHOWN_CAUSES = 20


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def dead() -> None:
    """Show dead letters: items that failed permanently, grouped by cause."""


@dead.command("list")
@optional_job_argument
@limit_option(50, "How many causes.")
@json_option
@database_option
def list_(job: str | None, database: str | None, *, limit: int, as_json: bool) -> None:
    """List the causes of dead letters, of all jobs or one."""
    with open_reader(database) as reader:
        found = reader.dead(job)
    if as_json:
        put_json(found)
        return
    if not found.causes:
        say("Nothing is dead." if job is None else f"Job {job} has no dead letters.")
        return
    rows = [
        [str(cause.job), str(cause.no), f"{cause.dead:,}", clock(cause.last_seen), cause.type, cause.message]
        for cause in found.causes[:limit]
    ]
    heads = ["JOB", "CAUSE", "DEAD", "LAST SEEN", "TYPE", "MESSAGE"]
    put_table(heads, rows, right=("CAUSE", "DEAD"), drop=("LAST SEEN",))
    if len(found.causes) > limit:
        words = f"headway dead list{f' {job}' if job else ''} --limit {len(found.causes)}"
        say(f"{plural(len(found.causes) - limit, 'more cause')}:  {with_database(words, database)}")


@dead.command()
@job_argument
@cause_option("Only this cause.")
@limit_option(10, "Items per cause.")
@json_option
@database_option
def show(job: str, database: str | None, *, cause: int | None, limit: int, as_json: bool) -> None:
    """Show each cause with its dead letters."""
    with open_reader(database) as reader:
        if as_json:
            put_json(reader.dead_items(job, cause=cause, limit=limit))
            return
        numbers = [one.no for one in reader.dead(job).causes] if cause is None else [cause]
        if not numbers:
            say(f"Job {job} has no dead letters.")
        for position, number in enumerate(numbers[:SHOWN_CAUSES]):
            if position:
                put()
            for one in reader.dead_items(job, cause=number, limit=limit, payload=True).causes:
                _put_cause(job, one, database)
    if len(numbers) > SHOWN_CAUSES:
        put()
        put(f"... and {plural(len(numbers) - SHOWN_CAUSES, 'more cause')}.")
        put(f"  List them:  {with_database(f'headway dead list {job} --limit {len(numbers)}', database)}")
        put(f"  Show one:  {with_database(f'headway dead show {job} --cause {numbers[SHOWN_CAUSES]}', database)}")


def _put_cause(job: str, cause: Cause, database: str | None) -> None:
    letters = cause.items if isinstance(cause.items, tuple) else ()
    put(f"Cause {cause.no}: {cause.dead:,} dead, {plural(cause.failures, 'failed run')}")
    put(f"  {printable(cause.type)}: {printable(cause.message)}")
    if cause.frame:
        put(f"  in {printable(cause.frame)}")
    put(f"  first seen {clock(cause.first_seen)}, last seen {clock(cause.last_seen)}")
    for letter in letters:
        name = item_name(letter.key, letter.payload)
        named = f" ({name})" if name else ""
        put(f"    {letter.idx}{named}  {plural(letter.failures, 'failure')}  {printable(letter.error)}")
        if isinstance(letter.printed, str):
            for line in last_lines(letter.printed, SHOWN_LINES):
                put(f"        | {line}")
    if cause.dead > len(letters):
        put(f"    ... and {cause.dead - len(letters):,} more")
    if letters:
        command = f"headway item {job} {letters[0].idx} --traceback"
        put(f"  Traceback:  {with_database(command, database)}")
    if cause.dead:
        put(f"  Retry them:  {with_database(f'headway retry {job} --cause {cause.no}', database)}")


@dead.command()
@job_argument
@cause_option("Only what is dead of this cause.")
@click.option("--payload", is_flag=True, help="Include the payloads, unmasked.")
@database_option
def export(job: str, database: str | None, *, cause: int | None, payload: bool) -> None:
    """Write the dead letters to stdout as JSONL, one per line."""
    import json

    with open_reader(database) as reader:
        for letter in reader.export_dead(job, cause=cause, payload=payload):
            put(json.dumps(plain(letter)))


@click.command()
@job_argument
@cause_option("Only what is dead of this cause.")
@click.option("--item", "items", multiple=True, metavar="KEY|IDX", help="Only this item; repeatable.")
@yes_option
@click.option("--reason", default="", help="Reason, for the audit trail.")
@database_option
def retry(job: str, database: str | None, *, cause: int | None, items: tuple[str, ...], yes: bool, reason: str) -> None:
    """Make dead letters pending again, with no failures counted.

    The next run of the job executes them. Their earlier failures stay in the history.
    """
    from headway.ledger.store.audit import current_user

    if cause is not None and items:
        raise UsageError("--cause and --item cannot be combined.", hint="Name the cause, or the items.")
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        indices = [_dead_index(found, name) for name in items] or None
        named = find_cause(found, cause) if cause is not None else None
        count = len(set(indices)) if indices else named.dead if named is not None else found.info().dead
        if not count:
            say(f"Job {job} has no dead letters" + (f" of cause {cause}." if cause is not None else "."))
            return
        which = f"Cause {named.no} is {_in_words(named)}. " if named is not None else ""
        confirm(f"{which}Retry {plural(count, 'dead letter')} of job {job}?", yes=yes)
        moved = found.retry_dead(cause=cause, indices=indices, actor=current_user(), reason=redact(reason))
        text, command = retried(found)
    say(f"{which}{plural(moved, 'dead letter')} of job {job} pending again.")
    say(f"Run them:  {command}" if isinstance(command, str) else text)


dead.add_command(retry)


def _in_words(cause: Cause) -> str:
    """Return type and message of a cause, short enough for a question."""
    return cut(printable(f"{cause.type}: {cause.message}" if cause.message else cause.type), 100).rstrip(".")


def _dead_index(job: Job, name: str) -> int:
    info = job.item(name)
    if info.status != "dead":
        raise UsageError(f"Item {name} of job {job.id} is not dead, it is {info.status}.", hint="Nothing was changed.")
    return info.idx
