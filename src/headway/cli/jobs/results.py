"""``results``: the return values of items."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headway.cli import database_option, say
from headway.cli.toolkit import job_argument, open_ledger, put
from headway.core.text import plural
from headway.errors import InvalidInput, UsageError
from headway.views.jobs.listing import find_job

if TYPE_CHECKING:
    from headway.ledger import Job

#: Poll interval of --follow, in seconds.
FOLLOW_SECONDS = 0.3


@click.command()
@job_argument
@click.option(
    "--format", "format_", type=click.Choice(["jsonl", "csv", "json"]), help="[default: by the file's name, else jsonl]"
)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write a file instead of stdout.")
@click.option("--with-input", is_flag=True, help="Include the item with its result, unmasked.")
@click.option("--follow", "-f", is_flag=True, help="Print results as they are recorded, until the run ends.")
@database_option
def results(
    job: str, database: str | None, *, format_: str | None, output: Path | None, with_input: bool, follow: bool
) -> None:
    """Print what the items returned, by index."""
    from headway.run.output import results as kept

    if follow and (output is not None or with_input or format_ not in (None, "jsonl")):
        raise UsageError(
            "--follow prints JSON lines as they are recorded.", hint="Leave out --format, --output and --with-input."
        )
    format = format_ or ("jsonl" if output is None else output.suffix.lower().removeprefix("."))
    if format not in kept.FORMATS:
        raise UsageError(f"The format of {output} is unknown.", hint="Add --format jsonl, csv or json.")
    with open_ledger(database) as ledger:
        found = find_job(ledger, job)
        _write_utf8()
        if follow:
            for text in _follow(found):
                put(text, end="")
            _say_what_is_left(found)
            return
        if output is None:
            for text in kept.lines(found, format, say, with_input=with_input):
                put(text, end="")
        else:
            if output.exists():
                raise InvalidInput(f"{output} already exists.", hint="Move it, or name another --output.")
            if not output.absolute().parent.is_dir():
                raise InvalidInput(f"The directory of {output} does not exist.", hint="Create it first.")
            kept.write_whole(output, kept.lines(found, format, say, with_input=with_input))
        missing = found.unkept_results()
        if missing:
            what = f"{plural(missing, 'result')} {'was' if missing == 1 else 'were'} not kept"
            say(f"{what}: not JSON, very long, or of a run with --no-results.")


def _write_utf8() -> None:
    """Write UTF-8 to files and programs, as ``--output`` does: escaped letters would not be valid JSON."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")


def _say_what_is_left(job: Job) -> None:
    """Report how many items are left after an interrupted or killed run."""
    info = job.info()
    if info.remaining and not info.held:
        left = f"{plural(info.remaining, 'item')} {'is' if info.remaining == 1 else 'are'} left"
        say(f"The run has ended, and {left}." + (f" Continue:  {info.command}" if info.command else ""))


def _follow(job: Job) -> Iterator[str]:
    """Yield each result once, as JSON lines, until the run ends.

    The slots of a fleet record concurrently, so a lower sequence number may be committed after a higher one. Each poll
    therefore repeats the range of the previous poll, and the last one reads all results.
    """
    from headway.run.output import results as kept

    printed = bytearray()
    after = last = 0
    while True:
        running = job.info().held  # read first: results recorded after it are found by one more poll
        began, last = last if running else 0, after
        for seq, found in kept.as_they_came(job, began):
            printed.extend(bytes(max(0, found.index + 1 - len(printed))))
            if not printed[found.index]:
                printed[found.index] = 1
                yield kept.line(found)
            after = max(after, seq)
        if not running:
            return
        time.sleep(FOLLOW_SECONDS)
