"""Dead letters: permanent failures by cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway.core.text import cut
from headway.errors import NotFound
from headway.telemetry import redact
from headway.views.jobs.items import masked_payload
from headway.views.jobs.job import Cause, DeadLetter, cause_view
from headway.views.jobs.listing import find_job
from headway.views.shape import ABSENT, Absent, Json, document

if TYPE_CHECKING:
    from headway import ledger


class Dead(NamedTuple):
    """`headway dead list`: the causes of dead letters, in all jobs or one, most dead letters first."""

    causes: Annotated[tuple[Cause, ...], "the causes, each with its job"]

    def as_json(self) -> Json:
        return document(self)


class DeadItems(NamedTuple):
    """`headway dead show`: the causes of one job, each with some of its dead letters."""

    job: Annotated[str, "the job's id"]
    causes: Annotated[tuple[Cause, ...], "the causes, each with its items"]

    def as_json(self) -> Json:
        return document(self)


class DeadLetters(NamedTuple):
    """A page of a job's dead letters, by index; `headway dead export` writes them all, one per line."""

    job: Annotated[str, "the job's id"]
    letters: Annotated[tuple[DeadLetter, ...], "the dead letters"]
    next_after: Annotated[int | None, "`after` of the next page; null on the last"]

    def as_json(self) -> Json:
        return document(self)


def read_dead(ledger: ledger.Ledger, job: str | None = None) -> Dead:
    """Read the causes of one job, or of every job that has dead letters."""
    jobs = [ledger.job(info.id) for info in ledger.jobs() if info.dead] if job is None else [find_job(ledger, job)]
    return Dead(tuple(cause_view(cause)._replace(job=one.id) for one in jobs for cause in one.causes() if cause.dead))


def read_dead_items(job: ledger.Job, *, cause: int | None = None, limit: int = 10, payload: bool = False) -> DeadItems:
    """Read at most ``limit`` items of each cause, or of the one named. ``payload``: with masked payloads."""
    causes = [find_cause(job, cause)] if cause is not None else [cause_view(one) for one in job.causes() if one.dead]
    return DeadItems(job.id, tuple(one._replace(items=_letters(job, one.no, limit, payload=payload)) for one in causes))


def export_dead(job: ledger.Job, *, cause: int | None = None, payload: bool = False) -> Iterator[DeadLetter]:
    """Yield every dead letter of a job, reading pages by index."""
    after: int | None = -1
    while after is not None:
        page = read_dead_letters(job, cause=cause, payload=payload, after=after, limit=1000)
        yield from page.letters
        after = page.next_after


def read_dead_letters(
    job: ledger.Job, *, cause: int | None = None, payload: bool = False, after: int = -1, limit: int = 50
) -> DeadLetters:
    """Read the dead letters after the index ``after``. One more is read to detect a next page."""
    if cause is not None:
        find_cause(job, cause)
    found = job.dead_letters(cause=cause, after=after, limit=limit + 1)
    letters = []
    for letter in found[:limit]:
        view = letter_view(letter)._replace(job=job.id, printed=job.printed(letter.idx))
        if payload:
            content = job.item(letter.idx).payload
            view = view._replace(payload=None if content is None else json.loads(content))
        letters.append(view)
    return DeadLetters(job.id, tuple(letters), letters[-1].idx if len(found) > limit else None)


def retried(job: ledger.Job) -> tuple[str, str | Absent]:
    """Return what happens to retried items, in a sentence, and the command that runs them if none is running."""
    info = job.info()
    if info.held:
        fleet = (info.holder or {}).get("fleet")
        return "The workers of the fleet try them." if fleet else "The run in progress tries them.", ABSENT
    if not info.command:
        return f"Job {job.id} needs a run: start its program again.", ABSENT
    command = redact(info.command)
    return f"Job {job.id} needs a run:  {cut(command, 400)}", command


def find_cause(job: ledger.Job, no: int) -> Cause:
    """Return a cause by its number. Raises `NotFound`, naming the existing ones."""
    causes = {cause.no: cause for cause in job.causes()}
    if no not in causes:
        some = sorted(causes)[:20]
        known = (
            ", ".join(map(str, some)) + (f" and {len(causes) - len(some):,} more" if len(causes) > 20 else "") or "none"
        )
        raise NotFound(
            f"Job {job.id} has no cause {no} (it has: {known}).", hint=f"List them: headway dead list {job.id}"
        )
    return cause_view(causes[no])


def _letters(job: ledger.Job, cause: int, limit: int, *, payload: bool) -> tuple[DeadLetter, ...]:
    letters = [letter_view(letter) for letter in job.dead_letters(cause=cause, limit=limit)]
    if payload:
        letters = [letter._replace(payload=masked_payload(job.item(letter.idx).payload)) for letter in letters]
    return tuple(
        letter._replace(printed=job.printed(letter.idx)) if position == 0 else letter
        for position, letter in enumerate(letters)
    )


def letter_view(letter: ledger.DeadLetter) -> DeadLetter:
    return DeadLetter(letter.idx, letter.key, letter.error, letter.cause, letter.attempts, letter.created_at)
