"""The pool of connections of one database."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from headway._sql.tx import Engine
from headway.core.lifecycle import ForkGuard
from headway.errors import HeadwayError
from headway.telemetry import metrics


class _Ticket:
    """Stands for one connection from before it is opened. It ends with it, also where nobody closes it: an exception of a
    signal handler may strike between any two steps of a call."""

    __slots__ = ("__weakref__",)


class Pool(ABC):
    """Threads each get a connection of their own while they use one. After a fork the child starts an empty pool: the
    inherited connections are kept aside unclosed, because closing them would disturb the parent."""

    engine: Engine
    #: The address as it may be shown: without a password.
    name: str

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._idle: list[Any] = []  # driver connections; each engine's subclass knows which
        self._guard = ForkGuard(f"The connection to {name}")
        self._inherited: list[Any] = []
        self._tickets: WeakSet[_Ticket] = WeakSet()  # of open connections, idle or in use
        self._closed = False
        _pools.add(self)

    @abstractmethod
    def _open(self) -> Any:
        """A new driver connection."""

    @abstractmethod
    def _broken(self, connection: Any) -> bool:
        """Whether a connection that was used cannot be used again."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if not self._guard.crossed:
            for connection in idle:
                self._drop(connection)

    def _give(self, connection: Any) -> None:
        if self._broken(connection):
            # What broke this one (the server went away) broke the idle ones too: each would cost a try of its own.
            idle, self._idle = self._idle, []
            for one in (connection, *idle):
                self._drop(one)
        elif self._closed:
            self._drop(connection)
        else:
            self._idle.append(connection)  # atomic; the last one used is the next one taken

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
            ticket = self._issue_ticket()  # before it is open: a fork in between must not overlook it
            connection = self._open()
            connection.ticket = ticket
            metrics.gauge("headway_sql_connections", self._connections, engine=self.engine)
            return connection

    def _issue_ticket(self) -> _Ticket:
        ticket = _Ticket()
        self._tickets.add(ticket)
        return ticket

    def _leave_inheritance(self) -> None:
        """In a forked child: begin with nothing. Locks too: a thread of the parent may have held them."""
        if self._guard.crossed:
            self._lock = threading.Lock()
            self._inherited, self._idle, self._tickets = self._idle, [], WeakSet()
            self._guard = ForkGuard(f"The connection to {self.name}")


_pools: WeakSet[Pool] = WeakSet()


def _begin_with_nothing() -> None:
    """While the child still has one thread: of several that come first at once, each would begin anew, and take away the
    locks and connections by which the others work already."""
    for pool in list(_pools):
        with suppress(HeadwayError):  # it may not be used here: whoever tries is told
            pool._leave_inheritance()  # noqa: SLF001  # it is the pool's own step


os.register_at_fork(after_in_child=_begin_with_nothing)
