"""The command line. Each group of commands is a module, imported when one of its commands is used."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NoReturn, TextIO, TypeVar

import click

from headway import __version__
from headway.core.text import cut, printable, shows_color, with_option
from headway.errors import HeadwayError, StorageError

F = TypeVar("F", bound=Callable[..., Any])  # click's decorators accept any function

#: Command -> module and function.
COMMANDS: dict[str, str] = {
    "run": "headway.cli.jobs.run:run",
    "jobs": "headway.cli.jobs.listing:jobs",
    "show": "headway.cli.jobs.listing:show",
    "status": "headway.cli.jobs.listing:status",
    "runs": "headway.cli.jobs.listing:runs",
    "items": "headway.cli.jobs.items:items",
    "item": "headway.cli.jobs.items:item",
    "log": "headway.cli.jobs.items:log",
    "results": "headway.cli.jobs.results:results",
    "pause": "headway.cli.jobs.control:pause",
    "resume": "headway.cli.jobs.control:resume",
    "stop": "headway.cli.jobs.control:stop",
    "scale": "headway.cli.jobs.control:scale",
    "dead": "headway.cli.jobs.dead:dead",
    "retry": "headway.cli.jobs.dead:retry",
    "progress": "headway.cli.finishline:progress",
    "project": "headway.cli.finishline:project",
    "states": "headway.cli.states:group",
    "worker": "headway.cli.services.queue:worker",
    "queues": "headway.cli.services.queue:queues",
    "tasks": "headway.cli.services.queue:tasks",
    "task": "headway.cli.services.queue:task",
    "queue": "headway.cli.services.queue:queue",
    "workers": "headway.cli.services.queue:workers",
    "watch": "headway.cli.services.watch:watch",
    "relay": "headway.cli.services.relay:relay",
    "notify": "headway.cli.services.notify:notify",
    "serve": "headway.cli.services.serve:serve",
    "open": "headway.cli.services.serve:open_",
    "token": "headway.cli.services.serve:token",
    "alerts": "headway.cli.services.alerts:alerts",
    "demo": "headway.cli.services.demo:demo",
    "forget": "headway.cli.admin:forget",
    "purge": "headway.cli.admin:purge",
    "audit": "headway.cli.admin:audit",
    "doctor": "headway.cli.doctor:doctor",
    "config": "headway.cli.admin:config",
    "completion": "headway.cli.completion:completion",
}

#: The groups of ``headway --help``.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Run and look": ("run", "jobs", "show", "status", "runs", "items", "item", "log", "results"),
    "Control a run": ("pause", "resume", "stop", "scale"),
    "Repair": ("dead", "retry"),
    "Projects": ("progress", "project"),
    "States": ("states",),
    "Queue": ("worker", "queues", "tasks", "task", "queue", "workers"),
    "Watch and serve": ("serve", "open", "token", "watch", "relay", "notify", "alerts", "demo"),
    "Maintenance": ("doctor", "config", "audit", "forget", "purge", "completion"),
}

#: The example at the end of each command's help.
EXAMPLES: dict[str, str] = {
    "run": "headway run ads:make_ad --items products.jsonl --job ads",
    "jobs": "headway jobs --watch",
    "show": "headway show ads",
    "status": "headway status --json",
    "runs": "headway runs ads",
    "items": "headway items ads --status dead --limit 20",
    "item": "headway item ads sku-44 --traceback",
    "log": "headway log ads --tsv | grep TimeoutError",
    "results": "headway results ads --output ads.csv",
    "pause": "headway pause ads",
    "resume": "headway resume ads",
    "stop": "headway stop ads",
    "scale": "headway scale ads 8",
    "dead": "headway dead list",
    "dead list": "headway dead list ads",
    "dead show": "headway dead show ads --cause 1",
    "dead export": "headway dead export ads --payload > dead.jsonl",
    "dead retry": "headway dead retry ads --cause 1",
    "retry": "headway retry ads --item sku-44 --reason 'the parser is repaired'",
    "progress": "headway progress crawl-7 --watch",
    "project": "headway project create crawl-7 --total 120",
    "project create": "headway project create crawl-7 --total 120",
    "project total": "headway project total crawl-7 150",
    "project status": "headway project status crawl-7 CRAWLING",
    "project finish-crawl": "headway project finish-crawl crawl-7 --total 150",
    "project delete": "headway project delete crawl-7",
    "states": "headway states nightly --follow",
    "states show": "headway states show nightly --tag ingest",
    "states wait": "headway states wait nightly --tag ingest --timeout 600",
    "states jobs": "headway states jobs --json",
    "states delete": "headway states delete nightly",
    "states purge": "headway states purge --older-than 30",
    "worker": "headway worker --app shop:queue --workers 2 --max-workers 8",
    "queues": "headway queues",
    "tasks": "headway tasks --status failed --limit 20",
    "task": "headway task show 7f3a",
    "task show": "headway task show 7f3a",
    "task cancel": "headway task cancel 7f3a",
    "task retry": "headway task retry 7f3a",
    "queue": "headway queue pause low --reason 'upgrade of the model'",
    "queue pause": "headway queue pause low --reason 'upgrade of the model' --for 3600",
    "queue resume": "headway queue resume low",
    "queue limit": "headway queue limit queue low --concurrency 1",
    "queue set": "headway queue set memory_limit 800",
    "queue unset": "headway queue unset memory_limit",
    "queue settings": "headway queue settings",
    "queue migrate": "headway queue migrate --to rq --app shop:queue --dry-run",
    "workers": "headway workers --json",
    "workers drain": "headway workers drain web-1.4711.a1b2c3d4",
    "workers stop": "headway workers stop web-1.4711.a1b2c3d4",
    "workers remove": "headway workers remove web-1.4711.a1b2c3d4",
    "watch": "headway watch --queue digits --channel digits:events --stuck-timeout 3600",
    "relay": "headway relay --status",
    "notify": "headway notify test",
    "notify test": "headway notify test slack://hooks.slack.com/services/T000/B000/SECRET",
    "serve": "headway serve --open",
    "open": "headway open --link",
    "token": "headway token create anna --role operator",
    "token create": "headway token create anna --role operator --days 90",
    "token list": "headway token list",
    "token revoke": "headway token revoke 3f9a04c1b2d7",
    "alerts": "headway alerts --rules",
    "alerts ack": "headway alerts ack 7",
    "alerts mute": "headway alerts mute backlog --for 2h",
    "alerts unmute": "headway alerts unmute backlog",
    "alerts watch": "headway alerts watch",
    "demo": "headway demo --open",
    "doctor": "headway doctor",
    "config": "headway config --show-origin",
    "audit": "headway audit ads",
    "forget": "headway forget ads",
    "purge": "headway purge --older-than 90",
    "completion": "headway completion bash",
}

#: Every exit code and its meaning.
EXIT_CODES: dict[int, str] = {
    0: "everything is done",
    1: "headway failed: a bug, or the storage",
    2: "usage or configuration: nothing was changed",
    3: "finished, and some items are dead",
    4: "stopped by --max-failures",
    5: "refused: another process runs the job, or its items or function have changed",
    6: "a server cannot be reached",
    130: "interrupted by Ctrl-C, state saved",
    143: "interrupted by SIGTERM, state saved",
}


class LazyGroup(click.Group):
    """Imports a command's module on first use, so that start-up stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        _give_example(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section; those without a section come last."""
        named = {name for names in SECTIONS.values() for name in names}
        others = tuple(name for name in COMMANDS if name not in named)
        for title, names in [*SECTIONS.items(), ("Others", others)]:
            rows = []
            for name in names:
                command = self.get_command(ctx, name)
                assert command is not None
                rows.append((name, command.get_short_help_str(300)))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, 1)
            advice = f"Did you mean '{close[0]}'?" if close else "See them all: headway --help"
            raise click.UsageError(f"{error.message} {advice}", ctx) from error


