"""Callers: who a script takes a call for.

A caller makes one call at a time and numbers them, so that a script remembers one answer per caller and gives it again
when the call is repeated. It keeps its connection, which saves the pool's work.
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

#: Seconds after which an unused connection is looked at before it is used.
_IDLE = 0.25


class Caller:
    __slots__ = ("calls", "connection", "name", "used")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.connection: Any = None
        self.used = 0.0

    def run(
        self, client: Redis, script: _redis.Script, keys: Sequence[str], arguments: Sequence[_redis.Argument]
    ) -> Any:
        connection = self.connection
        if connection is None:
            connection = self.connection = _redis.borrow(client)
        elif connection.owed or not connection.complete or time.monotonic() - self.used > _IDLE:
            # An exception cut its last call short, or it rested: a server that was restarted meanwhile has closed its
            # end, which is better seen before a call is risked on it.
            _redis.make_ready(connection)
        try:
            return script.on(connection, keys, arguments)
        except _redis.failures() as error:
            if _redis.is_transient(error):
                self.connection = None
                connection.disconnect()  # also from a master that became a replica and still answers
                client.connection_pool.release(connection)
            raise
        finally:
            self.used = time.monotonic()


class Callers:
    """The callers of one process. There are as many as calls were ever under way at once; an exception that strikes
    between taking one and giving it back costs that one, never its exclusiveness."""

    def __init__(self) -> None:
        self._process = uuid.uuid4().hex[:16]
        self._numbers = count(1)
        self._free: list[Caller] = []

    def take(self) -> Caller:
        try:
            return self._free.pop()  # atomic
        except IndexError:
            return Caller(f"{self._process}.{next(self._numbers)}")

    def give_back(self, caller: Caller) -> None:
        self._free.append(caller)
