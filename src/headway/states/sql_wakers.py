"""What wakes the reader of a database: our own writes, SQLite's ``data_version``, or PostgreSQL's notifications."""

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

#: PostgreSQL has this long to answer anything that is asked on the listening connection.
PING_SECONDS = 4.0

#: libpq's name for the code of an error.
_SQLSTATE = ord("C")

#: Between two looks at a SQLite file: while it changes, and after a second without a change.
BUSY_SECONDS, IDLE_SECONDS = 0.004, 0.03


class Waker(Protocol):
    def wait(self, seconds: float) -> list[str] | None:
        """Return when something may have changed, or after ``seconds``. The texts that came with it, if every change is
        among them; None if the tables must be read."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class LocalWaker:
    """For a database in memory: nobody else can write to it. For a standby of PostgreSQL: it is looked at after each wait.

    A queue of C and no Event: a signal handler that raises inside `Event.set` leaves its lock held, and the next writer
    and the listener would wait for it for ever.
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
    """Looks at the file again and again, which another connection's commit changes, wherever that connection is."""

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
    """LISTEN on a connection of its own, watched together with a pipe by which `wake` ends the wait.

    Everything is asked below psycopg, whose own calls wait without an end, and watched by ``poll``, which unlike
    ``select`` knows descriptors above 1,023.
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
                return []  # we are closing: nothing more need be read
            if not ready:
                self._ask(b"SELECT 1")  # silence may also be a dead connection
            self._libpq.consume_input()
            texts = []
            while (notification := self._libpq.notifies()) is not None:
                texts.append(notification.extra.decode())
        return texts or None  # after a silence the tables are read: they also say whether the job is the same

    def _ask(self, sql: bytes) -> None:
        self._libpq.send_query(sql)
        deadline = time.monotonic() + PING_SECONDS
        while True:
            while self._libpq.is_busy():
                if not self._poll(max(0.0, deadline - time.monotonic()), self._libpq.socket):
                    raise Unavailable(f"PostgreSQL has not answered within {PING_SECONDS:g} s.")
                self._libpq.consume_input()
            if (result := self._libpq.get_result()) is None:  # not before it is there: it would be waited for
                return
            if result.error_field(_SQLSTATE) == b"25006":  # a standby tells nobody anything
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
        # Not after it was closed: the number of the descriptor may be somebody else's file by then.
        with self._closing, suppress(BlockingIOError):  # full: it wakes already
            if not self._closed:
                os.write(self._writer, b"!")

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self._reader)
                os.close(self._writer)
        self._connection.close()
