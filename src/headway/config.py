"""Settings: command line, then ``HEADWAY_*``, then ``headway.toml`` (its profile first), then the default.

    database = "sqlite:///ads.db"
    profile  = "production"

    [profiles.production]
    database = "postgresql://headway@db/headway"

`Config` remembers the origin of each value for ``headway config --show-origin``.

``HEADWAY_DATABASE`` and ``HEADWAY_REDIS`` are sufficient: every other address defaults to one of them.

The profiles development, staging and production are built in (`PROFILES`). Values at the top level of the file override
a built-in profile. A table ``[profiles.production]`` in the file overrides both.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import NamedTuple, SupportsIndex
from urllib.parse import unquote, urlsplit

from headway.errors import ConfigError, InvalidInput
from headway.telemetry import forget_secrets, redact

Setting = str | int | float | bool | None
#: The value of an option: one setting, or a list of strings (`Config.texts`).
Value = Setting | tuple[str, ...]

FILE = "headway.toml"
PREFIX = "HEADWAY_"

REDIS_SCHEMES = ("redis", "rediss", "unix")

#: Old name -> new name. Using an old name is an error that names the new one.
RENAMED = {"state": "projects_redis"}


class Option(NamedTuple):
    """One setting, with its default and its parser."""

    name: str
    default: Value
    read: Callable[[str], Value]
    help: str
    #: A second environment variable besides HEADWAY_NAME, used by the watcher's settings.
    variable: str | None = None
    #: While the option is not set: another option, and a function that derives the value from it.
    follows: tuple[str, Callable[[str], str]] | None = None
    #: The value is never displayed.
    secret: bool = False


def _text(text: str) -> str:
    return text


def _as_is(text: str) -> str | None:
    """Accept any text or number. The code that uses the setting validates it."""
    return text or None


def texts(text: str) -> tuple[str, ...]:
    """Split a list from the environment at commas and spaces. (In TOML a list is an array.)"""
    return tuple(part for part in text.replace(",", " ").split() if part)


def _address(text: str, schemes: tuple[str, ...], examples: str) -> str:
    try:
        parts = urlsplit(text, allow_fragments=False)  # a file name may contain #
        known = parts.scheme in schemes and ("," in parts.netloc or parts.port != 0)  # PostgreSQL accepts several hosts
    except ValueError:  # the port is not a number, or an IPv6 address is incomplete
        known = False
    if not known:
        raise ValueError(f"an address: {examples}")
    return text


def _addresses(text: str) -> str:
    """Accept addresses separated by line breaks, commas or spaces. The code that opens them validates them."""
    return text


def _redis_address(text: str) -> str:
    """Check that the address names a server.

    `headway._redis` checks the rest on use. It is not imported here, because most commands do not need Redis.
    """
    examples = "redis://host:6379/0, rediss://host:6379/0 or unix:///path/to/socket"
    if text.partition("://")[0] not in REDIS_SCHEMES:  # urlsplit would accept capitals and a missing //
        raise ValueError(f"an address: {examples}")
    return _address(text, REDIS_SCHEMES, examples)


def _store_address(text: str) -> str:
    return _address(
        text,
        ("sqlite", "postgresql", "postgres", *REDIS_SCHEMES, "firestore", "http", "https"),
        "sqlite:///file.db, postgresql://user@host/name, redis://host:6379/1 or firestore://PROJECT",
    )


def _web_address(text: str) -> str:
    return _address(text, ("http", "https"), "https://headway.example.org")


def is_server(address: str) -> bool:
    """Return whether an address names a Headway server (`headway serve`), not a database."""
    return address.startswith(("http://", "https://"))


def database_option(database: str) -> str:
    """Return the ``--database`` option to print in a suggested command, with the password redacted."""
    return f"--database {quote(redact(database))}"


def is_loopback(text: str) -> bool:
    """Return whether the text is a loopback address, including IPv4-mapped IPv6 (``::ffff:127.0.0.1``)."""
    import ipaddress  # imported late: it takes milliseconds and most commands do not need it

    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def on_database(number: int) -> Callable[[str], str]:
    """Return a function that changes the database number of a Redis address."""

    def move(address: str) -> str:
        parts = urlsplit(address, allow_fragments=False)
        options = [part for part in parts.query.split("&") if part and unquote(part.partition("=")[0]) != "db"]
        path = f"/{number}"
        if parts.scheme == "unix":  # the path names the socket
            path, options = parts.path, [*options, f"db={number}"]
        return f"{parts.scheme}://{parts.netloc}{path}{'?' if options else ''}{'&'.join(options)}"

    return move


def _same(address: str) -> str:
    return address


def _whole(minimum: int, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise ValueError(f"a whole number of at least {minimum}")
        if most is not None and number > most:
            raise ValueError(f"a whole number of at most {most:,}")
        return number

    return read


def _from_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 10**9:
        raise ValueError("a number from 0")
    return number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise ValueError("a number above 0")
    return number


def _within(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = least - 1.0
        if not least <= number <= most:
            raise ValueError(f"a number from {least:g} to {most:g}")
        return number

    return read


def _later_limit(text: str) -> str:
    from headway.core.retry import LaterLimit  # imported late: most commands do not need it

    try:
        return str(LaterLimit.parse(text))
    except InvalidInput:
        raise ValueError("a count, or a count and a duration of at most 365 days, such as 100/24h") from None


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text.lower()

    return read


def _optional(read: Callable[[str], Setting]) -> Callable[[str], Setting]:
    return lambda text: None if text.lower() in ("", "none", "off") else read(text)


_maybe_text = _optional(_text)
_maybe_redis = _optional(_redis_address)
_maybe_store = _optional(_store_address)
_maybe_web = _optional(_web_address)
#: Parsers of addresses. Addresses are validated on the command line too, where they cannot be switched off.
_ADDRESSES: dict[Callable[[str], Value], Callable[[str], str]] = {
    _redis_address: _redis_address,
    _maybe_redis: _redis_address,
    _maybe_store: _store_address,
    _maybe_web: _web_address,
}
#: Parsers of values that must be strings in TOML.
_TEXTUAL = (_text, _maybe_text, _addresses, *_ADDRESSES)


#: All settings of all packages.
OPTIONS: tuple[Option, ...] = (
    Option("database", "sqlite:///headway.db", _text, "the database with all records"),
    Option("redis", "redis://localhost:6379/0", _redis_address, "the Redis server"),
    Option(
        "projects_redis", None, _maybe_redis, "Redis with the projects (default: database 1 of redis)",
        follows=("redis", on_database(1)),
    ),
    Option(
        "queue_redis", None, _maybe_redis, "Redis with RQ's queues (default: the database that redis names)",
        follows=("redis", _same),
    ),
    Option("states", None, _maybe_store, "the store of task states (default: database)", follows=("database", _same)),
    Option("workers", None, _optional(_whole(0)), "how many items run at once (default, and 0: one per core)"),
    Option("mode", "process", _one_of("process", "thread", "async"), "how items run"),
    Option("start", "auto", _one_of("auto", "fork", "spawn"), "how worker processes are started"),
    Option("retries", 2, _whole(0), "retries of a failed item"),
    Option("retry_delay", 1.0, _from_zero, "seconds before the first retry; doubled for each later one"),
    Option("later_limit", "100/24h", _later_limit, "how often, and for how long in all, RetryLater may postpone one item"),
    Option("timeout", None, _optional(_positive), "time limit of an item in seconds"),
    Option("rate", None, _optional(_positive), "maximum items started per second"),
    Option("max_failures", None, _optional(_whole(1)), "stop the run after this many dead letters"),
    Option("payload_limit", 262_144, _whole(1), "maximum bytes of an item's payload"),
    Option("retention_days", 30.0, _positive, "days that headway purge keeps finished jobs"),
    Option("sinks", None, _addresses, "receivers of events: log: https://... slack://... mailto:... redis://... command:..."),
    Option("token", None, _maybe_text, "the token for a server that database names: https://..."),
    Option("webhook", None, _maybe_text, "URL that receives an event when a job finishes"),
    Option("webhook_secret", None, _maybe_text, "secret that signs webhooks (Headway-Signature)", secret=True),
    Option("web_url", None, _maybe_web, "address of the dashboard, for links in notifications: https://headway.example.org"),
    Option("smtp_host", None, _maybe_text, "the mail server of mailto: sinks"),
    Option("smtp_port", None, _optional(_whole(1, 65_535)), "its port (default: 587, 465 for tls, 25 for none)"),
    Option("smtp_tls", "starttls", _one_of("starttls", "tls", "none"), "how the connection to it is encrypted"),
    Option("smtp_user", None, _maybe_text, "user name at the mail server"),
    Option("smtp_password", None, _maybe_text, "password at the mail server", secret=True),
    Option("smtp_from", None, _maybe_text, "sender of the mails (default: smtp_user)"),
    Option("progress", "auto", _one_of("auto", "bar", "plain", "json", "none"), "how a run displays its progress"),
    Option("color", "auto", _one_of("auto", "always", "never"), "colours on the terminal"),
    Option("log_level", "WARNING", _one_of("debug", "info", "warning", "error", "critical"), "what is logged"),
    Option("log_format", "plain", _one_of("plain", "json"), "how it is logged"),
    # Queue. Running workers reload their settings. `headway queue set` overrides these values.
    Option("queue_mode", "auto", _one_of("auto", "rq", "database", "hybrid"), "how tasks reach the workers"),
    Option("queue_per_user", 1, _optional(_whole(1, 10_000)), "maximum active tasks per user; none: unlimited"),
    Option("web_keys", (), texts, "keys that sign tickets for the web application, the newest first", secret=True),
    Option("web_proxies", (), texts, "proxies (addresses or networks) whose X-Forwarded-For names the client"),
    Option("web_backlog", 1000, _optional(_whole(1)), "waiting tasks above which pages and API share answers for 2 s"),
    Option("web_audience", "headway", _text, "the server that tickets for the web application are meant for"),
    Option("queue_keys", (), texts, "Fernet keys for payloads, the newest first", secret=True),
    Option("queue_workers", 1, _whole(1, 1000), "minimum worker processes of a supervisor"),
    Option("queue_max_workers", None, _optional(_whole(1, 1000)), "maximum processes under load (default: queue_workers)"),
    Option("queue_drain", 30.0, _from_zero, "seconds that tasks get to finish when their worker stops"),
    Option("queue_timeout", None, _optional(_positive), "time limit of a task in seconds; a handler can only lower it"),
    Option("queue_memory_limit", 500, _whole(10), "MB the process of a task may use"),
    Option("queue_cancel_grace", 5.0, _from_zero, "seconds a cancelled task gets to end by itself"),
    Option("queue_batch", 10, _whole(1, 1000), "tasks claimed at once, unless each runs in its own process"),
    Option("queue_retention_days", 30.0, _positive, "days that ended tasks are kept"),
    Option(
        "queue_redis_memory", None, _optional(_whole(1)),
        "MB Redis may use; near it tasks wait in SQL alone (default: its maxmemory)",
    ),
    Option("queue_redis_warn", 75.0, _within(1, 100), "percent of Redis's memory that is logged; below it hints resume"),
    Option("queue_redis_critical", 85.0, _within(1, 100), "percent above which tasks wait in SQL alone, with an alert"),
    Option("queue_prefix", "headway:", _maybe_text, "prefix of the queue names in RQ; none: no prefix"),
    # Alerts. Each rule has one limit; "off" disables the rule.
    Option("alert_store_away", 30.0, _optional(_positive), "seconds that a store may be unreachable before an alert opens"),
    Option("alert_stalled_job", 900.0, _optional(_positive), "seconds a job may be held without a record"),
    Option("alert_failure_spike", 0.2, _optional(_within(0.001, 1.0)), "share of runs that may fail in the window"),
    Option("alert_failure_runs", 20, _whole(1), "minimum runs in the window for a failure spike"),
    Option("alert_failure_window", 300.0, _within(60.0, 86_400.0), "seconds that failures are counted over"),
    Option("alert_worker_lost", 30.0, _optional(_within(10.0, 86_400.0)), "seconds of silence before a worker is lost"),
    Option("alert_no_handler", 10.0, _optional(_positive), "seconds tasks may wait that no online worker runs"),
    Option("alert_delay", 300.0, _optional(_positive), "seconds the oldest task of a queue may wait"),
    Option("alert_backlog", 10_000, _optional(_whole(1, 10_000_000)), "tasks of a queue that may wait"),
    Option("alert_new_cause", 3600.0, _optional(_positive), "seconds a new cause of failures stays an alert"),
    Option("alert_store_slow", 1.0, _optional(_positive), "seconds a small transaction may take"),
    Option("alert_redis_memory", 0.85, _optional(_within(0.001, 1.0)), "share of its memory that Redis may use"),
    Option("alert_event_lag", 300.0, _optional(_positive), "seconds an event may wait for a sink"),
    Option("alert_open_after", 60.0, _from_zero, "seconds a value must stand above its limit before an alert opens"),
    Option("alert_close_after", 120.0, _from_zero, "seconds it must stand below the lower limit before it closes"),
    Option("alert_close_share", 0.8, _within(0.1, 1.0), "the lower limit, as a share of the limit"),
    # Watcher. The environment variables have the names of its specification. The watcher validates them at startup.
    Option(
        "watch_redis", None, _as_is, "the Redis of RQ that is watched (default: queue_redis)",
        variable="REDIS_URL", follows=("queue_redis", _same),
    ),
    Option("watch_queues", (), texts, "the RQ queues that are watched", variable="RQ__QUEUE"),
    Option("watch_channel", None, _as_is, "the channel its events are published on", variable="DIGITS_EVENTS_CHANNEL"),
    Option(
        "watch_stuck_timeout", None, _as_is, "seconds a job may run before it is called stuck",
        variable="RQ_WATCHER_STUCK_TIMEOUT_SECONDS",
    ),
    Option(
        "watch_store", None, _as_is, "where it remembers what it reported; the word redis: in watch_redis (default: database)",
        variable="RQ_WATCHER_STORE", follows=("database", _same),
    ),
    Option("watch_event", None, _as_is, "name of its event", variable="RQ_WATCHER_EVENT"),
    Option(
        "watch_outcome_event", None, _as_is, "name of its event for later outcomes", variable="RQ_WATCHER_OUTCOME_EVENT"
    ),
    Option("watch_fields", None, _as_is, "JSON object put into every event's data", variable="RQ_WATCHER_FIELDS"),
    Option(
        "watch_payload_fields", (), texts, "keyword arguments of the job to repeat in its event",
        variable="RQ_WATCHER_PAYLOAD_FIELDS",
    ),
    Option("watch_stream", None, _as_is, "stream for a durable copy of every event", variable="RQ_WATCHER_STREAM"),
    Option("watch_stream_length", None, _as_is, "entries kept in it", variable="RQ_WATCHER_STREAM_LENGTH"),
    Option(
        "watch_sweep", None, _as_is, "seconds between sweeps without a notification",
        variable="RQ_WATCHER_SWEEP_SECONDS",
    ),
    Option(
        "watch_ping", None, _as_is, "seconds the link may be silent before it is tested",
        variable="RQ_WATCHER_PING_SECONDS",
    ),
    Option(
        "watch_lost_grace", None, _as_is, "seconds added to a lease before a worker is called lost",
        variable="RQ_WATCHER_LOST_GRACE_SECONDS",
    ),
    Option("watch_page_size", None, _as_is, "entries read at a time", variable="RQ_WATCHER_PAGE_SIZE"),
)  # fmt: skip
_BY_NAME = {option.name: option for option in OPTIONS}

#: Built-in profiles and their values.
PROFILES: Mapping[str, Mapping[str, Value]] = {
    # One worker that stops quickly.
    "development": {"log_level": "info", "queue_drain": 2.0, "queue_retention_days": 1.0},
    # Like production, with fewer processes and a shorter retention.
    "staging": {"log_level": "info", "log_format": "json", "queue_max_workers": 2, "queue_retention_days": 7.0},
    "production": {"log_level": "info", "log_format": "json", "queue_workers": 2, "queue_max_workers": 8},
}


class Found(NamedTuple):
    """A value and its origin."""

    value: Value
    origin: str


class Config:
    """The effective settings. Long-running processes call `reload`, which returns the changed values."""

    def __init__(
        self,
        *,
        cli: Mapping[str, Value] | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._cli = {name: value for name, value in (cli or {}).items() if value is not None}
        self._environment = environment
        self._path = (directory or Path()) / FILE  # shown in messages
        self._file = _absolute(self._path)  # the process may change its directory before a reload
        self._stamp = self._look()
        #: The selected profile.
        self.profile: str | None = None
        self._found = self._read()

    def with_cli(self, cli: Mapping[str, Value]) -> Config:
        """Return a copy with the values of ``cli`` on top. The copy reloads independently."""
        return Config(cli={**self._cli, **cli}, environment=self._environment, directory=self._file.parent)

    def __getitem__(self, name: str) -> Setting:
        value = self._found[name].value
        assert not isinstance(value, tuple), "a list is read by texts()"
        return value

    def text(self, name: str) -> str:
        """Return a setting as text."""
        return str(self[name])

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a setting whose value is a list of strings."""
        value = self._found[name].value
        assert isinstance(value, tuple), "a single value is read by name"
        return value

    def origin(self, name: str) -> str:
        """Return the source of a value: a variable, a file, ``command line``, ``default``, ..."""
        return self._found[name].origin

    @property
    def database_option(self) -> str:
        """The ``--database`` option that suggested commands need; empty if the settings name the database."""
        if self.origin("database") != "command line":
            return ""
        return database_option(self.text("database"))

    def is_set(self, name: str) -> bool:
        """Return whether this setting, or the one it follows, was set. A server of a default need not exist."""
        follows = _BY_NAME[name].follows
        if follows is not None and self.origin(name) == f"follows {follows[0]}":
            return self.is_set(follows[0])
        return self.origin(name) != "default"

    def items(self) -> list[tuple[Option, Found]]:
        """Return every option with its value and origin."""
        return [(option, self._found[option.name]) for option in OPTIONS]

    def reload(self) -> dict[str, Value]:
        """Read environment and file again and return the changed settings.

        An invalid file raises `ConfigError` and changes nothing.
        """
        before, after = self._found, self._read()
        forget_secrets()
        self._found = after
        return {name: found.value for name, found in after.items() if found.value != before[name].value}

    def reload_if_changed(self) -> dict[str, Value]:
        """Call `reload` if the file changed since the last call. Cheap enough to call every second.

        An invalid file raises once and is not read again until it changes.
        """
        stamp = self._look()
        if stamp == self._stamp:
            return {}
        try:
            return self.reload()
        finally:
            self._stamp = stamp  # last: other threads see `is_outdated` until the file is read

    @property
    def is_outdated(self) -> bool:
        """Whether the file changed since it was last read. Costs one `stat`."""
        return self._look() != self._stamp

    def _look(self) -> tuple[int, ...] | None:
        """Return a fingerprint of the file from `stat`, or None if the file does not exist."""
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> dict[str, Found]:
        environment = os.environ if self._environment is None else self._environment
        base, profiles = _read_file(self._path, self._file)
        profile = environment.get(PREFIX + "PROFILE", "").strip() or base.get("profile")
        chosen: Mapping[str, Value] = {}
        built_in: Mapping[str, Value] = {}
        if profile is not None:
            if not isinstance(profile, str) or not (profile in profiles or profile in PROFILES):
                known = ", ".join(sorted({*profiles, *PROFILES}))
                raise ConfigError(f"There is no profile {profile!r} in {self._path} (there are: {known}).")
            chosen, built_in = profiles.get(profile, {}), PROFILES.get(profile, {})
        for old, new in RENAMED.items():
            if PREFIX + old.upper() in environment:
                raise _renamed(PREFIX + old.upper(), PREFIX + new.upper())
        _warn_of_misspelt(environment)
        found: dict[str, Found] = {}
        for option in OPTIONS:
            found[option.name] = self._look_up(option, environment, chosen, f"{self._path} [profiles.{profile}]", base)
            if option.name in built_in and found[option.name].origin == "default":
                found[option.name] = Found(built_in[option.name], f"profile {profile}")
            if option.follows is not None and found[option.name].value is None:
                leader, derive = option.follows  # OPTIONS lists a leader before its followers
                found[option.name] = Found(derive(str(found[leader].value)), f"follows {leader}")
        self.profile = profile
        return found

    def _look_up(
        self,
        option: Option,
        environment: Mapping[str, str],
        chosen: Mapping[str, Value],
        chosen_where: str,
        base: Mapping[str, Value],
    ) -> Found:
        """Return the value from the source with the highest precedence."""
        name, variable = option.name, PREFIX + option.name.upper()
        if name in self._cli:
            return Found(_checked(option, self._cli[name]), "command line")
        if variable in environment:
            # A secret read from a file ends with a newline. No value begins or ends with white space.
            return Found(_value(option, environment[variable].strip(), variable), variable)
        if option.variable is not None and environment.get(option.variable):
            return Found(_value(option, environment[option.variable].strip(), option.variable), option.variable)
        if name in chosen:
            return Found(_value(option, chosen[name], chosen_where), chosen_where)
        if name in base:
            return Found(_value(option, base[name], str(self._path)), str(self._path))
        return Found(option.default, "default")


