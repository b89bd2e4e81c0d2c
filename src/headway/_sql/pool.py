"""The pool of connections of one database."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

from headway._sql.tx import Engine
from headway.core.lifecycle import ForkGuard
from headway.errors import HeadwayError
from headway.telemetry import metrics


class _Ticket:
    """Counts one connection from before it is opened until it is garbage-collected.

    An exception in a signal handler can lose a connection between any two steps without closing it.
    """

    __slots__ = ("__weakref__",)


class Pool(ABC):
    """Lends each thread a connection of its own. A forked child starts with an empty pool.

    The inherited connections stay referenced and unclosed, because closing them would disturb the parent.
    """

    engine: Engine
    #: The address without its password, for messages.
    name: str

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._idle: list[Any] = []  # driver connections
        self._guard = ForkGuard(f"The connection to {name}")
        self._inherited: list[Any] = []
        self._tickets: WeakSet[_Ticket] = WeakSet()  # of open connections, idle or in use
        self._closed = False
        _pools.add(self)

    @abstractmethod
    def _open(self) -> Any:
        """Open a new driver connection."""

    @abstractmethod
    def _broken(self, connection: Any) -> bool:
        """Return whether a used connection cannot be used again."""

    def close(self) -> None:
        """Close the idle connections. Those in use are closed when they are given back."""
        with self._lock:
            self._closed = True
        if not self._guard.crossed:
            self._drop_idle()

    def _give(self, connection: Any) -> None:
        if self._broken(connection):
            # The cause (a restarted server) probably broke the idle ones too: each would cost a failed attempt.
            self._drop(connection)
            self._drop_idle()
        elif self._closed:
            self._drop(connection)
        else:
            self._idle.append(connection)  # atomic; the last one used is used next

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)

    def _drop(self, connection: Any) -> None:
        connection.close()
        self._tickets.discard(connection.ticket)
        metrics.gauge("headway_sql_connections", self._connections, engine=self.engine)

    @property
    def _connections(self) -> int:
        return len(self._tickets)

    def _take(self) -> Any:
        self._leave_inheritance()
        return self._idle_or_new()

    def _idle_or_new(self) -> Any:
        if self._closed:
            raise HeadwayError(f"{self.name} was closed.")
        try:
            return self._idle.pop()
        except IndexError:
            ticket = self._issue_ticket()  # before it opens: a fork in between must see it
            connection = self._open()
            connection.ticket = ticket
            metrics.gauge("headway_sql_connections", self._connections, engine=self.engine)
            return connection

    def _issue_ticket(self) -> _Ticket:
        ticket = _Ticket()
        self._tickets.add(ticket)
        return ticket

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a connection that is not the pool's, such as one that a fork waits for."""
        ticket = self._issue_ticket()
        try:
            yield
        finally:
            self._tickets.discard(ticket)

    def _leave_inheritance(self) -> None:
        """Start empty in a forked child, with new locks: a thread of the parent may have held the old ones."""
        if self._guard.crossed:
            self._lock = threading.Lock()
            self._inherited, self._idle, self._tickets = self._idle, [], WeakSet()
            self._guard = ForkGuard(f"The connection to {self.name}")


_pools: WeakSet[Pool] = WeakSet()


def _empty_pools() -> None:
    """Empty every pool in a forked child.

    The child has one thread at this moment. Threads that did it later would race.
    """
    for pool in list(_pools):
        with suppress(HeadwayError):  # it cannot be used here; its first use raises
            pool._leave_inheritance()  # noqa: SLF001 - a module-level part of the pool


os.register_at_fork(after_in_child=_empty_pools)
