"""Connections that never hand a reply to the wrong call, and the pool that lends them.

An exception may strike anywhere: a signal handler that raises (RQ's job timeout does), Ctrl-C. If it strikes between a
request and its reply, the reply stays on its way, and the next user of the connection would take it for its own. So every
connection counts the replies it still owes and knows whether its handshake (password, database) was completed; one that
owes a reply or is half open is closed before it is used again. That is decided when a connection is *taken*, not when the
interrupted call gives it back, because the exception may strike there too. For the same reason the pool forgets by itself
a connection that nobody holds any more.

Commands are packed here. hiredis (up to 3.5.0 at least) ends the process with a segmentation fault when a signal handler
raises while it packs an int or a float: it asks for their text, which runs the handler, and does not look whether that
failed. It gets texts and bytes only.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any
from weakref import WeakSet

Argument = str | int | float | bytes


def packed(*words: Argument) -> bytes:
    """One command as it goes over the wire."""
    plain = tuple([word if type(word) is str else str(word) if type(word) is int else _plain(word) for word in words])
    pack = _hiredis_pack()
    if pack is not None:
        line: bytes = pack(plain)
        return line
    raw = [word if isinstance(word, bytes) else word.encode() for word in plain]
    return b"".join([b"*%d\r\n" % len(raw), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)])


def _plain(word: Any) -> str | bytes:
    """Text or bytes, also of what is a subclass of something that can be sent; its own methods are not asked."""
    if isinstance(word, bytes | bytearray | memoryview):
        return bytes(word)
    if isinstance(word, str):
        return str.__str__(word)
    if isinstance(word, int) and not isinstance(word, bool):
        return int.__repr__(word)
    if isinstance(word, float):
        return float.__repr__(word)
    from redis.exceptions import DataError

    raise DataError(f"A {type(word).__name__} cannot be sent to Redis: use a text, bytes or a number.")


@lru_cache(maxsize=1)
def _hiredis_pack() -> Any:
    try:
        from hiredis import pack_command
    except ImportError:  # the optional parser is missing: slower, and the same
        return None
    return pack_command


def make_ready(connection: Any) -> None:
    """Close a connection that owes a reply, is half open, or whose server has gone; then see that it is open."""
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
    """Mixed into redis-py's connections. ``owed``: requests packed whose replies were not read. ``complete``: the
    handshake is done."""

    owed = 0
    complete = False

    def connect(self) -> None:
        if not self.complete:
            self.disconnect()  # what an exception left half open
        super().connect()  # type: ignore[misc]  # of the class it is mixed into, here and below

    def disconnect(self, *arguments: Any, **options: Any) -> None:
        self.complete = False
        super().disconnect(*arguments, **options)  # type: ignore[misc]
        self.owed = 0

    def send_command(self, *words: Argument, **options: Any) -> None:
        self.send_packed_command(self.pack_command(*words), check_health=options.get("check_health", True))  # type: ignore[attr-defined]

    def pack_command(self, *words: Argument) -> list[bytes]:
        line = packed(*_split(words))
        self.owed += 1
        return [line]

    def pack_commands(self, commands: Any) -> list[bytes]:
        lines = [packed(*_split(words)) for words in commands]
        self.owed += len(lines)
        return [b"".join(lines)]

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            reply = super().read_response(*arguments, **options)  # type: ignore[misc]
        except _response_error():
            self.owed -= 1
            raise
        self.owed -= 1
        return reply


def _split(words: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """redis-py says some commands in one piece: ``CLIENT SETNAME``."""
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
def _classes() -> tuple[type[Any], dict[str, type[Any]]]:
    """The pool, and the connection for each scheme. Made at the first use: redis-py is an optional dependency."""
    from redis import ConnectionPool
    from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
    from redis.exceptions import ConnectionError as RedisConnectionError

    class Tcp(Accountable, Connection):
        pass

    class Tls(Accountable, SSLConnection):
        pass

    class Unix(Accountable, UnixDomainSocketConnection):
        pass

    class Pool(ConnectionPool):
        """Lends connections that are fit for use. It holds those in use weakly: what an interrupted call never gave
        back is closed and does not count any more."""

        def reset(self) -> None:
            self._lock = threading.RLock()  # in a forked child the old one may be held by a thread that is not there
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

    return Pool, {"redis": Tcp, "rediss": Tls, "unix": Unix}


def make_pool(scheme: str, **options: Any) -> Any:
    """A pool of connections of the kind an address asks for."""
    pool, kinds = _classes()
    return pool(connection_class=kinds[scheme], redis_connect_func=_handshake, **options)


def borrow(client: Any) -> Any:
    """A connection of the client's pool, to be released there; redis-py leaves connections untyped."""
    return client.connection_pool.get_connection()
