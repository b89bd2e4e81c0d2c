"""A TCP proxy that stands before a server and misbehaves on command."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.services.server import free_port

CHUNK = 16 * 1024
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 seconds


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to the bytes under way."""

    swallow: bool = False
    delay: float = 0
    rate: float = 0
    drop_every: int = 0
    drop_to: bytes = b""
    lose_commit: str = ""


@dataclass(eq=False, slots=True)
class Link:
    """One client's connection, and ours to the server on its behalf (none in a black hole)."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    request: bytes = b""
    lost_bytes: bool = False
    unread: bytes = b""  # of the server's messages: one that is not complete yet
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)

    def reset(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None and not writer.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                writer.transport.abort()

    def close(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.close()


class TcpProxy:
    """Passes everything between its own `port` and `target_port`, both on 127.0.0.1, until told otherwise.

    Each of the weathers below ends the one before; `cut()` is an event and leaves the weather as it is.
    `connections`, `bytes_up` and `bytes_down` count what was accepted and passed on so far.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.connections = self.bytes_up = self.bytes_down = 0
        self._target_port = target_port
        self._weather = Weather()
        self._answers = 0
        self._commits_to_lose = self._commits_to_pass = 0
        self._links: set[Link] = set()
        self._listener: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._thread.start()
        self.pass_through()

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def pass_through(self) -> None:
        """All is well."""
        self._turn(Weather())

    def refuse(self) -> None:
        """New connections are refused; those that are open go on."""
        self._turn(Weather(), listening=False)

    def black_hole(self) -> None:
        """Connections are accepted, bytes vanish both ways. When it ends, those that lost some are reset."""
        self._turn(Weather(swallow=True))

    def delay(self, seconds: float) -> None:
        """Every answer is under way for that much longer."""
        self._turn(Weather(delay=seconds))

    def throttle(self, bytes_per_second: float) -> None:
        """Each connection carries that much, in each direction."""
        self._turn(Weather(rate=bytes_per_second))

    def drop_replies(self, every: int = 1, to: bytes = b"") -> None:
        """The server gets the request, and of its answers every n-th is lost and the connection reset.

        An answer is what arrives at once; only those to requests that contain `to` are counted.
        """
        self._answers = 0
        self._turn(Weather(drop_every=every, drop_to=to))

    def lose_commits(self, what: str = "reply", times: int = 1, after: int = 0) -> None:
        """PostgreSQL: of the COMMITs that come ``after`` so many, the ``request`` does not arrive, or the ``reply`` does
        not, and the connection is reset. With the reply lost the server has committed; with the request lost it rolls
        back."""
        self._commits_to_lose, self._commits_to_pass = times, after
        self._turn(Weather(lose_commit=what))

    @property
    def commits_to_lose(self) -> int:
        """How many are still to be lost."""
        return self._commits_to_lose

    def aim(self, target_port: int) -> None:
        """Connect to another server from now on, and reset every open connection."""
        self._target_port = target_port
        self.cut()

    def cut(self) -> None:
        """Reset every open connection."""
        self._do(self._reset(set(self._links)))

    def close(self) -> None:
        self.refuse()
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _turn(self, weather: Weather, *, listening: bool = True) -> None:
        self._do(self._change(weather, listening))

    def _do(self, action: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result(10)

    async def _change(self, weather: Weather, listening: bool) -> None:
        self._weather = weather
        if not weather.swallow:
            await self._reset({link for link in self._links if link.lost_bytes})
        if listening and self._listener is None:
            listening_socket = socket.create_server(("127.0.0.1", self.port), backlog=100)
            listening_socket.setblocking(False)
            self._listener = self._loop.create_task(self._accept(listening_socket))
        elif not listening and self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
            self._listener = None

    async def _accept(self, listening_socket: socket.socket) -> None:
        """By hand: asyncio's own server, closed while somebody connects, leaves half a transport behind (Python 3.13.0)."""
        with listening_socket:
            while True:
                client, _ = await self._loop.sock_accept(listening_socket)
                serving = self._loop.create_task(self._begin(client))
                self._serving.add(serving)
                serving.add_done_callback(self._serving.discard)

    async def _begin(self, client: socket.socket) -> None:
        await self._serve(*await asyncio.open_connection(sock=client))

    async def _reset(self, links: set[Link]) -> None:
        for link in links:
            link.reset()
        tasks = {link.task for link in links if link.task and link.task.cancel()}  # a delay may hold it
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = Link(to_client, lost_bytes=self._weather.swallow)
        self._links.add(link)
        try:
            if link.lost_bytes:
                while await from_client.read(CHUNK):
                    continue
            else:
                from_server, link.server = await asyncio.open_connection("127.0.0.1", self._target_port)
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(link, from_client, link.server, answers=False))
                    pumps.create_task(self._pump(link, from_server, to_client, answers=True))
        except* OSError:  # one side was reset, or there is no server: the other side is told the same way
            link.reset()
        finally:
            link.close()
            self._links.discard(link)

    async def _pump(
        self, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        while data := await source.read(CHUNK):
            weather = self._weather
            if weather.swallow:
                link.lost_bytes = True
                continue
            if answers:
                await asyncio.sleep(weather.delay)
                self._lose_answer(link, weather)
                self._lose_commit_reply(link, weather, data)
                self.bytes_down += len(data)
            else:
                link.request = data
                self._lose_commit_request(weather, data)
                self.bytes_up += len(data)
            if weather.rate:
                await asyncio.sleep(len(data) / weather.rate)
            sink.write(data)
            await sink.drain()
        if self._weather.swallow:
            link.lost_bytes = True  # the other side has not seen the end of the connection
        else:
            sink.write_eof()

    def _lose_answer(self, link: Link, weather: Weather) -> None:
        if weather.drop_every and weather.drop_to in link.request:
            self._answers += 1
            if self._answers % weather.drop_every == 0:
                raise ConnectionResetError

    def _lose_commit_reply(self, link: Link, weather: Weather, data: bytes) -> None:
        """Messages are a type, a length that counts itself, and a body; ``C`` tells that a statement was completed.

        (The one byte that answers a request for encryption is none; clients of a test ask for none.)
        """
        link.unread += data
        while len(link.unread) >= 5:
            length = 1 + int.from_bytes(link.unread[1:5], "big")
            if len(link.unread) < length:
                return
            message, link.unread = link.unread[:length], link.unread[length:]
            if message[:1] == b"C" and message[5:] == b"COMMIT\0" and weather.lose_commit == "reply":
                self._lose_commit()

    def _lose_commit_request(self, weather: Weather, data: bytes) -> None:
        if weather.lose_commit == "request" and data[:1] == b"Q" and data[5:] == b"COMMIT\0":
            self._lose_commit()

    def _lose_commit(self) -> None:
        if self._commits_to_pass:
            self._commits_to_pass -= 1
        elif self._commits_to_lose:
            self._commits_to_lose -= 1
            raise ConnectionResetError