def read_value(name: str, raw: str, where: str) -> Setting:
    """Parse the text of one setting, or raise `ConfigError`. ``where`` is its origin for the message."""
    value = _value(_BY_NAME[name], raw, where)
    assert not isinstance(value, tuple), "a list is not set one by one"
    return value


class MisspeltVariable(UserWarning):
    """A ``HEADWAY_*`` variable that is not a setting but has a similar name."""


#: Variables that this process has already warned about.
_warned: set[str] = set()


def _warn_of_misspelt(environment: Mapping[str, str]) -> None:
    """Warn once about each ``HEADWAY_*`` variable whose name resembles a setting.

    Other unknown names are ignored, as are variables that Kubernetes sets for services (HEADWAY_DATABASE_PORT).
    """
    known = {PREFIX + name.upper() for name in (*_BY_NAME, "profile")}
    for name in sorted(name for name in environment if name.startswith(PREFIX) and name not in known | _warned):
        if "_PORT" in name or "_SERVICE_" in name:
            continue
        import difflib

        close = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), [*_BY_NAME, "profile"], 1, cutoff=0.75)
        _warned.add(name)
        if close:
            text = f"{name} is not a setting and is ignored. Did you mean {PREFIX}{close[0].upper()}?"
            warnings.warn(text, MisspeltVariable, stacklevel=2)


