"""From the addresses of the settings to sinks.

    log:                                  one line in the log
    https://user:password@host/path       POST of the event
    slack://host/path                     a chat message, to an incoming webhook (slack+http:// without TLS)
    mailto:ops@example.org                an e-mail, by the SMTP server of the settings
    redis://host/0?channel=NAME           PUBLISH of the event, for current subscribers only
    redis://host/0?stream=NAME&maxlen=N   XADD of the event in the field ``event``, trimmed to about N entries
    command:/path/to/program argument     the event on stdin; exit code 0 means delivered, 65 means never

Options follow a ``#`` at the end of any address. ``#types=task.failed,alert.*`` limits the event types, ``#name=billing``
sets the name. ``#name=billing&types=job.completed`` sets both.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from headway import _redis
from headway.errors import InvalidInput
from headway.events.envelope import whole
from headway.events.sinks.command import CommandSink
from headway.events.sinks.mail import MailServer, MailSink, Settings
from headway.events.sinks.redis import RedisChannelSink, RedisStreamSink
from headway.events.sinks.sink import ConfiguredSink, LogSink, Sink, digest
from headway.events.sinks.slack import SCHEMES as SLACK_SCHEMES
from headway.events.sinks.slack import SlackSink
from headway.events.sinks.webhook import WebhookSink

_SCHEMES = "log:, https://, slack://, mailto:, redis://, rediss://, unix:// or command:"
_OPTIONS = re.compile(r"#((?:types|name)=[^#\s]*)$")
_NEXT = re.compile(r"[\s,]+(?=(?:log|command|mailto):|(?:https?|slack(?:\+http)?|rediss?|unix)://)")


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """What sinks need besides their address."""

    secret: str | None = None  # signs webhooks
    web_url: str | None = None  # address of the dashboard, for links in messages
    mail: Callable[[], MailServer | None] = lambda: (
        None
    )  # called for mailto: only; raises if its settings are incomplete


def configured_sinks(config: Settings) -> list[Sink]:
    """Open the sinks of the settings ``sinks`` and ``webhook``. Raises `InvalidInput` for the first invalid one."""
    return open_sinks(config["sinks"], config["webhook"], settings=_settings_of(config))


def open_configured(address: str, config: Settings) -> Sink:
    """Open the sink of one address with the secret, the web address and the mail server of the settings."""
    return open_sink(address, settings=_settings_of(config))


def _settings_of(config: Settings) -> SinkSettings:
    secret, web_url = config["webhook_secret"], config["web_url"]
    return SinkSettings(
        str(secret) if secret else None, str(web_url) if web_url else None, lambda: MailServer.of(config)
    )


def open_sinks(
    addresses: object, *more: object, secret: object = None, settings: SinkSettings | None = None
) -> list[Sink]:
    """Open sinks by their addresses, separated by commas, spaces or line breaks. Nothing is sent.

    An address given twice is one sink. Webhooks are signed with ``secret``.
    """
    settings = settings or SinkSettings(secret=str(secret) if secret else None)
    found: dict[str, Sink] = {}
    for text in (addresses, *more):
        for line in str(text or "").splitlines():
            for address in _NEXT.split(line.strip(" \t,")):
                if address:
                    sink = open_sink(address, settings=settings)
                    found.setdefault(sink.name, sink)
    return list(found.values())


def open_sink(address: str, *, secret: str | None = None, settings: SinkSettings | None = None) -> Sink:
    """Open the sink of one address with its options. Nothing is sent. Raises `InvalidInput` for an invalid address."""
    settings = settings or SinkSettings(secret=secret)
    options = _OPTIONS.search(address)
    if options is None:
        return _open(address, settings)
    sink = _open(address[: options.start()].rstrip(), settings)
    name, types = _read_options(options[1])
    types = getattr(sink, "types", None) if types is None else types
    return ConfiguredSink(sink, f"{sink.name.partition(' ')[0]} {name}" if name else sink.name, types)


def _read_options(text: str) -> tuple[str | None, tuple[str, ...] | None]:
    from headway.events.schema import TYPES

    hint = "Use #types=job.completed,task.* and #name=billing, or both with & between them."
    given = dict(pair.partition("=")[::2] for pair in text.split("&"))
    if given.keys() - {"name", "types"}:
        raise InvalidInput(f"A sink has an unknown option: {min(given.keys() - {'name', 'types'})[:40]!r}.", hint=hint)
    name, types = given.get("name"), given.get("types")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise InvalidInput(
            f"The name of a sink must have 1 to 64 letters, digits, '.', '-' or '_' (got {name[:64]!r}).", hint=hint
        )
    if types is None:
        return name, None
    for pattern in types.split(","):
        ours = not pattern or pattern.startswith(("job.", "task.", "alert."))  # the watcher's types can be renamed
        if ours and not fnmatch.filter(TYPES, pattern):
            raise InvalidInput(f"No type of event matches {pattern[:40]!r}.", hint=f"The types are {', '.join(TYPES)}")
    return name, tuple(types.split(","))


def _open(address: str, settings: SinkSettings) -> Sink:
    scheme = address.partition(":")[0]
    if address == "log:":
        return LogSink()
    if scheme in ("http", "https"):
        return WebhookSink(address, secret=settings.secret)
    if scheme in SLACK_SCHEMES and address.startswith(f"{scheme}://"):
        return SlackSink(address, web_url=settings.web_url)
    if scheme == "mailto":
        return MailSink(address, settings.mail(), web_url=settings.web_url)
    if scheme in ("redis", "rediss", "unix"):
        return _open_redis(address)
    if scheme == "command":
        return _open_command(address.removeprefix("command:"))
    shown = f"{scheme}:..." if re.fullmatch(r"[a-z+]{1,20}", scheme) and ":" in address else "The text"
    raise InvalidInput(f"{shown} is not the address of a sink.", hint=f"Use {_SCHEMES}")


def _open_command(text: str) -> Sink:
    try:
        return CommandSink(shlex.split(text))
    except ValueError as error:
        raise InvalidInput(f"A sink's command cannot be read: {error}.", hint="Close its quotes.") from error


def _open_redis(address: str) -> Sink:
    hint = "Use redis://host:6379/0?channel=NAME or redis://host:6379/0?stream=NAME&maxlen=100000"
    try:
        parts = urlsplit(address)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        _ = parts.port
    except ValueError:  # its message may contain a part of the password
        raise InvalidInput("A sink's Redis address cannot be read.", hint=hint) from None
    options = dict(pairs)
    channel, stream, maxlen = (options.pop(name, None) for name in ("channel", "stream", "maxlen"))
    if (
        options
        or len({name for name, _ in pairs}) < len(pairs)
        or bool(channel) == bool(stream)
        or (maxlen is not None and not stream)
    ):
        raise InvalidInput("A sink's Redis address must name one channel or one stream, and nothing else.", hint=hint)
    if maxlen is not None and not (maxlen.isdecimal() and 0 < int(maxlen[:12]) < 10**9):
        raise InvalidInput(f"maxlen must be between 1 and 999,999,999 (got {whole(maxlen)[:20]!r}).", hint=hint)
    if "@" in parts.netloc and "@" in parts.path:
        raise InvalidInput("A sink's Redis address is ambiguous: it has two @.", hint=hint)
    client = _redis.connect(address.partition("?")[0], role="queue", name="sink", max_connections=4)
    host = parts.netloc.rpartition("@")[2] or parts.path
    if channel:
        return RedisChannelSink(client, channel, name=f"channel {channel} {host} {digest(address)}")
    length = int(maxlen or 100_000)
    return RedisStreamSink(client, str(stream), maxlen=length, name=f"stream {stream} {host} {digest(address)}")
