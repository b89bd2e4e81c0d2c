"""``dead``: what failed for good, by cause; and ``retry``, which gives it another life."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say
from headway.cli.jobs import cause_facts
from headway.cli.reading import (
    cause_option,
    clock,
    confirm,
    find_job,
    iso,
    job_argument,
    open_ledger,
    put,
    put_json,
    put_table,
    with_database,
)
from headway.errors import NotFound, UsageError
from headway.telemetry import redact
from headway.wording import plural, printable

if TYPE_CHECKING:
    from headway.ledger import Cause, DeadLetter, Job


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def dead() -> None:
    """Dead letters: items that failed for good, grouped by cause."""


@dead.command("list")
@click.argument("job", required=False)
@json_option
@database_option
def list_(job: str | None, database: str | None, *, as_json: bool) -> None:
    """List the causes that items are dead of, in all jobs or one."""
    with open_ledger(database) as ledger:
        deadly = [ledger.job(info.id) for info in ledger.jobs() if info.dead]
        jobs = deadly if job is None else [find_job(ledger, job)]
        found = [(one.id, cause) for one in jobs for cause in one.causes() if cause.dead]
    if as_json:
        put_json("dead/1", causes=[{"job": id, **cause_facts(cause)} for id, cause in found])
        return
    if not found:
        say("Nothing is dead." if job is None else f"Job {job} has no dead letters.")
        return
    rows = [
        [id, str(cause.no), f"{cause.dead:,}", clock(cause.last_seen), cause.type, cause.message] for id, cause in found
    ]
    put_table(["JOB", "CAUSE", "DEAD", "LAST SEEN", "TYPE", "MESSAGE"], rows, right=("CAUSE", "DEAD"))


@dead.command()
@job_argument
@cause_option("Only this cause.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Items per cause.")
@json_option
@database_option
def show(job: str, database: str | None, *, cause: int | None, limit: int, as_json: bool) -> None:
    """Show each cause with the items that are dead of it."""
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        causes = [_cause(found, cause)] if cause is not None else [one for one in found.causes() if one.dead]
        letters = [(one, found.dead_letters(cause=one.no, limit=limit)) for one in causes]
    if as_json:
        shown = [cause_facts(one) | {"items": [_letter_facts(letter) for letter in some]} for one, some in letters]
        put_json("dead-items/1", job=job, causes=shown)
        return
    if not letters:
        say(f"Job {job} has no dead letters.")
    for position, (one, some) in enumerate(letters):
        if position:
            put()
        _put_cause(job, one, some, database)


def _put_cause(job: str, cause: Cause, letters: list[DeadLetter], database: str | None) -> None:
    put(f"Cause {cause.no}: {cause.dead:,} dead, {plural(cause.count, 'failed run')}")
    put(f"  {printable(cause.type)}: {printable(cause.message)}")
    if cause.frame:
        put(f"  in {printable(cause.frame)}")
    put(f"  first seen {clock(cause.first_seen)}, last seen {clock(cause.last_seen)}")
    for letter in letters:
        named = f" ({printable(letter.key)})" if letter.key is not None else ""
        put(f"    {letter.idx}{named}  {plural(letter.attempts, 'failure')}  {printable(letter.error)}")
    if cause.dead > len(letters):
        put(f"    ... and {cause.dead - len(letters):,} more")
    if cause.dead:
        put(f"  Retry them:  {with_database(f'headway dead retry {job} --cause {cause.no}', database)}")


def _letter_facts(letter: DeadLetter) -> dict[str, object]:
    return {
        "idx": letter.idx,
        "key": letter.key,
        "error": letter.error,
        "cause": letter.cause,
        "failures": letter.attempts,
        "died_at": iso(letter.created_at),
    }


def _cause(job: Job, no: int) -> Cause:
    causes = job.causes()
    for cause in causes:
        if cause.no == no:
            return cause
    known = ", ".join(str(cause.no) for cause in sorted(causes, key=lambda cause: cause.no)) or "none"
    raise NotFound(f"Job {job.id} has no cause {no} (it has: {known}).", hint=f"List them: headway dead list {job.id}")


@dead.command()
@job_argument
@cause_option("Only what is dead of this cause.")
@click.option("--payload", is_flag=True, help="With the payloads, unmasked.")
@database_option
def export(job: str, database: str | None, *, cause: int | None, payload: bool) -> None:
    """Write the dead letters to stdout as JSONL, one per line."""
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        if cause is not None:
            _cause(found, cause)
        after = -1
        while page := found.dead_letters(cause=cause, after=after):
            for letter in page:
                facts = {"job": job, **_letter_facts(letter)}
                if payload:
                    content = found.item(letter.idx).payload
                    facts["payload"] = None if content is None else json.loads(content)
                put(json.dumps(facts))
            after = page[-1].idx


@click.command()
@job_argument
@cause_option("Only what is dead of this cause.")
@click.option("--item", "items", multiple=True, metavar="KEY|IDX", help="Only this item; can be given several times.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--reason", default="", help="Why; kept in the audit trail.")
@database_option
def retry(job: str, database: str | None, *, cause: int | None, items: tuple[str, ...], yes: bool, reason: str) -> None:
    """Give dead letters another life: they are pending again, with no failure counted.

    The next run of the job takes them. What they failed of stays in their history.
    """
    from headway.ledger.ledger import current_user

    if cause is not None and items:
        raise UsageError("--cause and --item cannot be combined.", hint="Name the cause, or the items.")
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        indices = [_dead_index(found, name) for name in items] or None
        count = len(set(indices)) if indices else _cause(found, cause).dead if cause is not None else found.info().dead
        if not count:
            say(f"Job {job} has no dead letters" + (f" of cause {cause}." if cause is not None else "."))
            return
        confirm(f"Retry {plural(count, 'dead letter')} of job {job}?", yes=yes)
        moved = found.retry_dead(cause=cause, indices=indices, actor=current_user(), reason=redact(reason))
        info = found.info()
    say(f"{plural(moved, 'dead letter')} of job {job} pending again.")
    if info.command and not info.held:
        say(f"Run them:  {redact(info.command)}")


dead.add_command(retry)


def _dead_index(job: Job, name: str) -> int:
    info = job.item(name)
    if info.status != "dead":
        raise UsageError(f"Item {name} of job {job.id} is not dead, it is {info.status}.", hint="Nothing was changed.")
    return info.idx