def _give_example(command: click.Command, path: str) -> None:
    """Append the example to the help of a command and of its subcommands."""
    example = EXAMPLES.get(path)
    if example is not None:  # assigned each time: a command may have two names
        command.epilog = f"\b\nExample:\n  {example}"
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _give_example(inner, f"{path} {name}")


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="headway", message="%(prog)s %(version)s")
def headway() -> None:
    """Durable progress for long work: run a function over many items, lose nothing, see what failed and why."""


def database_option(function: F) -> F:
    """Add ``--database URL`` to a command. None: use the settings."""
    return click.option(
        "--database", "-d", metavar="URL", callback=_note_database,
        help="Database with the records.  [default: sqlite:///headway.db]",
    )(function)  # fmt: skip


def _note_database(ctx: click.Context, parameter: click.Parameter, database: str | None) -> str | None:  # noqa: ARG001  # click's
    """Remember the database, because suggested commands need it too: see `typed`."""
    _named.set(database)
    return database


#: The ``--database`` of the current command.
_named: ContextVar[str | None] = ContextVar("named", default=None)


def typed(text: str) -> str:
    """Add ``--database`` to each command in ``text`` if this command was given one."""
    database = _named.get()
    if database is None or "headway " not in text:
        return text
    from headway import config

    return with_option(text, config.database_option(database), _takes_database)


