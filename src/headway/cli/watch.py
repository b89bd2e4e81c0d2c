"""``headway watch``: the watcher, with its environment spelled as options."""

from __future__ import annotations

import os

import click


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
    from headway.watcher.runner import main

    given = {
        "REDIS_URL": redis_url,
        "RQ__QUEUE": queue,
        "DIGITS_EVENTS_CHANNEL": channel,
        "RQ_WATCHER_STUCK_TIMEOUT_SECONDS": stuck_timeout,
        "RQ_WATCHER_STREAM": stream,
        "RQ_WATCHER_STORE": store,
    }
    return main({**os.environ, **{name: value for name, value in given.items() if value is not None}})
