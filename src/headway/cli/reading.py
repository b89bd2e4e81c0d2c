"""How a verb opens the ledger, finds a job in it, and prints what it found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from headway.cli import F
from headway.errors import NotFound, UsageError
from headway.telemetry import redact
from headway.wording import cut, printable

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.ledger import Job, JobInfo, Ledger

#: Completion may take so long; then it offers nothing rather than making somebody wait.
COMPLETION_SECONDS = 0.2


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def open_store(database: str | None) -> Database:
    """The database as the settings say. One that is not there is an error, never made by looking at it."""
    from headway._sql import connect
    from headway.config import Config

    return connect(Config(cli={"database": database}).text("database"), create=False)


def open_ledger(database: str | None) -> Ledger:
    from headway.ledger.ledger import Ledger

    return Ledger(open_store(database))


def find_job(ledger: Ledger, id: str) -> Job:
    """The job of that id; if there is none, the error names those that look alike."""
    try:
        return ledger.job(id)
    except NotFound as error:
        from difflib import get_close_matches

        close = get_close_matches(id, [info.id for info in ledger.jobs(archived=True)], 3)
        if close:
            error.hint = f"Did you mean {' or '.join(close)}? List them: headway jobs"
        raise


def job_argument(function: F) -> F:
    return click.argument("job", shell_complete=_within_time(_job_ids))(function)


def cause_option(help: str) -> Callable[[F], F]:
    return click.option(
        "--cause", type=click.IntRange(1), metavar="N", help=help, shell_complete=_within_time(_cause_numbers)
    )


Completer = Callable[[click.Context, click.Parameter, str], list[Any]]  # str or CompletionItem


def _within_time(find: Callable[[click.Context, str], list[Any]]) -> Completer:
    """Ask the store in the time there is. Completion never shows an error: it offers nothing instead."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:  # noqa: ARG001  # click's
        import threading

        import headway.config
        import headway.ledger.ledger  # noqa: F401  # loaded before the time begins: it is the store's time

        found: list[Any] = []

        def look() -> None:
            try:
                found.extend(find(ctx, incomplete))
            except Exception:  # noqa: BLE001  # whatever is wrong with the store, the shell is no place to say it
                found.clear()

        looker = threading.Thread(target=look, daemon=True)
        looker.start()
        looker.join(COMPLETION_SECONDS)
        return [] if looker.is_alive() else found

    return complete


def _job_ids(ctx: click.Context, incomplete: str) -> list[Any]:
    with open_ledger(ctx.params.get("database")) as ledger:
        return [info.id for info in ledger.jobs() if info.id.startswith(incomplete)]


def _cause_numbers(ctx: click.Context, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    # While the value of an option is missing, click has not told arguments apart yet: the job is the first word.
    job = ctx.params["job"] or next(word for word in ctx.args if not word.startswith("-"))
    with open_ledger(ctx.params.get("database")) as ledger:
        return [
            CompletionItem(str(cause.no), help=f"{cause.dead} x {printable(cause.type)}")
            for cause in ledger.job(job).causes()
            if str(cause.no).startswith(incomplete)
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def confirm(question: str, *, yes: bool) -> None:
    """Ask before records are changed. Where nobody can answer, refuse and name the flag."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody can answer that here.", hint="Say it on the command line: --yes")
    click.confirm(question, abort=True, err=True)


def with_database(command: str, database: str | None) -> str:
    """A command to type next, with the database that was named for this one."""
    return f"{command} --database {redact(database)}" if database else command


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def put(text: str = "") -> None:
    """A line of data on stdout; what its encoding lacks is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        # The reader has what it wanted (| head): not an error. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None


def put_json(schema: str, **facts: object) -> None:
    """One document. ``schema`` names its keys and their version: keys are added, never changed, within one."""
    put(json.dumps({"schema": f"headway.{schema}", **facts}, indent=2))


def put_json_rows(schema: str, name: str, rows: Iterable[Mapping[str, object]], **facts: object) -> None:
    """One document with a row per line, written as it is read: a million rows need no memory."""
    head = json.dumps({"schema": f"headway.{schema}", **facts})
    put(f'{head[:-1]}, "{name}": [')
    earlier: str | None = None
    for row in rows:
        if earlier is not None:
            put(earlier + ",")
        earlier = json.dumps(row)
    put(f"{earlier or ''}]}}")


def put_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Columns; those named in ``right`` are numbers. On a terminal the last column is cut to what fits."""
    for line in table(heads, rows, right=right, columns=terminal_columns()):
        put(line)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), columns: int | None = None
) -> list[str]:
    cells = [list(heads), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = []
    for row in cells:
        fields = [
            f"{cell:>{width}}" if head in right else f"{cell:<{width}}"
            for head, cell, width in zip(heads, row, widths, strict=True)
        ]
        line = "  ".join(fields).rstrip()
        lines.append(line if columns is None else cut(line, columns))
    return lines


def terminal_columns() -> int | None:
    """How wide the terminal is; None where stdout is none, so that nothing is cut that a program will read."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size

    return get_terminal_size().columns


def iso(at: datetime | None) -> str | None:
    """A time as programs read it: UTC, to the millisecond."""
    return None if at is None else at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(at: datetime | None) -> str:
    """A time as people read it: local, to the second."""
    return "" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def job_facts(info: JobInfo) -> dict[str, object]:
    """A job as every ``--json`` says it."""
    return {
        "id": info.id,
        "status": info.status,
        "function": info.function,
        "source": redact(info.source),
        "total": info.total,
        "done": info.done,
        "pending": info.remaining - info.failed,
        "retrying": info.failed,
        "dead": info.dead,
        "failures": info.failures,
        "percent": round(info.percent, 2),
        "sealed": info.sealed,
        "archived": info.archived,
        "max_retries": info.max_retries,
        "created_at": iso(info.created_at),
        "updated_at": iso(info.updated_at),
        "finished_at": iso(info.finished_at),
        "holder": {"host": info.holder["host"], "pid": info.holder["pid"]} if info.holder and info.held else None,
        "command": redact(info.command),
    }
