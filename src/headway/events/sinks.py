"""Sinks: who is told. Each takes one event at a time, within its deadline, and raises when it did not take it.

    log:                                  one line in the log
    https://user:password@host/path       POST of the envelope
    redis://host/0?channel=NAME           PUBLISH of the envelope; it reaches whoever listens at that moment
    redis://host/0?stream=NAME&maxlen=N   XADD of the envelope under the field ``event``, trimmed to about N
    command:/path/to/program argument     the envelope on its stdin; exit 0 means taken, 65 means never

Options follow a ``#`` at the end of any address: ``#types=task.failed,alert.*`` delivers these types of event only, and
``#name=billing`` names the sink. ``#name=billing&types=job.completed`` does both.

`EventRefused` says that the sink refuses the content of this event: it is put aside at once. `ServerRefused` says that the
sink will never take it: after some tries it is put aside. Whatever else a sink raises means *not now*. Deliveries are noted
under the name of a sink, so it must not change: unless it is given, it is made of a digest of the whole address, and shows
no more of it than may be shown.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from headway import _redis
from headway.errors import InvalidInput, Unavailable
from headway.events import signature
from headway.events.deadline import Watchdog
from headway.events.envelope import Event, whole
from headway.events.outbox import EventRefused
from headway.telemetry import Log, redact

if TYPE_CHECKING:
    from redis import Redis

log = Log("events")

#: Seconds one delivery may take in all.
DEADLINE = 5.0

#: Seconds a program may take.
COMMAND_DEADLINE = 10.0

#: What a program ends with when it will never take the event (EX_DATAERR of sysexits).
NEVER = 65

_SCHEMES = "log:, http://, https://, redis://, rediss://, unix:// or command:"
_OPTIONS = re.compile(r"#((?:types|name)=[^#\s]*)$")
_NEXT = re.compile(r"[\s,]+(?=(?:log|command):|(?:https?|rediss?|unix)://)")


class Sink(Protocol):
    """Somebody who wants to be told. ``deliver`` returns when the event was taken and raises when it was not.

    It may have an attribute ``types``: patterns of the types of event it takes, as ``task.*``. Without one it takes all.
    """

    @property
    def name(self) -> str:
        """What deliveries are noted under; stable over restarts."""
        ...

    @property
    def job(self) -> str | None:
        """It hears of this job only; None: of all."""
        ...

    def deliver(self, event: Event) -> None: ...

    def close(self) -> None:
        """End a delivery that is under way: the process stops. It may be called from another thread."""
        ...


@dataclass(frozen=True, slots=True)
class CallableSink:
    """A function of the program. It has no deadline: nobody can end it. It keeps no other sink waiting."""

    name: str
    call: Callable[[Event], None]
    job: str | None = None
    types: Sequence[str] | None = None

    def deliver(self, event: Event) -> None:
        self.call(event)

    def close(self) -> None:
        """It ends when it ends."""


@dataclass(frozen=True, slots=True)
class LogSink:
    """One line in the log."""

    name: str = "log"
    job: str | None = None
    types: Sequence[str] | None = None

    def deliver(self, event: Event) -> None:
        log.info("event", event=event.type, eventID=event.id, job=event.job, version=event.version)

    def close(self) -> None:
        """Nothing waits here."""


class WebhookSink:
    """POST of the envelope as JSON; any 2xx answer means taken. The event id is also in ``Headway-Event-Id``.

    With a ``secret`` the request is signed: see `headway.events.signature`.
    """

    job: str | None = None
    types: Sequence[str] | None = None

    def __init__(self, url: str, timeout: float = DEADLINE, *, secret: str | None = None) -> None:
        from headway.events import webhook

        self._post = webhook.post
        self._address = webhook.Address(url)
        self._timeout = timeout
        self._secret = secret
        self._watchdog = Watchdog()
        self.name = f"webhook {self._address.host} {_digest(url)}"

    def deliver(self, event: Event) -> None:
        # A header holds no control characters and no more than Latin-1; the envelope has the id as it is.
        id = event.id.encode("ascii", "backslashreplace").decode()
        headers = {
            "Content-Type": "application/json", "Headway-Event-Id": re.sub(r"[^\x20-\x7e]", "?", id),
            "User-Agent": "headway",
        }  # fmt: skip
        body = event.as_json().encode()
        if self._secret:
            headers[signature.HEADER] = signature.sign(self._secret, body, int(time.time()))
        self._post(self._address, body, headers, seconds=self._timeout, watchdog=self._watchdog)

    def close(self) -> None:
        self._watchdog.bite()


class _RedisSink:
    """One command to another Redis, within the deadline."""

    job: str | None = None
    types: Sequence[str] | None = None

    def __init__(self, client: Redis, name: str, timeout: float = DEADLINE) -> None:
        self._client: Any = client
        self._timeout = timeout
        self._watchdog = Watchdog()
        self.name = name

    def _send(self, *words: str | int) -> None:
        place = self._client.connection_pool.connection_kwargs
        where = f"{place.get('host', place.get('path'))}:{place.get('port', '')}"
        with self._watchdog.over(self._client.connection_pool.disconnect, self._timeout) as late:
            try:
                self._client.execute_command(*words)
            except Exception as error:  # also what redis-py raises when its connection is closed under it
                if late():
                    raise Unavailable(f"Redis at {where} did not take the event within {self._timeout:g} s.") from None
                if isinstance(error, _redis.failures()):
                    raise _redis.translate(error, where) from error
                raise

    def close(self) -> None:
        self._watchdog.bite()


class RedisChannelSink(_RedisSink):
    """PUBLISH of the envelope as JSON. A channel keeps nothing: it reaches whoever listens at that moment."""

    def __init__(self, client: Redis, channel: str = "job.completed", *, name: str = "") -> None:
        super().__init__(client, name or f"channel {channel}")
        self._channel = channel

    def deliver(self, event: Event) -> None:
        self._send("PUBLISH", self._channel, event.as_json())


class RedisStreamSink(_RedisSink):
    """XADD of the envelope as JSON under the field ``event``, trimmed to about ``maxlen`` entries."""

    def __init__(self, client: Redis, stream: str, *, maxlen: int = 100_000, name: str = "") -> None:
        super().__init__(client, name or f"stream {stream}")
        self._stream, self._maxlen = stream, maxlen

    def deliver(self, event: Event) -> None:
        self._send("XADD", self._stream, "MAXLEN", "~", self._maxlen, "*", "event", event.as_json())


class CommandSink:
    """A program that reads the envelope from its stdin. It is called with an argument list, never through a shell."""

    job: str | None = None
    types: Sequence[str] | None = None

    def __init__(self, arguments: Iterable[str], timeout: float = COMMAND_DEADLINE, *, name: str = "") -> None:
        self._arguments = list(arguments)
        if not self._arguments or not self._arguments[0] or any("\0" in word for word in self._arguments):
            raise InvalidInput("A sink's command has no program.", hint="Use command:/path/to/program argument")
        self._timeout = timeout
        self._watchdog = Watchdog()
        program = os.path.basename(self._arguments[0])
        self.name = name or f"command {program} {_digest(shlex.join(self._arguments))}"

    def deliver(self, event: Event) -> None:
        import subprocess
        import tempfile

        program = self._arguments[0]
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # Not started at all: nobody could know whether it took the event, and it would be told it again and again.
            raise Unavailable(
                f"The program {program} is not started: this process ignores SIGCHLD, and how a program ends is not known.",
                hint="Leave SIGCHLD at its default, or let `headway relay` deliver.",
            )
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(event.as_json().encode() + b"\n")
            given.seek(0)
            try:
                process = subprocess.Popen(
                    self._arguments, stdin=given, stdout=subprocess.DEVNULL, stderr=said,
                    start_new_session=True,  # its children end with it
                )  # fmt: skip
            except OSError as error:
                raise Unavailable(f"The program {program} cannot be started: {error.strerror}") from error
            with self._watchdog.over(lambda: _kill(process.pid), self._timeout) as late:
                status: int | None = 0
                try:
                    status = _status(process.pid)
                finally:
                    if status is not None:
                        # Ended and not yet reaped, so its number is still its own: what it left in its session goes too.
                        _kill(process.pid)
                    process.wait()  # its returncode is 0 also where somebody else was quicker to reap it
            if status == 0:
                return
            how = f"it took longer than {self._timeout:g} s" if late() else f"it ended with {status}"
            if status is None:
                how = "nobody knows how it ended (this process waits for all its children)"
            said.seek(0)
            why = redact(said.read(2_000).decode("utf-8", "replace").strip())[:300]
            message = f"The program {program} did not take the event: {how}" + (f": {why}" if why else "")
            raise EventRefused(message) if status == NEVER else Unavailable(message)

    def close(self) -> None:
        self._watchdog.bite()


@dataclass(frozen=True, slots=True)
class ConfiguredSink:
    """A sink under a name of its own, or for some types of event."""

    sink: Sink
    name: str
    types: Sequence[str] | None = None

    @property
    def job(self) -> str | None:
        return self.sink.job

    def deliver(self, event: Event) -> None:
        self.sink.deliver(event)

    def close(self) -> None:
        self.sink.close()


def _status(pid: int) -> int | None:
    """How a child ended, once it has; a signal is its negative number. It is left to be reaped. None when somebody else in
    this process has done that: a handler of SIGCHLD that waits for every child."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    assert ended is not None  # it was waited for
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# From settings


