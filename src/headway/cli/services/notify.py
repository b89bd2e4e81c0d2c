"""``headway notify``: test the sinks that receive events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from headway.cli import say
from headway.cli.toolkit import put
from headway.errors import HeadwayError, NotFound, UsageError

if TYPE_CHECKING:
    from headway.config import Config
    from headway.events import Sink


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def notify() -> None:
    """Test the sinks that receive events."""


@notify.command("test")
@click.argument("sink", metavar="[SINK]", required=False)
def test(sink: str | None) -> int:
    """Send a test message to every configured sink, or to one, and report each outcome.

    SINK is the name of a configured sink, or an address that need not be configured yet: slack://..., mailto:... The
    message is an event of type notify.test. It is sent once and not stored. Exits with 6 if a sink did not take it.
    """
    from headway.config import Config
    from headway.events import test_event

    failures = 0
    for one in _chosen(Config(), sink):
        began = time.monotonic()
        try:
            one.deliver(test_event())
        except HeadwayError as error:
            failures += 1
            say(f"{one.name}: not delivered. {error}" + (f"\n  Hint: {error.hint}" if error.hint else ""))
        else:
            put(f"{one.name}: delivered in {time.monotonic() - began:.1f} s")
    return 6 if failures else 0


def _chosen(config: Config, sink: str | None) -> list[Sink]:
    from headway.events import configured_sinks, open_configured

    if sink is not None and ":" in sink:
        return [open_configured(sink, config)]
    found = configured_sinks(config)
    if not found:
        raise UsageError(
            "No sink is configured.", hint='Set sinks = ["slack://..."] in headway.toml, or name an address here.'
        )
    chosen = [one for one in found if sink in (None, one.name)]
    if not chosen:
        raise NotFound(f"No sink has the name {sink!r}.", hint=f"Use one of: {', '.join(one.name for one in found)}")
    return chosen
