"""``headway alerts``: show, acknowledge, mute and watch alerts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headway.cli import database_option, json_option, say, typed
from headway.cli.toolkit import (
    Whole,
    clock,
    limit_option,
    open_reader,
    open_store,
    put,
    put_json,
    put_table,
    with_database,
)
from headway.core.text import duration, plural, printable

if TYPE_CHECKING:
    from headway.alerts import Change
    from headway.views.system.alerts import AlertView, RuleView

#: The names of `headway.alerts.RULES`, repeated here so that the help needs no import. A test compares them.
RULE_NAMES = (
    "store_away", "stalled_job", "failure_spike", "worker_lost", "no_handler", "delay", "backlog", "new_cause",
    "store_slow", "redis_memory", "event_lag",
)  # fmt: skip
_RULE = click.Choice(RULE_NAMES)
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def _span(_context: click.Context, _parameter: click.Parameter, text: str) -> float:
    """Parse a time with its unit (90s, 30m, 2h, 1d) into seconds."""
    given = text.strip().lower()
    digits = given.rstrip("dhimns")
    number, unit = digits.strip(), given[len(digits) :] or "s"
    plain = number.isascii() and number.replace(".", "", 1).isdigit() and len(number) <= 12
    if unit not in _UNITS or not plain or not 0 < float(number) * _UNITS[unit] <= 366 * 86_400:
        raise click.BadParameter(f"{printable(text)[:40]!r} is not a time of at most 366 days: use 90s, 30m, 2h or 1d.")
    return float(number) * _UNITS[unit]


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rules", "show_rules", is_flag=True, help="Show the current value and the limit of each rule.")
@click.option("--history", is_flag=True, help="Show closed alerts too, latest first.")
@limit_option(50, "How many closed alerts.")
@json_option
@database_option
@click.pass_context
def alerts(
    context: click.Context, database: str | None, *, show_rules: bool, history: bool, limit: int, as_json: bool
) -> None:
    """Show open alerts: a lost worker, a stalled job, failures, delays, a slow store.

    One process of a deployment evaluates the rules; their limits are the settings alert_*. An alert that opens or closes
    is an event, which the configured sinks receive.
    """
    if context.invoked_subcommand is not None:
        return
    with open_reader(database) as reader:
        found = reader.alerts(history=limit)
    if as_json:
        put_json(found)
        return
    if found.checked_at is None:
        say(f"The rules have not been evaluated yet. Start it here: {with_database('headway alerts watch', database)}")
    elif found.stale:
        watch = with_database("headway alerts watch", database)
        say(f"Last evaluated at {clock(found.checked_at)}; the alerts below are of that time. Start it here: {watch}")
    if found.alerts:
        _put_alerts(found.alerts)
    elif found.checked_at is not None:
        put(f"No open alerts. Last evaluated at {clock(found.checked_at)}.")
    if show_rules:
        rows = [[rule.name, rule.state, _amount(rule, rule.value), _amount(rule, rule.limit), rule.subject or "",
                 clock(rule.muted_until)] for rule in found.rules]  # fmt: skip
        put_table(["RULE", "STATE", "VALUE", "LIMIT", "OF", "MUTED UNTIL"], rows, right=("VALUE", "LIMIT"))
    if history and found.history:
        rows = [[str(one.no), one.rule, clock(one.opened_at), clock(one.closed_at), one.text] for one in found.history]
        put_table(["ID", "RULE", "OPENED", "CLOSED", "WHAT"], rows, right=("ID",), whole=("RULE",), drop=("OPENED",))


def _put_alerts(found: tuple[AlertView, ...]) -> None:
    rows = []
    for one in found:
        known = f"acknowledged by {one.acknowledged_by}" if one.acknowledged_by else ""
        state = ", ".join(word for word in (one.severity, "muted" if one.muted else "", known) if word)
        rows.append([str(one.no), one.rule, state, clock(one.opened_at), one.text])
    put_table(["ID", "RULE", "STATE", "SINCE", "WHAT"], rows, right=("ID",), whole=("RULE",), drop=("SINCE",))


def _amount(rule: RuleView, value: float | None) -> str:
    if value is None:
        return ""
    return {"s": duration(value), "tasks": f"{value:,.0f}", "share": f"{value:.0%}"}[rule.unit]


@alerts.command("ack")
@click.argument("id", type=Whole(1))
@database_option
def acknowledge(id: int, database: str | None) -> None:
    """Acknowledge an alert, so that others see you are on it. It stays open until the problem clears."""
    from headway.alerts import acknowledge as record

    with open_store(database) as store:
        alert = record(store, id, by=_who())
    say(f"Alert {id} ({alert.rule}) is acknowledged by {printable(str(alert.acknowledged_by))}.")


@alerts.command("mute")
@click.argument("rule", type=_RULE, metavar="RULE")
@click.option("--for", "seconds", callback=_span, required=True, metavar="TIME", help="How long: 90s, 30m, 2h, 1d.")
@click.option("--subject", default="", help="Only this worker, queue, job, sink or store.  [default: all of the rule]")
@database_option
def mute(rule: str, seconds: float, subject: str, database: str | None) -> None:
    """Mute notifications of a rule. Its alerts are still tracked; those open at the end are notified then."""
    from headway.alerts import mute as record

    with open_store(database) as store:
        record(store, rule, seconds=seconds, by=_who(), subject=subject)
    about = f"{rule} of {printable(subject)}" if subject else rule
    say(typed(f"No notifications of {about} for {duration(seconds)}. End it sooner: headway alerts unmute {rule}"))


@alerts.command("unmute")
@click.argument("rule", type=_RULE, metavar="RULE")
@click.option("--subject", default="", help="The subject that was muted.")
@database_option
def unmute(rule: str, subject: str, database: str | None) -> None:
    """End a mute before its time."""
    from headway.alerts import unmute as record

    with open_store(database) as store:
        stood = record(store, rule, by=_who(), subject=subject)
    say(f"{rule} is no longer muted." if stood else f"{rule} was not muted.")


@alerts.command("watch")
@database_option
def watch(database: str | None) -> int:
    """Evaluate the rules until stopped, print each change, and deliver events to the configured sinks.

    Use it where no server runs. Any number of these may run: one of them evaluates, and another takes over when it ends.
    """
    from headway import telemetry
    from headway._sql import connect
    from headway.cli.services.background import evaluator, relaying
    from headway.config import Config
    from headway.core.lifecycle import Shutdown, on_signals

    config = Config(cli={"database": database})
    telemetry.configure(level=config.text("log_level").upper(), as_json=config["log_format"] == "json")
    lost: list[OSError] = []
    with (
        on_signals(Shutdown()) as shutdown,
        connect(config.text("database"), create=True, stop=shutdown.stop) as store,
        relaying(config, store, shutdown.stop),
    ):

        def hear(change: Change) -> None:
            try:
                _put_change(change)
            except OSError as error:  # the reader of stdout has gone
                lost.append(error)
                shutdown.stop.set()

        judging = evaluator(config, store, hear)
        say(f"Watching {plural(len(RULE_NAMES), 'rule')}. Ctrl-C ends it.")
        judging.run(shutdown.stop)
    if lost:
        raise lost[0]
    return 0


def _put_change(change: Change) -> None:
    alert = change.alert
    at = alert.opened_at if change.change == "opened" else alert.closed_at
    from datetime import UTC, datetime

    when = clock(datetime.fromtimestamp(at or alert.opened_at, UTC))
    put(f"{when}  {change.change}{' (muted)' if change.muted else ''}  {alert.rule}  {printable(alert.text)}")


def _who() -> str:
    from headway.ledger.store.audit import current_user

    return current_user()
