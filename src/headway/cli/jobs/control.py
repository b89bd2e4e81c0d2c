"""``pause``, ``resume``, ``stop`` and ``scale``: control a run from another terminal."""

from __future__ import annotations

import click

from headway.cli import database_option, say, typed
from headway.cli.toolkit import Whole, job_argument, open_ledger
from headway.core.text import plural
from headway.ledger.control import MOST_WORKERS
from headway.views.jobs.listing import find_job


@click.command()
@job_argument
@database_option
def pause(job: str, database: str | None) -> None:
    """Pause a run: it finishes its current items and starts no more until it is resumed."""
    with open_ledger(database) as ledger:
        find_job(ledger, job).pause()
    say(typed(f"Job {job} is asked to pause. Go on:  headway resume {job}"))


@click.command()
@job_argument
@database_option
def resume(job: str, database: str | None) -> None:
    """Resume a paused run."""
    with open_ledger(database) as ledger:
        find_job(ledger, job).resume()
    say(f"Job {job} is asked to go on.")


@click.command()
@job_argument
@click.option("--now", is_flag=True, help="Abandon the current items; no attempt is counted.")
@database_option
def stop(job: str, database: str | None, *, now: bool) -> None:
    """Stop a run as Ctrl-C does: it finishes its current items. The same command continues the job."""
    with open_ledger(database) as ledger:
        find_job(ledger, job).stop(now=now)
    say(f"Job {job} is asked to stop{'' if now else ' when what it works on is finished'}.")


@click.command()
@job_argument
@click.argument("workers", type=Whole(1, MOST_WORKERS), metavar="N")
@database_option
def scale(job: str, workers: int, database: str | None) -> None:
    """Change the number of workers of a run, or of slots of a fleet. Current items are finished."""
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        found.scale(workers)
        by_fleet = (found.info().holder or {}).get("fleet") is not None
    if by_fleet:
        say(f"The fleet is asked to work on job {job} with {plural(workers, 'slot')}.")
    else:
        say(f"Job {job} is asked to work on {plural(workers, 'item')} at once.")
