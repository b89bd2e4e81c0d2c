"""The command line. Each group of verbs is a module of its own, imported when one of its verbs is typed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn, TypeVar

import click

from headway import __version__
from headway.errors import HeadwayError
from headway.wording import shows_color

F = TypeVar("F", bound=Callable[..., Any])  # click's decorators take and give any function

#: verb -> where it lives, in the order ``headway --help`` shows them.
COMMANDS: dict[str, str] = {
    "run": "headway.cli.run:run",
    "jobs": "headway.cli.jobs:jobs",
    "show": "headway.cli.jobs:show",
    "status": "headway.cli.jobs:status",
    "runs": "headway.cli.jobs:runs",
    "items": "headway.cli.items:items",
    "item": "headway.cli.items:item",
    "dead": "headway.cli.dead:dead",
    "retry": "headway.cli.dead:retry",
    "log": "headway.cli.items:log",
    "progress": "headway.cli.finishline:progress",
    "project": "headway.cli.finishline:project",
    "states": "headway.cli.states:group",
    "watch": "headway.cli.watch:watch",
    "relay": "headway.cli.relay:relay",
    "forget": "headway.cli.admin:forget",
    "purge": "headway.cli.admin:purge",
    "audit": "headway.cli.admin:audit",
    "doctor": "headway.cli.doctor:doctor",
    "config": "headway.cli.admin:config",
    "completion": "headway.cli.completion:completion",
}

#: What the command ends with; there are no others.
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
    """Imports a verb's module only when that verb is used: start-up stays quick however many verbs there are."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

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


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="headway", message="%(prog)s %(version)s")
def headway() -> None:
    """Durable progress for long work: run a function over many items, lose nothing, see what failed and why."""


def database_option(function: F) -> F:
    """``--database URL``, the same on every command. None means: as the settings say."""
    return click.option(
        "--database", "-d", metavar="URL", help="Where the records are kept.  [default: sqlite:///headway.db]"
    )(function)


def json_option(function: F) -> F:
    """``--json``, the same on every command that reads."""
    return click.option("--json", "as_json", is_flag=True, help="Machine-readable output with stable keys.")(function)


def say(text: str = "") -> None:
    """Talk goes to stderr; stdout is for data."""
    click.echo(text, err=True)


def fail(error: HeadwayError) -> int:
    """Show an error in its three parts: what happened and why, then what to do."""
    colored = shows_color(os.environ.get("HEADWAY_COLOR", "auto"), sys.stderr, os.environ)
    click.echo(
        (click.style("Error: ", fg="red", bold=True) if colored else "Error: ") + str(error), err=True, color=colored
    )
    if error.hint:
        say(f"  {error.hint}")
    return error.exit_code


def main(arguments: list[str] | None = None) -> NoReturn:
    """The entry point: every outcome becomes one of the documented exit codes."""
    sys.exit(invoke(arguments))


def invoke(arguments: list[str] | None = None) -> int:
    if os.environ.get("_HEADWAY_COMPLETE") == "powershell_complete":
        import_module("headway.cli.completion")  # click knows the other shells by itself
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
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return 130
