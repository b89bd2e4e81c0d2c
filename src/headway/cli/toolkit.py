"""Shared parts of all commands: open the store, confirm, print tables and JSON, parse numbers, complete words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from headway.cli import F
from headway.core.text import cells, cut, printable
from headway.errors import UsageError
from headway.telemetry import redact

if TYPE_CHECKING:
    from datetime import datetime

    from headway._sql import Database
    from headway.client import Client
    from headway.config import Config
    from headway.ledger import Ledger
    from headway.views.reading import Reader
    from headway.views.shape import Document

#: Time limit of completion, in seconds. Afterwards nothing is suggested.
COMPLETION_SECONDS = 0.2
#: Maximum age in days that a date can represent.
MOST_DAYS = 365_000
#: Width to which text columns are cut first, and the width below which they are dropped.
READABLE = 24
NARROWEST = 8


# ---------------------------------------------------------------------------------------------------------------------
# Opening


def open_store(database: str | None) -> Database:
    """Open the database of the settings. Raises `NotFound` if it does not exist."""
    from headway._sql import connect
    from headway.config import Config, is_server

    address = Config(cli={"database": database}).text("database")
    if is_server(address):
        raise UsageError(
            "This needs the database itself; a server answers the verbs that only read.",
            hint="Run it where the database can be reached, or use the server's own pages.",
        )
    return connect(address, create=False)


def open_reader(database: str | None) -> Reader | Client:
    """Open a reader for the database of the settings, or for the server that they name."""
    from headway.config import Config

    return reader_of(Config(cli={"database": database}))


def reader_of(config: Config, setting: str = "database") -> Reader | Client:
    from headway.config import is_server

    if is_server(config.text(setting)):
        from headway.client import Client

        token = config["token"]
        return Client(config.text(setting), None if token is None else str(token))
    from headway.views.reading import Reader

    return Reader(config)


def open_ledger(database: str | None) -> Ledger:
    from headway.ledger.ledger import Ledger

    return Ledger(open_store(database))


def with_database(command: str, database: str | None) -> str:
    """Return a suggested command with the ``--database`` of this one."""
    if not database:
        return command
    from shlex import quote

    return f"{command} --database {quote(redact(database))}"


# ---------------------------------------------------------------------------------------------------------------------
# Arguments and options


class Number(click.types.FloatParamType):
    """A number within bounds, which also exclude NaN and values that no clock or date can hold."""

    def __init__(self, minimum: float = 0.0, maximum: float = 1e9) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not self.minimum <= number <= self.maximum:
            self.fail(f"{value} is not a number from {self.minimum:g} to {self.maximum:,.0f}.", param, ctx)
        return number


class Whole(click.types.IntParamType):
    """A whole number within bounds; by default those of both SQL engines."""

    def __init__(self, minimum: int = 0, maximum: int = 2**63 - 1) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not self.minimum <= number <= self.maximum:
            self.fail(f"{value!s:.40} is not a whole number from {self.minimum} to {self.maximum:,}.", param, ctx)
        return number


def job_argument(function: F) -> F:
    return click.argument("job", shell_complete=_within_time(_job_ids))(function)


def optional_job_argument(function: F) -> F:
    return click.argument("job", required=False, shell_complete=_within_time(_job_ids))(function)


def cause_option(help: str) -> Callable[[F], F]:
    return click.option("--cause", type=Whole(1), metavar="N", help=help, shell_complete=_within_time(_cause_numbers))


def limit_option(default: int, help: str) -> Callable[[F], F]:
    return click.option("--limit", type=Whole(1, 100_000), default=default, show_default=True, help=help)


def yes_option(function: F) -> F:
    """Add ``--yes`` to a command that asks for confirmation."""
    return click.option("--yes", "-y", is_flag=True, help="Do not ask.")(function)


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation before changing records. Without a terminal, refuse and name ``--yes``."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"{question} There is no terminal to confirm it.", hint="Confirm it on the command line: --yes"
        )
    click.confirm(question, abort=True, err=True)


# ---------------------------------------------------------------------------------------------------------------------
# Completion

Completer = Callable[[click.Context, click.Parameter, str], list[Any]]  # str or CompletionItem


def _within_time(find: Callable[[click.Context, str], list[Any]]) -> Completer:
    """Run a completion function with a time limit. On any error it suggests nothing."""

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

    # click has not parsed the arguments while an option's value is incomplete: the job is the first word.
    job = ctx.params["job"] or next(word for word in ctx.args if not word.startswith("-"))
    with open_ledger(ctx.params.get("database")) as ledger:
        return [
            CompletionItem(str(cause.no), help=f"{cause.dead} x {printable(cause.type)}")
            for cause in ledger.job(job).causes()
            if str(cause.no).startswith(incomplete)
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def put(text: str = "", *, end: str = "\n") -> None:
    """Print a line of data to stdout, escaping characters that its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding) + end, nl=False)


