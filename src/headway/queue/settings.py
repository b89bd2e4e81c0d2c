"""The queue's settings, which workers and supervisors reload while they run.

    an operator (`headway queue set`, stored in SQL: the same for every host)
      > the command line > the application (``app.config``) > HEADWAY_* > headway.toml, its profile first > the default

Workers and supervisors read the file and the rows every two seconds. An invalid value is logged once, and the previous value
stays in force. While the database is unreachable, all values stay in force.
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headway._sql import Database, Tx
from headway.config import OPTIONS, PREFIX, Config, read_value
from headway.core.retry import LaterLimit
from headway.errors import ConfigError, InvalidInput
from headway.queue.store import administration
from headway.queue.task import check_actor, is_text, moment
from headway.telemetry import Log

log = Log("queue")

#: Seconds between two reads of the file and the rows.
RELOAD_SECONDS = 2.0
#: What an operator can set for all workers and supervisors -> the name of the setting.
LIVE: Mapping[str, str] = {
    name: f"queue_{name}"
    for name in (
        "workers", "max_workers", "drain", "timeout", "memory_limit", "cancel_grace", "batch", "retention_days",
    )
}  # fmt: skip
_NAMES = {PREFIX + option.name.upper(): option for option in OPTIONS}

#: Prefix of our queue names in RQ, which separates them from another RQ application on the same Redis.
PREFIX_IN_RQ = "headway:"


@dataclass(frozen=True, slots=True)
class RqOptions:
    """How the queue uses its Redis. Memory is in bytes, thresholds are shares of it."""

    prefix: str = PREFIX_IN_RQ
    memory: int | None = None  # memory limit; None: Redis's own maxmemory
    warn: float = 0.75  # above it, a warning is logged; below it, hints resume
    critical: float = 0.85  # above it, hints stop, an alert is raised and RQ's copies of failed tasks are deleted

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidInput(
                f"queue_prefix must have up to 40 letters, digits, or : _ - (got {self.prefix[:60]!r}).",
                hint="For example shop: or none.",
            )
        if not 0 < self.warn < self.critical <= 1:
            raise InvalidInput(
                f"queue_redis_warn must be below queue_redis_critical (got {self.warn:.0%} and {self.critical:.0%}).",
                hint="For example 75 and 85.",
            )


_PREFIX = re.compile(r"[A-Za-z0-9:_-]{0,40}")


@dataclass(frozen=True, slots=True)
class InForce:
    """The settings that workers and supervisors currently use."""

    workers: int
    max_workers: int
    drain: float
    timeout: float | None
    memory_limit: int  # bytes
    cancel_grace: float
    batch: int
    retention: float  # seconds
    later_limit: LaterLimit


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the running queue and its origin."""

    name: str
    value: float | str | None  # a text only if it is invalid
    origin: str
    set_by: str | None
    set_at: datetime | None


def application_config(given: Mapping[str, Any]) -> Config:
    """Return the settings with the application's values (Flask's ``app.config``), which override the environment."""
    unknown = [name for name in given if name.startswith(PREFIX) and name not in {*_NAMES, PREFIX + "PROFILE"}]
    if unknown:
        close = difflib.get_close_matches(unknown[0], _NAMES, 1)
        raise ConfigError(
            f"The application sets {unknown[0]}, which is not a setting.",
            hint=f"Did you mean {close[0]}?" if close else "See them: headway config",
        )
    texts = {
        name: " ".join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)
        for name, value in given.items()
        if name.startswith(PREFIX) and value is not None
    }
    return Config(environment={**os.environ, **texts})


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def connection_settings(config: Config) -> dict[str, Any]:
    """Return the arguments of `TaskQueue.configure`."""
    return {
        "database": config.text("database"),
        # Use Redis only if a URL is set: the default URL is not a reason to connect.
        "redis": config.text("queue_redis") if config.is_set("queue_redis") else None,
        "mode": config.text("queue_mode"),
        "per_user": config["queue_per_user"],
        "keys": config.texts("queue_keys"),
        "rq": _rq_options(config),
    }


def _rq_options(config: Config) -> RqOptions:
    memory: Any = config["queue_redis_memory"]
    warn, critical, prefix = (config[f"queue_{name}"] for name in ("redis_warn", "redis_critical", "prefix"))
    return RqOptions(
        prefix=str(prefix or ""),
        memory=None if memory is None else int(memory) * 2**20,
        warn=float(warn) / 100,  # type: ignore[arg-type]  # numbers, by their readers
        critical=float(critical) / 100,  # type: ignore[arg-type]  # the same
    )


