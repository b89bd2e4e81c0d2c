"""`headway serve`: the application on a port of this machine, until it is told to end."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from headway.config import is_loopback
from headway.errors import ConfigError, MissingExtra, Refused, UsageError
from headway.web.auth import tickets, tokens

if TYPE_CHECKING:
    from headway.web.application import Application

HOST: Final = "127.0.0.1"
PORT: Final = 8700
#: Seconds that requests under way get to end.
GRACE: Final = 5
#: Seconds that the head of a request may take, and bytes it may have. A connection is looked at so often: one that begins
#: no request is closed after one to two of these.
HEAD_SECONDS: Final = 10.0
HEAD_BYTES: Final = 262_144
#: Seconds in which somebody has to take what is sent to them, 64 KB at a time.
UNREAD_SECONDS: Final = 30.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that says what is in the way."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{host[:100]!r} is no address of this machine.", hint="Use 127.0.0.1, or 0.0.0.0 for all."
        ) from error
    family, *_, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} of {host} is in use.", hint="Take another: --port 0 takes a free one."
            ) from error
        raise UsageError(
            f"Cannot listen on port {port} of {host}: {error.strerror}.", hint="Take another: --port"
        ) from error
    listener.set_inheritable(False)
    return listener


def _leads_here(name: str) -> bool:
    """Return whether a name resolves to loopback addresses only. Any other is the name of a proxy."""
    try:
        found = socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(name) and all(is_loopback(str(address[0])) for *_, address in found)


def check_access(app: Application, host: str, *, no_auth: bool = False) -> bool:
    """Return whether tokens or ticket keys exist.

    Without either the server listens on this machine only. With ``no_auth`` it never listens elsewhere.
    """
    keys = [tickets.checked(key) for key in app.access.keys]
    has_tokens = bool(keys) or tokens.pulse(app.site.reader.database).made > 0
    others = [name for name in sorted(app.access.hosts) if not _leads_here(name)]
    if not (host == "localhost" or is_loopback(host)):
        others.append(host)
    if others and no_auth:
        raise Refused(
            f"Others can reach {others[0]}, and --no-auth would make everybody an admin.",
            hint="Leave out --no-auth, or listen on 127.0.0.1.",
        )
    if others and not has_tokens:
        raise Refused(
            f"Others can reach {others[0]}, and no token exists yet.",
            hint="Make a token first: headway token create NAME --role admin",
        )
    return has_tokens


def serve(
    app: Application,
    listener: socket.socket,
    *,
    ready: Callable[[], object] = lambda: None,
    until: int | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, or until the descriptor ``until`` is at its end. ``ready`` is called when
    requests are answered. Open pages are told the last state before their connections are closed."""
    try:
        import httptools  # noqa: F401 - it parses, within our limits
        import uvicorn
        import websockets  # noqa: F401 - without it uvicorn would answer live connections with an error of its own
    except ImportError as error:
        raise MissingExtra("web", "Serving the web application") from error

    class Server(uvicorn.Server):
        """Uvicorn raises the signal again when it has ended; to be told to end is no failure of a server."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self._end) for number in _SIGNALS}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def _end(self, number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if until is not None:
                asyncio.get_running_loop().add_reader(until, self._look_at, until)
            # What is loaded by now stays. Python would look through all of it for garbage every few hundred requests, and
            # everybody would wait for that, a twentieth of a second and more.
            gc.collect()
            gc.freeze()
            ready()

        def _look_at(self, descriptor: int) -> None:
            if not os.read(descriptor, 4096):
                asyncio.get_running_loop().remove_reader(descriptor)
                self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await app.tell()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        http=_protocol(),
        ws=_live(),
        ws_per_message_deflate=False,  # a kilobyte a second is not worth 100 KB of memory per connection
        ws_max_size=65_536,
        proxy_headers=False,  # anybody can write them; `web_proxies` says whose count
        server_header=False,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=GRACE,
        lifespan="on",
    )
    _take_descriptors()
    Server(config).run(sockets=[listener])


# A connection that would keep its descriptor, of which there are so many, and do nothing with it is ended.


class _Impatient(asyncio.Protocol):
    """One that takes nothing of what it is sent is ended, whatever is still to be sent to it."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()


def _live() -> type[asyncio.Protocol]:
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class Live(_Impatient, WebSocketsSansIOProtocol):
        def keepalive_timeout(self) -> None:
            super().keepalive_timeout()
            # Its end is written behind what it does not take, and would wait for that.
            self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    return Live


def _protocol() -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Protocol(_Impatient, HttpToolsProtocol):
        """A connection that does not begin a request in time, begins it without an end or does not take the answer is closed.
        The gate bounds what follows the head."""

        _incomplete, _size = True, 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._looked_at: Any = self.cycle
            self.loop.call_later(HEAD_SECONDS, self._look)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._incomplete, self._size = True, 0

        def on_headers_complete(self) -> None:
            self._incomplete = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._size += len(data)
            if self._incomplete and self._size > HEAD_BYTES:
                self.transport.abort()

        def _look(self) -> None:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return  # it ended, or is a live connection by now
            cycle: Any = self.cycle  # None before the first request
            if cycle is self._looked_at and (cycle is None or cycle.response_complete):
                self.transport.abort()
                return
            self._looked_at = self.cycle
            self.loop.call_later(HEAD_SECONDS, self._look)

    return Protocol


def _take_descriptors() -> None:
    """A live page is a descriptor: take as many as this process is allowed, not the shell's 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65_536, hard))


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
