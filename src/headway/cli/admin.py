"""``forget``, ``purge``, ``audit`` and ``config``: retention, the audit trail and the settings."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from headway.cli import database_option, json_option, say
from headway.cli.toolkit import (
    MOST_DAYS,
    Number,
    clock,
    confirm,
    job_argument,
    open_ledger,
    open_reader,
    optional_job_argument,
    put,
    put_json,
    put_table,
    yes_option,
)
from headway.core.text import plural
from headway.errors import UsageError
from headway.views.jobs.listing import find_job
from headway.views.system.records import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headway.ledger import JobInfo, Ledger


@click.command()
@job_argument
@yes_option
@database_option
def forget(job: str, database: str | None, *, yes: bool) -> None:
    """Delete a job with all its records. The audit trail keeps an entry."""
    with open_ledger(database) as ledger:
        info = find_job(ledger, job).info()
        confirm(f"Delete job {job} with its {plural(info.total, 'item')}?", yes=yes)
        total = ledger.forget(job)
    say(f"Job {job} and its {plural(total, 'item')} are deleted.")


@click.command()
@click.option(
    "--older-than",
    type=Number(0, MOST_DAYS),
    metavar="DAYS",
    help="Jobs unchanged for this many days.  [default: the setting retention_days]",
)
@yes_option
@database_option
def purge(database: str | None, *, older_than: float | None, yes: bool) -> None:
    """Delete old finished jobs, and old jobs that a fresh start has archived."""
    days = _retention(database) if older_than is None else older_than
    with open_ledger(database) as ledger:
        old = _purgeable(ledger, days)
        if old:
            items = sum(info.total for info in old)
            names = ", ".join(info.id for info in old[:5]) + (", ..." if len(old) > 5 else "")
            confirm(f"Delete {plural(len(old), 'job')} ({names}) with {plural(items, 'item')}?", yes=yes)
        gone = ledger.purge(older_than=days * 86400)
    say(f"{plural(len(gone), 'job')} deleted that had not changed for {days:g} days.")


def _retention(database: str | None) -> float:
    from headway.config import Config

    days = Config(cli={"database": database})["retention_days"]
    if not isinstance(days, int | float):
        raise UsageError(
            "The setting retention_days is off: jobs are kept for good.", hint="Say how old: --older-than DAYS"
        )
    return float(days)


def _purgeable(ledger: Ledger, days: float) -> list[JobInfo]:
    from headway.ledger.values import utc

    limit = ledger.database.now() - timedelta(days=days).total_seconds()
    if limit < 0:  # older than the first representable date: no job
        return []
    jobs = ledger.jobs(archived=True)
    return [info for info in jobs if (info.finished_at is not None or info.archived) and info.updated_at < utc(limit)]


@click.command()
@optional_job_argument
@json_option
@database_option
def audit(job: str | None, database: str | None, *, as_json: bool) -> None:
    """Show who changed recorded work, when and why, oldest first: resets, retries, purges, corrections."""
    with open_reader(database) as reader:
        found = reader.audit(job)
    if as_json:
        put_json(found)
    elif found.audit:
        rows = [[clock(one.at), one.actor, one.action, one.job, _in_words(one.detail)] for one in found.audit]
        put_table(["WHEN", "WHO", "WHAT", "JOB", "DETAIL"], rows, whole=("WHAT",), drop=("WHO",))
    else:
        say("Nothing is in the audit trail" + (f" about {job}." if job else "."))


def _in_words(detail: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in detail.items() if value not in (None, ""))


@click.command()
@click.option("--show-origin", is_flag=True, help="Show the origin of each value.")
@json_option
@database_option
def config(database: str | None, *, show_origin: bool, as_json: bool) -> None:
    """Show the settings in force, with passwords and tokens masked.

    A setting comes from the command line, else from HEADWAY_NAME in the environment, else from headway.toml. Otherwise
    it is derived from another setting, or is the default.
    """
    from headway.config import Config

    found = read_settings(Config(cli={"database": database}))
    if as_json:
        put_json(found)
        return
    for name, setting in found.settings.items():
        put(f"{name} = {_as_toml(setting.value)}" + (f"    # {setting.origin}" if show_origin else ""))


def _as_toml(value: object) -> str:
    """Format a value as in headway.toml."""
    match value:
        case None:
            return "none"
        case str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(_as_toml(part) for part in value)}]"
        case _:
            return str(value)
