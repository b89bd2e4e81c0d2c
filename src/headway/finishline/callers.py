"""Callers: the identities under which scripts are called.

A caller makes one call at a time and numbers its calls. So a script remembers one answer per caller and returns it again
when the call is repeated. A caller keeps its connection, which saves the work of the pool.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from headway import _redis

if TYPE_CHECKING:
    from redis import Redis

#: Seconds after which an idle connection is checked before use.
_IDLE = 0.25


class Caller:
    """One identity and its connection."""

    __slots__ = ("calls", "connection", "name", "used")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.connection: Any = None
        self.used = 0.0

    def run(
        self, client: Redis, script: _redis.Script, keys: Sequence[str], arguments: Sequence[_redis.Argument]
    ) -> Any:
        """Run a script on the connection of this caller."""
        connection = self.connection
        if connection is None:
            connection = self.connection = _redis.borrow(client)
        elif connection.owed or not connection.complete or time.monotonic() - self.used > _IDLE:
            # Its last call was interrupted, or it was idle. A server that restarted meanwhile has closed the connection,
            # and the call would fail.
            _redis.make_ready(connection)
        try:
            return script.on(connection, keys, arguments)
        except _redis.failures() as error:
            if _redis.is_transient(error):
                self.connection = None
                connection.disconnect()  # also when the server is now a replica and still answers
                client.connection_pool.release(connection)
            raise
        finally:
            self.used = time.monotonic()


class Callers:
    """The callers of one process: as many as calls ever ran at once.

    A caller that an exception keeps from being released is lost. It is never used by two calls at once.
    """

    def __init__(self) -> None:
        self._process = uuid.uuid4().hex[:16]
        self._numbers = count(1)
        self._free: list[Caller] = []

    def acquire(self) -> Caller:
        """Return an idle caller, or a new one."""
        try:
            return self._free.pop()  # atomic
        except IndexError:
            return Caller(f"{self._process}.{next(self._numbers)}")

    def release(self, caller: Caller) -> None:
        """Make a caller available again."""
        self._free.append(caller)
