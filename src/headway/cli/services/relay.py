"""``headway relay``: deliver events to the sinks, show backlogs, and handle refused events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say, typed
from headway.cli.toolkit import Number, confirm, put, put_json, put_table, reader_of, yes_option
from headway.core.text import plural
from headway.errors import HeadwayError, NotFound, UsageError
from headway.views.shape import iso
from headway.views.system.relay import RefusedEvent, RelayPoison

if TYPE_CHECKING:
    from headway.config import Config
    from headway.events import Outbox, Refused, Sink
    from headway.views.system.relay import RelayStatus

#: Seconds for which --once tries.
ONCE_SECONDS = 30.0


@click.command()
@click.option("--once", is_flag=True, help="Deliver waiting events, then exit.")
@click.option("--seconds", type=Number(0.1), default=ONCE_SECONDS, show_default=True, help="Time limit of --once.")
@click.option("--status", is_flag=True, help="Show the backlog of each sink.")
@click.option(
    "--poison",
    type=click.Choice(["list", "retry", "discard"]),
    help="List, retry or discard the events that a sink refused permanently.",
)
@click.option("--forget", metavar="SINK", help="Delete a sink that is no longer used, with its waiting events.")
@click.option("--sink", metavar="SINK", help="With --poison: only of this sink.")
@click.option("--event", metavar="ID", help="With --poison: only this event.")
@yes_option
@json_option
@click.option(
    "--projects-redis", metavar="URL", help="Redis with the projects.  [default: none, unless the settings name one]"
)
@database_option
def relay(
    *,
    once: bool,
    seconds: float,
    status: bool,
    poison: str | None,
    forget: str | None,
    sink: str | None,
    event: str | None,
    yes: bool,
    as_json: bool,
    projects_redis: str | None,
    database: str | None,
) -> int:
    """Deliver events to every configured sink until stopped.

    The outboxes are the database and, if the setting redis or projects_redis is given, Redis. The sinks are those of
    the settings sinks and webhook. Several relays may run, on any machines: each event reaches each sink once, and
    again only if a relay is killed in between. Exit code 6: --once could not deliver everything, or an outbox is
    unreachable.
    """
    from headway import telemetry
    from headway.config import Config
    from headway.events import configured_sinks

    if sum(map(bool, (once, status, poison, forget))) > 1:
        raise UsageError("--once, --status, --poison and --forget cannot be combined.")
    if (sink or event) and not poison:
        raise UsageError("--sink and --event belong to --poison.")
    if as_json and not (status or poison == "list"):
        raise UsageError("--json belongs to --status and --poison list.")
    config = Config(cli={"database": database, "projects_redis": projects_redis})
    telemetry.configure(level=config.text("log_level").upper(), as_json=config["log_format"] == "json")
    if status:
        return _show(config, as_json=as_json)
    sinks = configured_sinks(config)
    if poison or forget:
        with _outboxes(config, create=False) as outboxes:
            if forget:
                return _forget(outboxes, forget, sinks, yes=yes)
            return _poison(outboxes, str(poison), sink, event, yes=yes, as_json=as_json)
    if not sinks:
        raise UsageError(
            "No sink is configured, so there is nobody to tell.",
            hint='Name some: HEADWAY_SINKS="log: https://example.org/hook", or sinks = [...] in headway.toml',
        )
    return _serve(config, sinks, seconds if once else None)


def _serve(config: Config, sinks: list[Sink], once: float | None) -> int:
    from headway.core.lifecycle import Shutdown, on_signals
    from headway.events import Relay

    with on_signals(Shutdown()) as shutdown, _outboxes(config, create=True) as outboxes:
        relay = Relay([one.reached() for one in outboxes], sinks)
        if once is None:
            say(f"Delivering to {', '.join(sink.name for sink in sinks)}. Ctrl-C ends it.")
            relay.run(shutdown.stop)
            return 0
        with relay.start(shutdown.stop):
            drained = relay.drain(once)
        if not drained:
            say(typed("Some events still wait. See where: headway relay --status"))
        return 0 if drained else shutdown.exit_code if shutdown.stop.is_set() else 6


@dataclass(frozen=True, slots=True)
class ConfiguredOutbox:
    """A configured outbox: open, or the error of opening it."""

    name: str
    address: str
    outbox: Outbox | None
    error: HeadwayError | None = None

    def reached(self) -> Outbox:
        if self.outbox is None:
            assert self.error is not None
            raise self.error
        return self.outbox


@contextmanager
def _outboxes(config: Config, *, create: bool) -> Iterator[list[ConfiguredOutbox]]:
    from headway import _redis
    from headway._sql import connect
    from headway.cli.finishline import open_line
    from headway.events import RedisOutbox, SqlOutbox
    from headway.telemetry import redact

    with ExitStack() as stack:
        outboxes = []
        address = redact(config.text("database"))
        try:
            database = stack.enter_context(connect(config.text("database"), create=create))
            outboxes.append(ConfiguredOutbox("database", address, SqlOutbox(database)))
        except HeadwayError as error:
            outboxes.append(ConfiguredOutbox("database", address, None, error))
        if config.is_set("projects_redis"):
            address = redact(config.text("projects_redis"))
            try:
                if create:  # a relay also records in SQL that a project's completion was delivered
                    line = stack.enter_context(open_line(config.text("projects_redis"), _recorded(config)))
                    outboxes.append(ConfiguredOutbox("redis", address, line.outbox()))
                else:
                    client = stack.enter_context(_redis.connect(config.text("projects_redis"), role="state"))
                    outboxes.append(ConfiguredOutbox("redis", address, RedisOutbox(client)))
            except HeadwayError as error:
                outboxes.append(ConfiguredOutbox("redis", address, None, error))
        yield outboxes


def _recorded(config: Config) -> str | None:
    return config.text("database") if config.is_set("database") else None


# ---------------------------------------------------------------------------------------------------------------------
# Looking


def _show(config: Config, *, as_json: bool) -> int:
    with reader_of(config) as reader:
        found = reader.relay()
    if as_json:
        put_json(found)
    else:
        _put_status(found)
    return 6 if any(outbox.error is not None for outbox in found.outboxes) else 0


def _put_status(found: RelayStatus) -> None:
    cells = []
    for outbox in found.outboxes:
        if outbox.error is not None:
            say(f"The outbox {outbox.outbox} is out of reach, so what waits there is unknown: {outbox.error}")
            continue
        for row in outbox.sinks:
            age = "" if row.oldest_seconds is None else f"{row.oldest_seconds:,.0f} s"
            # A relay releases the lease of a sink between two tries, so a served sink may have no holder.
            idle = "between tries, or no relay" if row.waiting else ""
            by = row.holder or (idle if row.configured else "not configured")
            cells.append([outbox.outbox, row.sink, f"{row.waiting:,}", age, f"{row.refused:,}", by])
        cells += [[outbox.outbox, name, "?", "", "0", "never served"] for name in outbox.never_served]
    if cells:
        put_table(
            ["OUTBOX", "SINK", "WAITING", "OLDEST", "REFUSED", "SERVED BY"],
            cells,
            right=["WAITING", "OLDEST", "REFUSED"],
        )
    elif not any(outbox.error for outbox in found.outboxes):
        say("No sink is configured, and none is known.")


# ---------------------------------------------------------------------------------------------------------------------
# Changing


def _poison(
    outboxes: list[ConfiguredOutbox], action: str, sink: str | None, event: str | None, *, yes: bool, as_json: bool
) -> int:
    found: list[tuple[Outbox, str, Refused]] = []
    for configured in outboxes:
        if isinstance(configured.error, NotFound):
            continue
        outbox = configured.reached()
        found += [(outbox, configured.name, one) for one in outbox.refused(sink) if event in (None, one.id, one.handle)]
    if action == "list":
        _put_refused([(name, one) for _, name, one in found], as_json=as_json)
        return 0
    if not found:
        say("Nothing is put aside" + (" that matches." if sink or event else "."))
        return 2 if sink or event else 0
    verb = "Deliver" if action == "retry" else "Forget"
    confirm(f"{verb} {plural(len(found), 'event')} that was put aside?", yes=yes)
    for outbox, _, one in found:
        (outbox.retry if action == "retry" else outbox.discard)(one)
    done = "will be delivered by the next relay" if action == "retry" else "forgotten"
    say(f"{plural(len(found), 'event')}: {done}.")
    return 0


def _put_refused(found: list[tuple[str, Refused]], *, as_json: bool) -> None:
    if as_json:
        rows = (
            RefusedEvent(name, one.sink, one.id or one.handle, one.type, one.job, one.reason, one.at)
            for name, one in found
        )
        put_json(RelayPoison(tuple(rows)))
    elif found:
        cells = [[one.sink, one.id or one.handle, one.type, one.job, iso(one.at) or "", one.reason] for _, one in found]
        put_table(["SINK", "EVENT", "TYPE", "JOB", "AT", "REASON"], cells)
    else:
        say("Nothing is put aside.")


def _forget(outboxes: list[ConfiguredOutbox], name: str, sinks: list[Sink], *, yes: bool) -> int:
    if name in [sink.name for sink in sinks]:
        raise UsageError(f"{name} is configured.", hint="Take it out of the settings first, or it begins anew.")
    confirm(f"Forget the sink {name} and what waits for it?", yes=yes)
    known = [one.reached().forget(name) for one in outboxes if not isinstance(one.error, NotFound)]
    if not any(known):
        raise NotFound(f"There is no sink {name!r}.", hint="See them all: headway relay --status")
    put(f"{name} is forgotten.")
    return 0
