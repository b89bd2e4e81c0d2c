"""The watcher's process: reads settings from the environment, watches, and exits with the error's exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from headway import events, telemetry
from headway._sql import Database, connect
from headway.config import Config
from headway.core.lifecycle import Shutdown, on_signals, wait_for_children
from headway.errors import ConfigError, HeadwayError
from headway.events import Json
from headway.telemetry import redact
from headway.watcher.ports import WatcherPorts
from headway.watcher.publisher import EventForm
from headway.watcher.store.redis import RedisProcessedStore
from headway.watcher.store.sql import SqlProcessedStore
from headway.watcher.watcher import NotificationWatcher, OpenStore, WatcherSettings

log = telemetry.Log("watcher")

REQUIRED = ("REDIS_URL", "RQ__QUEUE", "DIGITS_EVENTS_CHANNEL", "RQ_WATCHER_STUCK_TIMEOUT_SECONDS")


def script() -> NoReturn:
    """Run the command ``rq_keyspace_watcher``."""
    wait_for_children()  # child processes of sinks
    sys.exit(main(os.environ))


def main(environment: Mapping[str, str], ports: WatcherPorts | None = None, shutdown: Shutdown | None = None) -> int:
    """Watch until SIGTERM or SIGINT, then return 0. On an error, log it and return its exit code."""
    try:
        config = Config(environment=environment)
        telemetry.configure(level="INFO", as_json=config.text("log_format") == "json")
        watch(environment, config, ports or _default_ports(), shutdown or Shutdown())
    except HeadwayError as error:
        telemetry.Log("watcher").error(str(error), reason=error.hint)
        return error.exit_code
    return 0


def watch(environment: Mapping[str, str], config: Config, ports: WatcherPorts, shutdown: Shutdown) -> None:
    """Open stores and sinks, and watch until the shutdown."""
    settings = settings_from(environment)
    sinks = events.configured_sinks(config)
    where = environment.get("RQ_WATCHER_STORE", "").strip() or config.text("database")
    with on_signals(shutdown), _stores(where, settings.redis_url, ports) as (open_store, database):
        if not sinks or database is None:
            if sinks:
                log.warning("sinks receive no events: RQ_WATCHER_STORE=redis has no outbox", count=len(sinks))
            NotificationWatcher(settings, ports, open_store).run(shutdown.stop)
            return
        with events.start(database=database, sinks=sinks, stop=shutdown.stop) as relay:
            relay.subscribe()  # before the watcher catches up, which publishes the first events
            append = partial(events.append_all, database)
            NotificationWatcher(settings, ports, open_store, append).run(shutdown.stop)


def settings_from(environment: Mapping[str, str]) -> WatcherSettings:
    """Return the settings. Raises `ConfigError` if a required variable is missing or a value is invalid."""
    # A value that was read from a secret file may end with a line break.
    environment = {name: text.strip() for name, text in environment.items()}
    missing = [name for name in REQUIRED if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"The watcher needs {', '.join(missing)} in its environment.",
            hint="For example REDIS_URL=redis://host:6379/0 RQ__QUEUE=digits DIGITS_EVENTS_CHANNEL=digits:events "
            "RQ_WATCHER_STUCK_TIMEOUT_SECONDS=3600",
        )

    def number(name: str, default: float) -> float:
        text = environment.get(name)
        try:
            return float(text or default)
        except ValueError as error:
            raise ConfigError(f"{name} must be a number (got {redact(text or '')!r}).") from error

    def whole(name: str, default: int) -> int:
        given = number(name, default)
        if not given.is_integer():
            raise ConfigError(f"{name} must be a whole number (got {given}).")
        return int(given)

    default = WatcherSettings("redis://", ("-",), "-", 1.0)
    return WatcherSettings(
        redis_url=environment["REDIS_URL"],
        queues=_list(environment["RQ__QUEUE"]),
        channel=environment["DIGITS_EVENTS_CHANNEL"],
        stuck_job_timeout_s=number("RQ_WATCHER_STUCK_TIMEOUT_SECONDS", 0.0),
        form=EventForm(
            failed=environment.get("RQ_WATCHER_EVENT") or default.form.failed,
            outcome=environment.get("RQ_WATCHER_OUTCOME_EVENT") or default.form.outcome,
            fields=_fields(environment.get("RQ_WATCHER_FIELDS") or "{}"),
            payload_fields=_list(environment.get("RQ_WATCHER_PAYLOAD_FIELDS") or ""),
        ),
        stream=environment.get("RQ_WATCHER_STREAM") or "",
        stream_length=whole("RQ_WATCHER_STREAM_LENGTH", default.stream_length),
        page_size=whole("RQ_WATCHER_PAGE_SIZE", default.page_size),
        sweep_s=number("RQ_WATCHER_SWEEP_SECONDS", default.sweep_s),
        ping_s=number("RQ_WATCHER_PING_SECONDS", default.ping_s),
        lost_grace_s=number("RQ_WATCHER_LOST_GRACE_SECONDS", default.lost_grace_s),
    )


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _fields(text: str) -> dict[str, Json]:
    try:
        parsed: object = json.loads(text, parse_constant=_no_constant)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(
            "RQ_WATCHER_FIELDS must be a JSON object, without NaN and with valid Unicode.",
            hint='For example {"environment": "production"}',
        )
    return {str(name): value for name, value in parsed.items()}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@contextmanager
def _stores(url: str, redis_url: str, ports: WatcherPorts) -> Iterator[tuple[OpenStore, Database | None]]:
    """Open the record of reports: a database, or the watched Redis if ``url`` is ``redis``."""
    if url == "redis":
        hashes = ports.hashes(redis_url)
        yield (lambda queue: RedisProcessedStore(hashes, queue)), None
    else:
        with connect(url) as database:
            yield (lambda queue: SqlProcessedStore(database, queue)), database


def _default_ports() -> WatcherPorts:
    from headway.watcher.adapters import default_ports

    return default_ports()
