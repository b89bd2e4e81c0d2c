"""Settings: command line, then ``HEADWAY_*``, then ``headway.toml`` (its profile first), then the default.

    database = "sqlite:///ads.db"
    profile  = "production"

    [profiles.production]
    database = "postgresql://headway@db/headway"

`Config` remembers where each value came from, so that ``headway config --show-origin`` can say it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError
from headway.telemetry import forget_secrets, redact

Setting = str | int | float | bool | None

FILE = "headway.toml"
PREFIX = "HEADWAY_"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its default and how a text becomes its value."""

    name: str
    default: Setting
    read: Callable[[str], Setting]
    help: str


def _text(text: str) -> str:
    return text


def _whole(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise ValueError(f"a whole number of at least {minimum} is needed")
        return number

    return read


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise ValueError("a number above 0 is needed")
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)} is needed")
        return text.lower()

    return read


def _addresses(text: str) -> str:
    """As they are given, one per line or separated by commas or spaces; who opens them says what is wrong with one."""
    return text


def _optional(read: Callable[[str], Setting]) -> Callable[[str], Setting]:
    return lambda text: None if text.lower() in ("", "none", "off") else read(text)


#: Every setting there is. A part adds its own here, so that one list answers "what can I set?".
OPTIONS: tuple[Option, ...] = (
    Option("database", "sqlite:///headway.db", _text, "where the records are kept"),
    Option("state", "redis://localhost:6379/1", _text, "Redis with the state of projects"),
    Option("states", None, _optional(_text), "where the states of tasks are kept (default: the database)"),
    Option("workers", None, _optional(_whole(1)), "how many items run at once (default: one per core)"),
    Option("mode", "process", _one_of("process", "thread", "async"), "how items run"),
    Option("retries", 2, _whole(0), "further tries of an item that failed"),
    Option("retry_delay", 1.0, _positive, "seconds before the first further try; doubled for each one after it"),
    Option("timeout", None, _optional(_positive), "seconds an item may take"),
    Option("rate", None, _optional(_positive), "items started per second, at most"),
    Option("max_failures", None, _optional(_whole(1)), "stop when so many items died in this run"),
    Option("payload_limit", 262_144, _whole(1), "bytes one item's payload may have"),
    Option("retention_days", 30.0, _positive, "how long finished jobs are kept by headway purge"),
    Option("sinks", None, _addresses, "who is told events: log: https://... redis://...?channel=X command:/program"),
    Option("webhook", None, _optional(_text), "one web address more that is told events"),
    Option("progress", "auto", _one_of("auto", "bar", "plain", "json", "none"), "how a run shows itself"),
    Option("color", "auto", _one_of("auto", "always", "never"), "colours on the terminal"),
    Option("log_level", "WARNING", _one_of("debug", "info", "warning", "error", "critical"), "what is logged"),
    Option("log_format", "plain", _one_of("plain", "json"), "how it is logged"),
)
_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class Found:
    """A value and where it came from."""

    value: Setting
    origin: str


class Config:
    """The settings in force. Reading it again (`reload`) tells what changed, for parts that live long."""

    def __init__(
        self,
        *,
        cli: Mapping[str, Setting] | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._cli = {name: value for name, value in (cli or {}).items() if value is not None}
        self._environment = environment
        self._path = (directory or Path()) / FILE
        self._found = self._read()

    def __getitem__(self, name: str) -> Setting:
        return self._found[name].value

    def text(self, name: str) -> str:
        return str(self[name])

    def origin(self, name: str) -> str:
        return self._found[name].origin

    def items(self) -> list[tuple[Option, Found]]:
        return [(option, self._found[option.name]) for option in OPTIONS]

    def reload(self) -> dict[str, Setting]:
        """Read environment and file again; the settings whose value changed. A bad file changes nothing and raises."""
        before, after = self._found, self._read()
        forget_secrets()
        self._found = after
        return {name: found.value for name, found in after.items() if found.value != before[name].value}

    def _read(self) -> dict[str, Found]:
        environment = os.environ if self._environment is None else self._environment
        base, profiles = _read_file(self._path)
        profile = environment.get(PREFIX + "PROFILE") or base.get("profile")
        chosen: dict[str, Setting] = {}
        if profile is not None:
            if not isinstance(profile, str) or profile not in profiles:
                known = ", ".join(sorted(profiles)) or "none"
                raise ConfigError(f"There is no profile {profile!r} in {self._path} (it has: {known}).")
            chosen = profiles[profile]
        found: dict[str, Found] = {}
        for option in OPTIONS:
            name, variable = option.name, PREFIX + option.name.upper()
            if name in self._cli:
                found[name] = Found(self._cli[name], "command line")
            elif variable in environment:
                found[name] = Found(_value(option, environment[variable], variable), variable)
            elif name in chosen:
                where = f"{self._path} [profiles.{profile}]"
                found[name] = Found(_value(option, chosen[name], where), where)
            elif name in base:
                found[name] = Found(_value(option, base[name], str(self._path)), str(self._path))
            else:
                found[name] = Found(option.default, "default")
        return found


def _read_file(path: Path) -> tuple[dict[str, Setting], dict[str, dict[str, Setting]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}, {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=f"Correct {path} or move it away.") from error
    import tomllib  # here, because most have no file and every command starts with this

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=f"Correct {path} or move it away.") from error
    profiles = content.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
        raise ConfigError(
            f"{path}: 'profiles' is not a table of tables.", hint="Write [profiles.NAME] above its settings."
        )
    for where, table in [("", content), *((f" [profiles.{name}]", table) for name, table in profiles.items())]:
        for name in table:
            if name not in _BY_NAME and not (name == "profile" and not where):
                import difflib

                close = difflib.get_close_matches(name, _BY_NAME, 1)
                hint = f"Did you mean {close[0]!r}?" if close else "See: headway config"
                raise ConfigError(f"{path}{where}: there is no setting {name!r}.", hint=hint)
    return content, profiles


def _check_type(option: Option, raw: object) -> None:
    if option.read in (_text, _addresses) and not isinstance(raw, str):
        raise ValueError("a text is needed, in quotes")
    if not isinstance(raw, str | int | float):  # TOML has lists, tables and dates too
        raise ValueError("a single value is needed")  # noqa: TRY004 - told as any other bad value


def _value(option: Option, raw: Setting, where: str) -> Setting:
    """A value from the file or the environment, checked; numbers in TOML need no quotes."""
    try:
        if option.read is _addresses and isinstance(raw, list) and all(isinstance(one, str) for one in raw):
            raw = "\n".join(raw)
        _check_type(option, raw)
        return option.read(str(raw) if not isinstance(raw, bool) else str(raw).lower())
    except ValueError as error:
        shown = redact(str(raw))
        raise ConfigError(f"{where}: {option.name} = {shown!r} is not acceptable: {error}.") from error
