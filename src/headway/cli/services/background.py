"""Background threads of long-lived commands: they deliver events and evaluate alerts."""

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
    """Return the evaluator of alerts. It reads the settings again at each round."""
    from headway.alerts import Evaluator, Rules

    own = config.with_cli({})  # a copy, because another reader of the file must see the change too

    def current() -> Rules:
        own.reload_if_changed()
        return Rules.of(own)

    return Evaluator(store, current, on_change=on_change)


@contextmanager
def attending(config: Config, store: Database) -> Iterator[None]:
    """Deliver events and evaluate alerts in threads while the block runs.

    Any number of processes may do it: a lease decides which one delivers to a sink and which one evaluates. Errors are
    logged and retried; they do not reach the block.
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