def open_sinks(addresses: object, *more: object, secret: object = None) -> list[Sink]:
    """Open the sinks of a setting: addresses separated by commas, spaces or lines.

    An address given twice is one sink. Webhooks are signed with ``secret``.
    """
    found: dict[str, Sink] = {}
    for text in (addresses, *more):
        for line in str(text or "").splitlines():
            for address in _NEXT.split(line.strip(" \t,")):
                if address:
                    sink = open_sink(address, secret=str(secret) if secret else None)
                    found.setdefault(sink.name, sink)
    return list(found.values())


def open_sink(address: str, *, secret: str | None = None) -> Sink:
    """The sink of one address, with its options; nothing is sent yet."""
    options = _OPTIONS.search(address)
    if options is None:
        return _open(address, secret)
    sink = _open(address[: options.start()].rstrip(), secret)
    name, types = _read_options(options[1])
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
        ours = not pattern or pattern.startswith(("job.", "task.", "alert."))  # the watcher's may have other names
        if ours and not fnmatch.filter(TYPES, pattern):
            raise InvalidInput(f"No type of event matches {pattern[:40]!r}.", hint=f"There are: {', '.join(TYPES)}")
    return name, tuple(types.split(","))


def wants(sink: Sink, event: Event) -> bool:
    """Return whether the sink takes events of this type. A sink written by a program may have no ``types``."""
    types = getattr(sink, "types", None)
    return types is None or any(fnmatch.fnmatchcase(event.type, pattern) for pattern in types)