def put_json(document: Document) -> None:
    """Print a view as a JSON document."""
    import json

    put(json.dumps(document.as_json(), indent=2))


def put_json_line(document: Document) -> None:
    """Print a view as one line of JSON."""
    import json

    put(json.dumps(document.as_json()))


def put_json_rows(schema: str, facts: dict[str, object], name: str, rows: Iterable[object]) -> None:
    """Print a document with one row per line, as the rows are read, in constant memory."""
    import json

    from headway.views.shape import plain

    head = json.dumps({"schema": schema, **facts})
    put(f'{head[:-1]}, "{name}": [')
    earlier: str | None = None
    for row in rows:
        if earlier is not None:
            put(earlier + ",")
        earlier = json.dumps(plain(row))
    put(f"{earlier or ''}]}}")


def put_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """Print columns, fitted to the terminal; see `table`."""
    for line in table(heads, rows, right=right, whole=whole, drop=drop, columns=terminal_columns()):
        put(line)


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    drop: Sequence[str] = (),
    columns: int | None = None,
) -> list[str]:
    """Return the lines of a table that is at most ``columns`` cells wide.

    Columns in ``right`` are numbers, aligned right. They and those in ``whole`` and ``drop`` are never cut. If there is
    not enough room, the widest texts are cut first, then the columns of ``drop`` are removed in order, then texts are
    cut further. The first column names the row and is cut last.
    """
    printed = [list(heads), *([printable(cell) for cell in row] for row in rows)]
    shown = list(range(len(heads)))
    widths = [max(cells(row[column]) for row in printed) for column in shown]
    if columns is not None:
        shown, widths = _fit(
            heads, widths, {*right, *whole, *drop}, [list(heads).index(name) for name in drop], columns
        )
    lines = []
    for row in printed:
        fields = [_field(row[column], widths[column], numeric=heads[column] in right) for column in shown]
        line = "  ".join(fields).rstrip()
        lines.append(line if columns is None else cut(line, columns))
    return lines


def _fit(
    heads: Sequence[str], natural: Sequence[int], uncut: set[str], going: list[int], columns: int
) -> tuple[list[int], list[int]]:
    """Return the columns to show and their widths."""
    shown = list(range(len(heads)))
    while True:
        widths, narrowest = list(natural), READABLE if going else NARROWEST
        over = sum(widths[column] for column in shown) + 2 * (len(shown) - 1) - columns
        texts = [column for column in shown[1:] if heads[column] not in uncut]
        while over > 0 and any(widths[column] > narrowest for column in texts):
            widest = max(texts, key=lambda column: widths[column])
            widths[widest] -= 1
            over -= 1
        if over <= 0 or not going:
            break
        shown.remove(going.pop(0))
    if over > 0:
        widths[0] = max(NARROWEST, widths[0] - over)
    return shown, widths


def _field(text: str, width: int, *, numeric: bool) -> str:
    text = cut(text, width)
    padding = " " * (width - cells(text))
    return padding + text if numeric else text + padding


def wrapped(parts: Sequence[str], *, columns: int, indent: str = "  ") -> list[str]:
    """Join ``parts`` on as many lines as needed, without breaking a part."""
    lines = [indent]
    for part in parts:
        if lines[-1].strip() and cells(lines[-1]) + 1 + cells(part) > columns:
            lines.append(indent)
        lines[-1] += (" " if lines[-1].strip() else "") + part
    return lines


def item_name(key: str | None, payload: object, most: int = 60) -> str:
    """Return the name to show for an item: its key, or a short form of its payload, or an empty text."""
    from headway.views.shape import ABSENT

    if key is not None:
        return printable(key)
    if payload is ABSENT or payload is None:
        return ""
    import json

    return cut(printable(payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)), most)


def terminal_columns() -> int | None:
    """Return the terminal's width; None if stdout is not a terminal, so that nothing is cut."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size

    return max(20, get_terminal_size().columns)


def clock(at: datetime | None) -> str:
    """Format a time in local time, to the second."""
    return "" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