class LiveSettings:
    """The settings of a running worker or supervisor; see the module. `refresh` reads at most every `RELOAD_SECONDS`."""

    def __init__(
        self,
        database: Callable[[], Database],
        config: Config | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or Config()
        self._database, self._clock = database, clock
        self._set: dict[str, float | None] = {}
        self._refused: dict[str, str] = {}
        self._read_at: float | None = None
        self._last: InForce | None = None

    def refresh(self) -> bool:
        """Read the file and the rows if that is due; return whether anything changed.

        Raises if the database is unreachable; the settings in force do not change.
        """
        now = self._clock()
        if self._read_at is not None and now - self._read_at < RELOAD_SECONDS:
            return False
        self._read_at = now
        reload_file(self.config)
        self._set = self._checked(administration.read_settings(self._database()))
        before, self._last = self._last, self.in_force
        if before not in (None, self._last):
            log.info("settings changed", old=str(before), new=str(self._last))
        return before != self._last

    def _checked(self, rows: list[tuple[Any, ...]]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name, raw, *_ in rows:
            if name not in LIVE:
                continue  # set by a newer version
            try:
                found[name] = check(name, raw)
                self._refused.pop(name, None)
            except InvalidInput as error:
                if name in self._set:
                    found[name] = self._set[name]
                if self._refused.get(name) != raw:
                    self._refused[name] = raw
                    log.warning("a setting is invalid; the previous value stays in force", error=str(error))
        return found

    def __getitem__(self, name: str) -> Any:
        return self._set[name] if name in self._set else self.config[LIVE[name]]

    @property
    def in_force(self) -> InForce:
        """The current settings as values."""
        workers = self["workers"]
        return InForce(
            workers=workers,
            max_workers=max(workers, self["max_workers"] or workers),
            drain=self["drain"],
            timeout=self["timeout"],
            memory_limit=self["memory_limit"] * 2**20,
            cancel_grace=self["cancel_grace"],
            batch=self["batch"],
            retention=self["retention_days"] * 86_400.0,
            later_limit=LaterLimit.parse(self.config.text("later_limit")),
        )


def reload_file(config: Config) -> bool:
    """Reload headway.toml if it changed; return whether a value changed. An invalid file is logged and ignored."""
    try:
        return bool(config.reload_if_changed())
    except ConfigError as error:
        log.warning("headway.toml is invalid; the previous settings stay in force", error=str(error))
        return False


def check(name: str, raw: object) -> float | None:
    """Convert an operator's value for a setting. Raises `InvalidInput`."""
    if not is_text(name) or name not in LIVE:
        close = difflib.get_close_matches(str(name), LIVE, 1)
        raise InvalidInput(
            f"{str(name)[:40]!r} is not a setting of a running queue.",
            hint=f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(LIVE)}.",
        )
    try:
        value = read_value(LIVE[name], "none" if raw is None else str(raw)[:40], "The running queue")
    except ConfigError as error:
        raise InvalidInput(str(error), hint="See the current values: headway queue settings") from error
    assert not isinstance(value, str)
    return value


def put(tx: Tx, name: str, value: object, *, by: str) -> None:
    """Set a value for all workers and supervisors, effective within `RELOAD_SECONDS`."""
    check_actor(by)
    checked = check(name, value)
    text = "none" if checked is None else str(checked)
    administration.write_setting(tx, name, text, by=by)
    administration.audit(tx, by, "queue.set", {"setting": name, "value": text})


def remove(tx: Tx, name: str, *, by: str) -> bool:
    """Return to each host's own setting; return whether a value was set."""
    check_actor(by)
    if not is_text(name) or name not in LIVE:
        check(name, "")
    was_set = administration.delete_setting(tx, name)
    if was_set:
        administration.audit(tx, by, "queue.unset", {"setting": name})
    return was_set


def declared_per_user(database: Database) -> int | None:
    """Return the limit of tasks per user that the application declared; 1 if it never declared one."""
    text = administration.declared_per_user(database)
    if text is None:
        return 1
    value = read_value("queue_per_user", text, "The application's limit")
    assert value is None or isinstance(value, int)
    return value


def listing(database: Database, config: Config) -> list[Setting]:
    """Return every setting of the running queue as this host sees it."""
    rows = {name: facts for name, *facts in administration.read_settings(database)}
    found = []
    for name, option in LIVE.items():
        if name in rows:
            raw, by, at = rows[name]
            try:
                found.append(Setting(name, check(name, raw), "operator", by, moment(at)))
            except InvalidInput:
                found.append(Setting(name, raw, "operator, and refused by workers", by, moment(at)))
        else:
            here = config[option]
            assert not isinstance(here, str)
            found.append(Setting(name, here, config.origin(option), None, None))
    return found
