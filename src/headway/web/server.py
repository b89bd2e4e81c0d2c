"""`headway serve`: serve the application on a port until a signal arrives."""

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
#: Seconds that running requests get at shutdown.
GRACE: Final = 5
#: Timeout in seconds and size limit in bytes for a request head. Connections are checked at this interval: an idle one
#: is closed after one to two intervals.
HEAD_SECONDS: Final = 10.0
HEAD_BYTES: Final = 262_144
#: Seconds for a client to read the next 64 KB of a response.
UNREAD_SECONDS: Final = 30.0


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` or `UsageError` if the address cannot be used."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{host[:100]!r} is not an address of this machine.", hint="Use 127.0.0.1, or 0.0.0.0 for all."
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
                f"Port {port} of {host} is in use.", hint="Choose another one, or --port 0 for any free port."
            ) from error
        raise UsageError(
            f"Cannot listen on port {port} of {host}: {error.strerror}.", hint="Choose another one with --port."
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
    root: str = "",
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, or until end of file on the descriptor ``until``.

    ``ready`` is called when the server accepts requests. Open pages receive the final state before the shutdown.
    ``root`` is the path under which a proxy shows the application.
    """
    try:
        import httptools  # noqa: F401 - uvicorn's parser whose limits `_protocol` relies on
        import uvicorn
        import websockets  # noqa: F401 - without it uvicorn refuses live connections
    except ImportError as error:
        raise MissingExtra("web", "Serving the web application") from error
    config = uvicorn.Config(
        _under(root, app) if root else app,
        http=_protocol(),
        ws=_live(),
        ws_per_message_deflate=False,  # saves 1 KB per second and costs 100 KB of memory per connection
        ws_max_size=65_536,
        proxy_headers=False,  # clients can forge them; the setting `web_proxies` names the trusted proxies
        server_header=False,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=GRACE,
        lifespan="on",
    )
    _raise_descriptor_limit()
    _server(config, app, ready, until).run(sockets=[listener])


def _under(root: str, app: Application) -> Any:
    """Return the application as it is served below the path ``root``.

    A proxy may remove that path from requests or keep it. Links of this machine do not have it.
    """

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        if "path" in scope:
            path = scope["path"]
            has_root = path == root or path.startswith(f"{root}/")
            scope = {**scope, "root_path": root, "path": path if has_root else root + path}
        await app(scope, receive, send)

    return mounted


def _server(config: Any, app: Application, ready: Callable[[], object], until: int | None) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """A server that exits normally on a signal. Uvicorn's own would raise the signal again."""

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
                asyncio.get_running_loop().add_reader(until, self._read_end, until)
            # Everything loaded so far is permanent. Without freeze the collector scans it every few hundred requests,
            # which stops all of them for 50 ms or more.
            gc.collect()
            gc.freeze()
            ready()

        def _read_end(self, descriptor: int) -> None:
            if not os.read(descriptor, 4096):
                asyncio.get_running_loop().remove_reader(descriptor)
                self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await app.tell()
            await super().shutdown(sockets)

    return Server(config)


# Idle connections are closed, because each one holds a file descriptor and their number is limited.


class _WriteTimeout(asyncio.Protocol):
    """Aborts a connection whose client reads nothing for `UNREAD_SECONDS`."""

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

    class Live(_WriteTimeout, WebSocketsSansIOProtocol):
        def keepalive_timeout(self) -> None:
            super().keepalive_timeout()
            # The close frame is queued behind data that the client does not read.
            self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    return Live


def _protocol() -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Protocol(_WriteTimeout, HttpToolsProtocol):
        """Closes a connection that sends no request, an endless head, or does not read. The gate bounds bodies."""

        _incomplete, _size = True, 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._checked: Any = self.cycle
            self.loop.call_later(HEAD_SECONDS, self._check)

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

        def _check(self) -> None:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return  # closed, or upgraded to a WebSocket
            cycle: Any = self.cycle  # None before the first request
            if cycle is self._checked and (cycle is None or cycle.response_complete):
                self.transport.abort()
                return
            self._checked = self.cycle
            self.loop.call_later(HEAD_SECONDS, self._check)

    return Protocol


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit, because each live page needs a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65_536, hard))


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
