"""``headway watch``: the watcher, with its settings spelled as options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from headway.config import Config


@click.command()
@click.option("--redis-url", metavar="URL", help="The Redis that RQ uses.  [env: REDIS_URL]")
@click.option("--queue", metavar="NAME[,NAME]", help="The RQ queue, or several.  [env: RQ__QUEUE]")
@click.option("--channel", metavar="NAME", help="Where events are published.  [env: DIGITS_EVENTS_CHANNEL]")
@click.option(
    "--stuck-timeout",
    metavar="SECONDS",
    help="How long a job may run before it is reported stuck.  [env: RQ_WATCHER_STUCK_TIMEOUT_SECONDS]",
)
@click.option("--stream", metavar="KEY", help="Keep a copy of every event in this stream.  [env: RQ_WATCHER_STREAM]")
@click.option(
    "--store",
    metavar="URL|redis",
    help="Where it is remembered what was reported.  [env: RQ_WATCHER_STORE; default: the database setting]",
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

    Redis has to announce changes of sorted sets (notify-keyspace-events Kz). The command ends with an error when
    it cannot watch or is cut off: run it under a supervisor that starts it again.
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
    """The settings in force as the watcher, a program of its own, reads them. What its environment says stays as it is."""
    return {
        option.variable: ",".join(found.value) if isinstance(found.value, tuple) else str(found.value)
        for option, found in config.items()
        if option.variable not in (None, found.origin) and found.value not in (None, ())
    }
