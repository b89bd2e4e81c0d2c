"""What every long-lived command does besides its own work: events reach their sinks, and somebody judges the alerts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from headway import events

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.alerts import Change, Evaluator
    from headway.config import Config


@contextmanager
def relaying(config: Config, store: Database, stop: threading.Event) -> Iterator[None]:
    """Deliver the store's events to the configured sinks, if there are any, until the block ends or ``stop``."""
    sinks = events.configured_sinks(config)
    with events.Relay([events.SqlOutbox(store)], sinks).start(stop) if sinks else nullcontext():
        yield


def evaluator(config: Config, store: Database, on_change: Callable[[Change], None] | None = None) -> Evaluator:
    """Who judges the alerts by the settings, as they are at each round."""
    from headway.alerts import Evaluator, Rules

    own = config.with_cli({})  # whoever else follows the file must not miss that it changed

    def current() -> Rules:
        own.reload_if_changed()
        return Rules.of(own)

    return Evaluator(store, current, on_change=on_change)


@contextmanager
def attending(config: Config, store: Database) -> Iterator[None]:
    """Deliver the store's events and judge the alerts, in threads, while the block runs. Any number of processes may do it:
    a lease decides who delivers to a sink, and who judges.

    Neither can disturb the block: what fails is said in the log and tried again.
    """
    stop = threading.Event()
    judging = threading.Thread(target=evaluator(config, store).run, args=(stop,), name="headway-alerts", daemon=True)
    with relaying(config, store, stop):
        judging.start()
        try:
            yield
        finally:
            stop.set()
            judging.join(5.0)
