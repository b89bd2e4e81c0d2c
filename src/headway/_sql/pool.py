"""The pool of connections of one database."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from headway._sql.tx import Engine
from headway.errors import HeadwayError
from headway.lifecycle import ForkGuard
from headway.telemetry import metrics


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
        self._connections = 0  # open ones, idle or in use
        self._closed = False

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
        self._count_connections(-1)

    def _count_connections(self, change: int) -> None:
        with self._lock:
            self._connections += change
            metrics.gauge("headway_sql_connections", self._connections, engine=self.engine)

    def _take(self) -> Any:
        self._leave_inheritance()
        return self._idle_or_new()

    def _idle_or_new(self) -> Any:
        if self._closed:
            raise HeadwayError(f"{self.name} was closed.")
        try:
            return self._idle.pop()
        except IndexError:
            self._count_connections(+1)  # before it is open: a fork in between must not overlook it
            try:
                return self._open()
            except BaseException:
                self._count_connections(-1)
                raise

    def _leave_inheritance(self) -> None:
        """In a forked child: begin with nothing. Locks too: a thread of the parent may have held them."""
        if self._guard.crossed:
            self._lock = threading.Lock()
            self._inherited, self._idle, self._connections = self._idle, [], 0
            self._guard = ForkGuard(f"The connection to {self.name}")
