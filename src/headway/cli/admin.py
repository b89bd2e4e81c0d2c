"""``forget``, ``purge``, ``audit`` and ``config``: what is kept, for how long, who changed it, by which settings."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from headway.cli import database_option, json_option, say
from headway.cli.reading import (
    clock,
    confirm,
    find_job,
    iso,
    job_argument,
    open_ledger,
    put,
    put_json,
    put_table,
)
from headway.errors import HeadwayError, UsageError
from headway.telemetry import names_a_secret, redact
from headway.wording import plural

if TYPE_CHECKING:
    from headway.config import Setting
    from headway.ledger import JobInfo, Ledger

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.command()
@job_argument
@yes_option
@database_option
def forget(job: str, database: str | None, *, yes: bool) -> None:
    """Delete a job with all its records. The audit trail keeps that it was there."""
    with open_ledger(database) as ledger:
        info = find_job(ledger, job).info()
        confirm(f"Delete job {job} with its {plural(info.total, 'item')}?", yes=yes)
        total = ledger.forget(job)
    say(f"Job {job} and its {plural(total, 'item')} are deleted.")


@click.command()
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    metavar="DAYS",
    help="Jobs that have not changed for so many days.  [default: the setting retention_days]",
)
@yes_option
@database_option
def purge(database: str | None, *, older_than: float | None, yes: bool) -> None:
    """Delete finished jobs, and those a fresh start has put aside, once they are old."""
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

    limit = utc(ledger.database.now()) - timedelta(days=days)
    jobs = ledger.jobs(archived=True)
    return [info for info in jobs if (info.finished_at is not None or info.archived) and info.updated_at < limit]


@click.command()
@click.argument("job", required=False)
@json_option
@database_option
def audit(job: str | None, database: str | None, *, as_json: bool) -> None:
    """Show who changed recorded work, when and why: resets, retries, purges, corrections. Oldest first."""
    from headway.ledger.values import utc

    with open_ledger(database) as ledger:
        entries = list(ledger.audit_trail(job))
    if as_json:
        rows = [
            {"at": iso(utc(at)), "actor": actor, "action": action, "job": name, "detail": json.loads(detail)}
            for at, actor, action, name, detail in entries
        ]
        put_json("audit/1", audit=rows)
    elif entries:
        cells = [
            [clock(utc(at)), actor, action, name, _in_words(detail)] for at, actor, action, name, detail in entries
        ]
        put_table(["WHEN", "WHO", "WHAT", "JOB", "DETAIL"], cells)
    else:
        say("Nothing is in the audit trail" + (f" about {job}." if job else "."))


def _in_words(detail: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in json.loads(detail).items() if value not in (None, ""))


@click.command()
@click.option("--show-origin", is_flag=True, help="Say where each value comes from.")
@json_option
@database_option
def config(database: str | None, *, show_origin: bool, as_json: bool) -> None:
    """Show the settings in force. Passwords and tokens in them are masked.

    A setting comes from the command line, else from HEADWAY_NAME in the environment, else from headway.toml, else it
    is the default.
    """
    from headway.config import Config

    found = Config(cli={"database": database}).items()
    if as_json:
        settings = {
            option.name: {"value": _masked(option.name, entry.value), "origin": entry.origin, "help": option.help}
            for option, entry in found
        }
        put_json("config/1", settings=settings)
        return
    for option, entry in found:
        value = _masked(option.name, entry.value)
        text = f'"{value}"' if isinstance(value, str) else "none" if value is None else f"{value}"
        put(f"{option.name} = {text}" + (f"    # {entry.origin}" if show_origin else ""))


def _masked(name: str, value: Setting) -> Setting:
    """A value as it may be shown. The path of a webhook is as good as a password."""
    if not isinstance(value, str):
        return value
    if names_a_secret(name):
        return "***"
    if name == "webhook":
        address = urlsplit(value)
        return f"{address.scheme}://{address.hostname or ''}/***"
    if name == "sinks":
        from headway.events import open_sinks

        try:
            return ", ".join(sink.name for sink in open_sinks(value))
        except HeadwayError as error:
            return f"*** ({error})"
    return redact(value)