def _open(address: str, secret: str | None) -> Sink:
    scheme = address.partition(":")[0]
    if address == "log:":
        return LogSink()
    if scheme in ("http", "https"):
        return WebhookSink(address, secret=secret)
    if scheme in ("redis", "rediss", "unix"):
        return _open_redis(address)
    if scheme == "command":
        return _open_command(address.removeprefix("command:"))
    shown = f"{scheme}:..." if re.fullmatch(r"[a-z]{1,20}", scheme) and ":" in address else "This"
    raise InvalidInput(f"{shown} is no address of a sink.", hint=f"Use {_SCHEMES}")


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
    except ValueError:  # it repeats what it could not read, and that may be part of a password
        raise InvalidInput("A sink's Redis address cannot be read.", hint=hint) from None
    options = dict(pairs)
    channel, stream, maxlen = (options.pop(name, None) for name in ("channel", "stream", "maxlen"))
    if (
        options
        or len({name for name, _ in pairs}) < len(pairs)
        or bool(channel) == bool(stream)
        or (maxlen is not None and not stream)
    ):
        raise InvalidInput("A sink's Redis address names one channel or one stream, and nothing else.", hint=hint)
    if maxlen is not None and not (maxlen.isdecimal() and 0 < int(maxlen[:12]) < 10**9):
        raise InvalidInput(f"maxlen={whole(maxlen)[:20]} is no length of a stream.", hint=hint)
    if "@" in parts.netloc and "@" in parts.path:
        raise InvalidInput("A sink's Redis address can be read in two ways: it has two @.", hint=hint)
    client = _redis.connect(address.partition("?")[0], role="queue", name="sink", max_connections=4)
    place = parts.netloc.rpartition("@")[2] or parts.path
    if channel:
        return RedisChannelSink(client, channel, name=f"channel {channel} {place} {_digest(address)}")
    length = int(maxlen or 100_000)
    return RedisStreamSink(client, str(stream), maxlen=length, name=f"stream {stream} {place} {_digest(address)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
