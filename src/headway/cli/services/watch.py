"""``headway watch``: run the watcher, with its settings as options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from headway.config import Config


@click.command()
@click.option("--redis-url", metavar="URL", help="The Redis that RQ uses.  [env: REDIS_URL]")
@click.option("--queue", metavar="NAME[,NAME]", help="One or more RQ queues.  [env: RQ__QUEUE]")
@click.option("--channel", metavar="NAME", help="Channel for events.  [env: DIGITS_EVENTS_CHANNEL]")
@click.option(
    "--stuck-timeout",
    metavar="SECONDS",
    help="Run time after which a job is reported stuck.  [env: RQ_WATCHER_STUCK_TIMEOUT_SECONDS]",
)
@click.option("--stream", metavar="KEY", help="Stream that receives a copy of every event.  [env: RQ_WATCHER_STREAM]")
@click.option(
    "--store",
    metavar="URL|redis",
    help="Store for the reported jobs.  [env: RQ_WATCHER_STORE; default: the database setting]",
)
def watch(
    *,
    redis_url: str | None,
    queue: str | None,
    channel: str | None,
    stuck_timeout: str | None,
    stream: str | None,
    store: str | None,
) -> int:
    """Publish an event for every RQ job that fails, is canceled or gets stuck.

    Redis must announce changes of sorted sets (notify-keyspace-events Kz). The command exits with an error when its
    connection is lost. Run it under a supervisor that restarts it.
    """
    from headway.config import Config, texts
    from headway.watcher.runner import main

    given = {
        "watch_redis": redis_url,
        "watch_queues": None if queue is None else texts(queue),
        "watch_channel": channel,
        "watch_stuck_timeout": stuck_timeout,
        "watch_stream": stream,
        "watch_store": store,
    }
    return main({**os.environ, **watcher_environment(Config(cli=given))})


def watcher_environment(config: Config) -> dict[str, str]:
    """Return the settings as environment variables of the watcher. Variables that are set already win."""
    return {
        option.variable: ",".join(found.value) if isinstance(found.value, tuple) else str(found.value)
        for option, found in config.items()
        if option.variable not in (None, found.origin) and found.value not in (None, ())
    }
