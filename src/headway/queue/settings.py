"""The queue's settings: checked once, where they come in, and read again while workers run.

    an operator (`headway queue set`, kept in SQL: the same for every host)
      > the command line > the application (``app.config``) > HEADWAY_* > headway.toml, its profile first > the default

Workers and supervisors look at the file and at the rows every other second. A value that is not acceptable is refused and
said once in the log; the one before it stays in force. So does everything while the store is away.
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
from headway.errors import ConfigError, InvalidInput
from headway.queue.store.tasks import audit
from headway.queue.task import check_text, is_text, moment
from headway.telemetry import Log

log = Log("queue")

#: Seconds between two looks at the file and the rows.
LOOK_SECONDS = 2.0
#: What an operator can set for all workers and supervisors, and the setting it stands for.
LIVE: Mapping[str, str] = {
    name: f"queue_{name}"
    for name in (
        "workers", "max_workers", "drain", "timeout", "memory_limit", "cancel_grace", "batch", "retention_days",
    )
}  # fmt: skip
_NAMES = {PREFIX + option.name.upper(): option for option in OPTIONS}


#: The names of our queues in RQ begin with it, so that they are not those of another RQ application on the same Redis.
PREFIX_IN_RQ = "headway:"


@dataclass(frozen=True, slots=True)
class RqOptions:
    """How the queue uses its Redis. Memory is in bytes, thresholds are shares of it."""

    prefix: str = PREFIX_IN_RQ
    memory: int | None = None  # what Redis may use; None: its own maxmemory
    warn: float = 0.75  # logged above it; hints are given again below it
    critical: float = 0.85  # above it hints stop, an alert is raised and RQ's copies of failed tasks are deleted

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
    """What workers and supervisors go by just now."""

    workers: int
    max_workers: int
    drain: float
    timeout: float | None
    memory_limit: int  # bytes
    cancel_grace: float
    batch: int
    retention: float  # seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the running queue, and who says so."""

    name: str
    value: float | str | None  # a text only where it is refused
    origin: str
    set_by: str | None
    set_at: datetime | None


def application_config(given: Mapping[str, Any]) -> Config:
    """The settings with what an application says of them (Flask's ``app.config``), which goes before the environment."""
    unknown = [name for name in given if name.startswith(PREFIX) and name not in {*_NAMES, PREFIX + "PROFILE"}]
    if unknown:
        close = difflib.get_close_matches(unknown[0], _NAMES, 1)
        raise ConfigError(
            f"The application sets {unknown[0]}, and there is no such setting.",
            hint=f"Did you mean {close[0]}?" if close else "See them: headway config",
        )
    said = {
        name: " ".join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)
        for name, value in given.items()
        if name.startswith(PREFIX) and value is not None
    }
    return Config(environment={**os.environ, **said})


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def connection_settings(config: Config) -> dict[str, Any]:
    """Where the queue lives and whom it takes tasks from: what `TaskQueue.configure` takes."""
    return {
        "database": config.text("database"),
        # The default address is only a default: a Redis that nobody named is not used.
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
    """See the module. `refresh` as often as one likes: it looks every `LOOK_SECONDS`."""

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
        self._looked_at: float | None = None
        self._last: InForce | None = None

    def refresh(self) -> bool:
        """Look at the file and the rows, if that is due; whether anything is different from what it said last.

        A store that is away raises; what was in force stays.
        """
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        reload_file(self.config)
        self._set = self._checked(
            self._database().all("SELECT name, value FROM task_settings WHERE name NOT LIKE 'app.%'")
        )
        before, self._last = self._last, self.in_force
        if before not in (None, self._last):
            log.info("settings changed", old=str(before), new=str(self._last))
        return before != self._last

    def _checked(self, rows: list[tuple[Any, ...]]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name, raw in rows:
            if name not in LIVE:
                continue  # a newer headway's
            try:
                found[name] = check(name, raw)
                self._refused.pop(name, None)
            except InvalidInput as error:
                if name in self._set:
                    found[name] = self._set[name]
                if self._refused.get(name) != raw:
                    self._refused[name] = raw
                    log.warning("a setting is refused; the one before stays in force", error=str(error))
        return found

    def __getitem__(self, name: str) -> Any:
        return self._set[name] if name in self._set else self.config[LIVE[name]]

    @property
    def in_force(self) -> InForce:
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
        )


def reload_file(config: Config) -> bool:
    """Read headway.toml again if it changed; whether anything in it did. A bad one is said, once, and changes nothing."""
    try:
        return bool(config.reload_if_changed())
    except ConfigError as error:
        log.warning("headway.toml is refused; the settings before it stay in force", error=str(error))
        return False


def check(name: str, raw: object) -> float | None:
    """The value an operator gives to a setting, or `InvalidInput`."""
    if not is_text(name) or name not in LIVE:
        close = difflib.get_close_matches(str(name), LIVE, 1)
        raise InvalidInput(
            f"{str(name)[:40]!r} is no setting of a running queue.",
            hint=f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(LIVE)}.",
        )
    try:
        value = read_value(LIVE[name], "none" if raw is None else str(raw)[:40], "The running queue")
    except ConfigError as error:
        raise InvalidInput(str(error), hint="See what is set: headway queue settings") from error
    assert not isinstance(value, str)
    return value


def put(tx: Tx, name: str, value: object, *, by: str) -> None:
    """Set one for every worker and supervisor, from their next look on."""
    check_text(by, "who does it")
    checked = check(name, value)
    text = "none" if checked is None else str(checked)
    _write(tx, name, text, by)
    audit(tx, by, "queue.set", {"setting": name, "value": text})


def remove(tx: Tx, name: str, *, by: str) -> bool:
    """Back to what each host's own settings say; whether it was set."""
    check_text(by, "who does it")
    if not is_text(name) or name not in LIVE:
        check(name, "")
    gone = tx.execute("DELETE FROM task_settings WHERE name = ?", (name,)) == 1
    if gone:
        audit(tx, by, "queue.unset", {"setting": name})
    return gone


def declare_per_user(tx: Tx, per_user: int | None) -> None:
    """Write down how many tasks the application lets a user have, for those who steer the queue without it."""
    _write(tx, "app.per_user", "none" if per_user is None else str(per_user), "application")


def declared_per_user(database: Database) -> int | None:
    """What the application said last; one where it never said anything."""
    row = database.one("SELECT value FROM task_settings WHERE name = 'app.per_user'")
    if row is None:
        return 1
    value = read_value("queue_per_user", row[0], "The application's note")
    assert value is None or isinstance(value, int)
    return value


def _write(tx: Tx, name: str, text: str, by: str) -> None:
    tx.execute(
        "INSERT INTO task_settings (name, value, set_by, set_at) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "value = excluded.value, set_by = excluded.set_by, set_at = excluded.set_at "
        "WHERE task_settings.value <> excluded.value",
        (name, text, by, tx.now()),
    )


def listing(database: Database, config: Config) -> list[Setting]:
    """Every setting of the running queue as this host sees it."""
    rows = {name: facts for name, *facts in database.all("SELECT name, value, set_by, set_at FROM task_settings")}
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