def _takes_database(command: str) -> bool:
    """Return whether the command accepts ``--database`` and does not have it yet."""
    found: click.Command = headway
    words = command.split()[1:]
    while isinstance(found, click.Group) and words:
        inner = found.get_command(click.Context(found), words[0])
        if inner is None:
            break
        found = inner
        del words[0]
    taken = {name for option in found.params if isinstance(option, click.Option) for name in option.opts}
    return "--database" in taken and not any(word == "--" or word.startswith(("--database", "-d")) for word in words)


def json_option(function: F) -> F:
    """Add ``--json`` to a command that reads."""
    return click.option("--json", "as_json", is_flag=True, help="Machine-readable output with stable keys.")(function)


def say(text: str = "") -> None:
    """Print a message to stderr. Stdout is for data."""
    click.echo(text, err=True)


def fail(error: HeadwayError) -> int:
    """Print an error with its hint and return its exit code."""
    stream = sys.stderr
    colored = stream is not None and shows_color(os.environ.get("HEADWAY_COLOR", "auto"), stream, os.environ)
    click.echo(
        (click.style("Error: ", fg="red", bold=True) if colored else "Error: ") + _readable(str(error)),
        err=True,
        color=colored,
    )
    if error.hint:
        say(f"  {_readable(typed(error.hint))}")
    return error.exit_code


def _readable(text: str) -> str:
    """Remove control characters and limit the length, because the text may repeat user input."""
    return cut("\n".join(printable(line) for line in text.split("\n")), 2000)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with one of `EXIT_CODES`."""
    from headway.core.lifecycle import wait_for_children

    wait_for_children()
    code = invoke(arguments)
    # The process ends now. Without freeze a last garbage collection would take a sixth of a short command's time.
    gc.freeze()
    sys.exit(code)


def invoke(arguments: list[str] | None = None) -> int:
    if os.environ.get("_HEADWAY_COMPLETE") == "powershell_complete":
        import_module("headway.cli.completion")  # click supports the other shells itself
    _named.set(None)
    _show_warnings_plainly()
    try:
        result = headway.main(args=arguments, prog_name="headway", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HeadwayError as error:
        return fail(error)
    except click.exceptions.Exit as exit:
        return exit.exit_code
    except click.exceptions.Abort:
        say("Aborted.")
        return 130
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            from difflib import get_close_matches

            # click suggests up to three, in alphabetical order: for --worker also --key
            vars(error)["possibilities"] = get_close_matches(error.option_name, error.possibilities, 1)
        vars(error)["message"] = _readable(error.message)  # typed as final
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _output_lost(error)
    except SystemExit:
        if not type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            raise
        return _output_lost(BrokenPipeError(errno.EPIPE, ""))  # click exits like this when stdout was closed


def _show_warnings_plainly() -> None:
    """Print Headway's own warnings as one line, without the file and the line of the source."""
    show = warnings.showwarning
    if getattr(show, "plain", False):
        return

    def shown(message: Warning | str, category: type[Warning], *position: Any, **more: Any) -> None:
        if category.__module__.partition(".")[0] == "headway":
            say(f"Warning: {message}")
        else:
            show(message, category, *position, **more)

    vars(shown)["plain"] = True
    warnings.showwarning = shown


def _output_lost(error: OSError) -> int:
    """Handle a failed write to stdout: the reader has exited, or the disk is full. Raise any other OSError."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF):
        raise error
    _discard(sys.stdout)
    try:
        return 0 if isinstance(error, BrokenPipeError) else fail(output_lost(error))
    except OSError:  # stderr is closed too
        _discard(sys.stderr)
        return 1


def output_lost(error: OSError) -> HeadwayError:
    return StorageError(f"The output cannot be written: {error.strerror or error}.", hint="Write it elsewhere.")


def _discard(stream: TextIO | None) -> None:
    """Redirect a stream to /dev/null, so that Python does not try to flush it again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or missing
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]  # None is suppressed
