"""Wake a listener: by our own writes, SQLite's ``data_version`` or PostgreSQL notifications."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from headway._sql import Database
from headway._sql.sqlite import SQLite
from headway.errors import StoreReadOnly, Unavailable

#: Timeout of a query on the listening connection, in seconds.
PING_SECONDS = 4.0

#: libpq's field code for the SQLSTATE of an error.
_SQLSTATE = ord("C")

#: Poll intervals of a SQLite file: while it changes, and after one second without a change.
BUSY_SECONDS, IDLE_SECONDS = 0.004, 0.03


class Waker(Protocol):
    """Blocks a listener until something may have changed."""

    def wait(self, seconds: float) -> list[str] | None:
        """Wait until something may have changed, for at most ``seconds``.

        Return the notification texts if they include every change, or None if the tables must be read.
        """
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class LocalWaker:
    """Waker for an in-memory database, which only this process can write to.

    Also used for a PostgreSQL standby, whose log is read after every wait. A C queue instead of an Event: a signal
    handler that raises inside `Event.set` would leave its lock held and block the next writer and the listener.
    """

    def __init__(self) -> None:
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def wait(self, seconds: float) -> list[str] | None:
        self._woken(seconds)
        return None

    def _woken(self, seconds: float) -> bool:
        try:
            self._wakes.get(timeout=seconds)
        except Empty:
            return False
        return True

    def wake(self) -> None:
        if self._wakes.empty():
            self._wakes.put(None)

    def close(self) -> None:
        self.wake()


class FileWaker(LocalWaker):
    """Polls a SQLite file's ``data_version``, which changes with every commit of another connection."""

    def __init__(self, database: SQLite) -> None:
        super().__init__()
        self._watch = database.watch()
        self._changed_at = time.monotonic()

    def wait(self, seconds: float) -> list[str] | None:
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            if self._woken(BUSY_SECONDS if now - self._changed_at < 1.0 else IDLE_SECONDS) or self._watch.changed():
                self._changed_at = now
                break
        return None

    def close(self) -> None:
        super().close()
        self._watch.close()


class NotificationWaker:
    """LISTEN on a dedicated connection, polled together with a pipe that `wake` writes to.

    Queries use libpq directly, because psycopg's calls have no time limit. ``poll`` supports file descriptors above
    1,023, which ``select`` does not.
    """

    def __init__(self, database: Database, channel: str) -> None:
        self._connection: Any = database.own_connection()
        self._translating = database.translated
        self._libpq: Any = self._connection.pgconn
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing, self._closed = threading.Lock(), False
        try:
            with self._translating():
                self._ask(f"LISTEN {channel}".encode())
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> list[str] | None:
        with self._translating():
            ready = self._poll(seconds, self._libpq.socket, self._reader)
            if self._reader in ready:
                os.read(self._reader, 4_096)
                return []  # the store is closing: nothing more to read
            if not ready:
                self._ask(b"SELECT 1")  # the connection may be dead
            self._libpq.consume_input()
            texts = []
            while (notification := self._libpq.notifies()) is not None:
                texts.append(notification.extra.decode())
        return texts or None  # after a silence read the tables, which also show whether the job still exists

    def _ask(self, sql: bytes) -> None:
        self._libpq.send_query(sql)
        deadline = time.monotonic() + PING_SECONDS
        while True:
            while self._libpq.is_busy():
                if not self._poll(max(0.0, deadline - time.monotonic()), self._libpq.socket):
                    raise Unavailable(f"PostgreSQL has not answered within {PING_SECONDS:g} s.")
                self._libpq.consume_input()
            if (result := self._libpq.get_result()) is None:  # would block if the result had not arrived
                return
            if result.error_field(_SQLSTATE) == b"25006":  # a standby does not support LISTEN
                raise StoreReadOnly("PostgreSQL does not let us listen: it is a standby.")
            if result.error_message:
                said = result.error_message.decode("utf-8", "replace").strip()
                raise Unavailable(f"PostgreSQL does not let us listen: {said}")

    @staticmethod
    def _poll(seconds: float, *descriptors: int) -> set[int]:
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(seconds * 1_000)}

    def wake(self) -> None:
        # After close the descriptor number may belong to another file.
        with self._closing, suppress(BlockingIOError):  # the pipe is full, so a wakeup is pending
            if not self._closed:
                os.write(self._writer, b"!")

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self._reader)
                os.close(self._writer)
        self._connection.close()