def _renamed(old: str, new: str) -> ConfigError:
    return ConfigError(f"The setting {old} has another name now: {new}.", hint=f"Rename it to {new}.")


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError:  # the current directory was deleted
        return path


def _read_file(path: Path, file: Path) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError as error:
        if file.is_symlink():  # a dangling link: using the defaults would open another database
            raise ConfigError(
                f"{path} is a link to a file that is not there.", hint="Put that file back, or remove the link."
            ) from error
        return {}, {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=f"Correct {path} or move it away.") from error
    import tomllib  # imported late: every command runs this, and most have no file

    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # includes numbers with too many digits and deeply nested lists
        raise ConfigError(f"{path} cannot be read: {error}", hint=f"Correct {path} or move it away.") from error
    profiles = content.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
        raise ConfigError(
            f"{path}: 'profiles' is not a table of tables.", hint="Write [profiles.NAME] above its settings."
        )
    for where, table in [("", content), *((f" [profiles.{name}]", table) for name, table in profiles.items())]:
        for name in table:
            if name in RENAMED:
                raise _renamed(f"{name!r} in {path}{where}", f"{RENAMED[name]!r}")
            if name not in _BY_NAME and not (name == "profile" and not where):
                import difflib

                close = difflib.get_close_matches(name, _BY_NAME, 1)
                hint = f"Did you mean {close[0]!r}?" if close else "See: headway config"
                raise ConfigError(f"{path}{where}: there is no setting {name!r}.", hint=hint)
    return content, profiles


