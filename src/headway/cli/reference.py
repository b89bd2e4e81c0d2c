"""Generate the reference of the command line from the commands.

To write the page: ``python -m headway.cli.reference > docs/reference/cli.md``.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from headway.cli import COMMANDS, EXIT_CODES, headway
from headway.config import OPTIONS, Option
from headway.run.display.display import PROGRESS_KEYS

WIDTH = 100

_HEAD = """\
# Command line

<!-- Written by `python -m headway.cli.reference`; change the commands, not this page. -->

Data goes to stdout, talk to stderr. Every command that reads has `--json`: one document whose `schema` names its keys and
their version (`headway.jobs/1`); within a version keys are added, never changed: see [json.md](json.md). Questions are
asked only when stdin is a terminal; elsewhere a command that would ask refuses and names the flag (`--yes`).

Colours follow `--color`, then `NO_COLOR`, then `FORCE_COLOR`, then whether stderr is a terminal. `FORCE_COLOR` colours
only: it never makes a log file live. `COLUMNS` sets the width.
"""

_PROGRESS = """\
## How a run shows itself

`--progress auto` is `bar` on a terminal (unless `TERM=dumb`) and `plain` elsewhere.

| kind | shows |
|---|---|
| `bar` | two live lines; a narrow terminal drops fields from the right; what was kept from earlier runs is drawn thinner |
| `plain` | a line with a UTC time after 30 s and 5 %, whichever is later, and at every change of state; no control characters |
| `json` | NDJSON on stderr, at most one `progress` a second |
| `none` | nothing; errors and the summary are still printed |

The rate counts this run only. A forecast needs 30 finished items and 15 seconds; its range holds at least four times out
of five in the simulated runs of the test suite, and it cannot foresee a change of the work itself.

Each line of `--progress json` has `t` (UTC, ISO 8601) and `event`: `begin` and `message` with a `message`, `progress` and
`end` with:

| key | is |
|---|---|
"""


_SETTINGS = """\
## Settings

A setting comes from the command line, else from `HEADWAY_NAME` in the environment (`HEADWAY_DATABASE`), else from
`headway.toml` in the working directory (its profile first), else it follows another setting or has a default.
`headway config --show-origin` shows which it is. `HEADWAY_DATABASE` and `HEADWAY_REDIS` are enough for everything. A list is
an array in TOML; in the environment its texts are divided by commas or spaces.

```toml
database = "sqlite:///ads.db"
profile = "production"

[profiles.production]
database = "postgresql://headway@db/headway"
redis = "redis://cache:6379/0"
```

The watcher's settings have, beside `HEADWAY_NAME`, the name in the environment that stands with them.

| name | default | is | also in the environment as |
|---|---|---|---|
"""


def _setting(option: Option) -> str:
    if option.follows is not None:
        default = f"follows `{option.follows[0]}`"
    else:
        default = f"`{option.default}`" if option.default not in (None, ()) else ""
    variable = f"`{option.variable}`" if option.variable else ""
    return f"| `{option.name}` | {default} | {option.help} | {variable} |\n"


def pages() -> Iterator[str]:
    yield _HEAD
    yield "## Exit codes\n\n| code | means |\n|---|---|\n" + "".join(
        f"| {code} | {text} |\n" for code, text in EXIT_CODES.items()
    )
    yield _PROGRESS + "".join(f"| `{key}` | {text} |\n" for key, text in PROGRESS_KEYS.items())
    yield _SETTINGS + "".join(_setting(option) for option in OPTIONS)
    yield "## Commands\n"
    top = _context(headway, "headway")
    yield _page(headway, top)
    for name in COMMANDS:
        command = headway.get_command(top, name)
        assert command is not None
        yield from _pages_of(command, _context(command, name, top))


def _pages_of(command: click.Command, context: click.Context) -> Iterator[str]:
    yield _page(command, context)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _pages_of(inner, _context(inner, name, context))


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    # A fixed width, so that the page does not depend on the terminal.
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    return click.Context(command, info_name=name, parent=parent, **settings)


def _page(command: click.Command, context: click.Context) -> str:
    return f"### `{context.command_path}`\n\n```text\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    print("\n".join(pages()), end="")
