"""What every long-lived command does besides its own work: events reach their sinks, and somebody judges the alerts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from headway import events

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.config import Config


@contextmanager
def attending(config: Config, store: Database) -> Iterator[None]:
    """Deliver the store's events to the configured sinks and judge the rules, in threads, while the block runs. Any number
    of processes may do it: a lease decides who delivers to a sink, and who judges.

    Neither can disturb the block: what fails is said in the log and tried again.
    """
    from headway.alerts import Evaluator, Rules

    stop = threading.Event()
    sinks = events.open_sinks(config["sinks"], config["webhook"])
    redis = config.text("queue_redis") if config.is_set("queue_redis") else None
    with ExitStack() as stack:
        if sinks:
            stack.enter_context(events.Relay([events.SqlOutbox(store)], sinks).start(stop))

        def current() -> Rules:
            config.reload_if_changed()
            return Rules.of(config)

        judging = threading.Thread(
            target=Evaluator(store, current, redis=redis).run, args=(stop,), name="headway-alerts", daemon=True
        )
        judging.start()
        try:
            yield
        finally:
            stop.set()
            judging.join(5.0)
