"""Connections that never return the reply to another request, and their pool.

An exception may occur anywhere: a signal handler that raises (the job timeout of RQ), Ctrl-C. If it occurs between a request
and its reply, the next user of the connection would read that reply as its own. So every connection counts the replies it
still owes and knows whether its handshake (password, database) is complete. A connection that owes a reply or is half open is
closed before its next use. This is decided when a connection is *borrowed*, because the exception may also prevent its return.
For the same reason the pool holds borrowed connections weakly.

Commands are packed here. hiredis (at least up to 3.5.0) crashes when a signal handler raises while it packs an int or a float:
it converts them to text, which runs the handler, and ignores the failure. It gets only texts and bytes.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any
from weakref import WeakSet

Argument = str | int | float | bytes


def packed(*words: Argument) -> bytes:
    """Encode one command for the wire."""
    plain = tuple([word if type(word) is str else str(word) if type(word) is int else _plain(word) for word in words])
    pack = _hiredis_pack()
    if pack is not None:
        line: bytes = pack(plain)
        return line
    raw = [word if isinstance(word, bytes) else word.encode() for word in plain]
    return b"".join([b"*%d\r\n" % len(raw), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)])


def _plain(word: Any) -> str | bytes:
    """Return the argument as `str` or `bytes`, without calling methods of a subclass."""
    if isinstance(word, bytes | bytearray | memoryview):
        return bytes(word)
    if isinstance(word, str):
        return str.__str__(word)
    if isinstance(word, int) and not isinstance(word, bool):
        return int.__repr__(word)
    if isinstance(word, float):
        return float.__repr__(word)
    from redis.exceptions import DataError

    raise DataError(f"A {type(word).__name__} cannot be sent to Redis. Use text, bytes or a number.")


@lru_cache(maxsize=1)
def _hiredis_pack() -> Any:
    try:
        from hiredis import pack_command
    except ImportError:  # hiredis is optional
        return None
    return pack_command


def make_ready(connection: Any) -> None:
    """Make a connection usable: reconnect if it owes a reply, is half open, or was closed by the server."""
    from redis.exceptions import RedisError

    if connection.owed or not connection.complete:
        connection.disconnect()
    connection.connect()
    try:
        stale = connection.can_read()
    except (RedisError, OSError):
        stale = True
    if stale:
        connection.disconnect()
        connection.connect()


class Accountable:
    """Mixin for connections of redis-py that counts unread replies.

    ``owed`` is the number of packed requests without a read reply. ``complete`` tells whether the handshake is done.
    """

    owed = 0
    complete = False

    def connect(self) -> None:
        """Connect unless the handshake is complete."""
        if not self.complete:
            self.disconnect()  # an exception may have left it half open
        super().connect()  # type: ignore[misc]  # of the class it is mixed into, here and below

    def disconnect(self, *arguments: Any, **options: Any) -> None:
        """Close the connection; it owes nothing afterwards."""
        self.complete = False
        super().disconnect(*arguments, **options)  # type: ignore[misc]
        self.owed = 0

    def send_command(self, *words: Argument, **options: Any) -> None:
        """Send one command."""
        self.send_packed_command(self.pack_command(*words), check_health=options.get("check_health", True))  # type: ignore[attr-defined]

    def pack_command(self, *words: Argument) -> list[bytes]:
        """Encode one command and count its reply as owed."""
        line = packed(*_split(words))
        self.owed += 1
        return [line]

    def pack_commands(self, commands: Any) -> list[bytes]:
        """Encode a pipeline and count its replies as owed."""
        lines = [packed(*_split(words)) for words in commands]
        self.owed += len(lines)
        return [b"".join(lines)]

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Read one reply; an error reply counts as read."""
        try:
            reply = super().read_response(*arguments, **options)  # type: ignore[misc]
        except _response_error():
            self.owed -= 1
            raise
        self.owed -= 1
        return reply


def _split(words: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Split commands that redis-py passes as one word: ``CLIENT SETNAME``."""
    first = words[0]
    if isinstance(first, str):
        return (*first.split(), *words[1:])
    return words


@lru_cache(maxsize=1)
def _response_error() -> type[Exception]:
    from redis.exceptions import ResponseError

    return ResponseError


def _handshake(connection: Any) -> None:
    connection.on_connect()
    connection.complete = True


@lru_cache(maxsize=1)
def _connection_classes() -> dict[str, type[Any]]:
    """Create a connection class per scheme, on first use: redis-py is optional."""
    from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

    class Tcp(Accountable, Connection):
        pass

    class Tls(Accountable, SSLConnection):
        pass

    class Unix(Accountable, UnixDomainSocketConnection):
        pass

    return {"redis": Tcp, "rediss": Tls, "unix": Unix}


@lru_cache(maxsize=1)
def _pool_class() -> type[Any]:
    """Create the pool class on first use."""
    from redis import ConnectionPool
    from redis.exceptions import ConnectionError as RedisConnectionError

    class Pool(ConnectionPool):
        """Lends usable connections and holds them weakly.

        A connection that an interrupted call never returned is garbage-collected and no longer counts.
        """

        def reset(self) -> None:
            self._lock = threading.RLock()  # a forked child may inherit the old one locked
            super().reset()
            self._in_use_connections: Any = WeakSet()

        def get_connection(self, *_: Any, **__: Any) -> Any:
            self._checkpid()
            connection: Any
            with self._lock:
                try:
                    connection = self._available_connections.pop()
                except IndexError:
                    if len(self._in_use_connections) >= self.max_connections:
                        raise RedisConnectionError("Too many connections") from None
                    connection = self.connection_class(**self.connection_kwargs)
                self._in_use_connections.add(connection)
            try:
                make_ready(connection)
            except BaseException:
                self.release(connection)
                raise
            return connection

        def release(self, connection: Any) -> None:
            self._checkpid()
            if connection.owed or not connection.complete:
                connection.disconnect()
            with self._lock:
                if connection in self._in_use_connections:
                    self._in_use_connections.discard(connection)
                    self._available_connections.append(connection)

    return Pool


def make_pool(scheme: str, **options: Any) -> Any:
    """Return a pool of connections for the scheme of an address."""
    return _pool_class()(connection_class=_connection_classes()[scheme], redis_connect_func=_handshake, **options)


def borrow(client: Any) -> Any:
    """Borrow a connection from the client's pool. The caller releases it there."""
    return client.connection_pool.get_connection()