def _checked(option: Option, value: Value) -> Value:
    """Validate a value from the command line or from a calling program."""
    if option.read in _ADDRESSES:
        return _value(option._replace(read=_ADDRESSES[option.read]), value, "command line")
    if option.read in (_as_is, texts):
        return value  # validated by the code that uses it
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        value = int(value)  # a NumPy integer
    try:
        _check_type(option, value)
        return option.read(str(value))
    except ValueError as error:
        raise InvalidInput(f"{option.name} must be {error} (got {redact(repr(value))}).") from None


def _check_type(option: Option, raw: object) -> None:
    if option.read is texts and isinstance(raw, list):
        if not all(isinstance(part, str) for part in raw):
            raise ValueError("a list of texts")
        return
    if option.read in (*_TEXTUAL, texts) and not isinstance(raw, str):
        raise ValueError("a list of texts" if option.read is texts else "a text, in quotes")
    if not isinstance(raw, str | int | float):  # TOML also has lists, tables and dates
        raise ValueError("a single value")  # noqa: TRY004 - reported like any other invalid value


def _value(option: Option, raw: Value | list[str], where: str) -> Value:
    """Validate a value from the file or the environment. Numbers in TOML need no quotes."""
    try:
        if option.read is _addresses and isinstance(raw, list) and all(isinstance(one, str) for one in raw):
            raw = "\n".join(raw)
        _check_type(option, raw)
        if isinstance(raw, list):
            return tuple(raw)
        return option.read(str(raw) if not isinstance(raw, bool) else str(raw).lower())
    except ValueError as error:
        # Python refuses to convert very large integers to decimal text.
        shown = hex(raw)[:40] + "..." if isinstance(raw, int) and abs(raw) >= 2**64 else redact(str(raw))
        raise ConfigError(f"{where}: {option.name} must be {error} (got {shown!r}).") from error
