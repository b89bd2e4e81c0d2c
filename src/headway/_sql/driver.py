"""The contract of an engine: how it begins, commits, rolls back and explains its errors.

``sqlite.py`` and ``postgresql.py`` implement it below `headway._sql.database.Database`, which owns transactions and
retries.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from headway._sql.pool import Pool
from headway._sql.tx import Tx
from headway.errors import HeadwayError, InvalidInput

#: Errors of a driver for values that no database can store: a number beyond 64 bits, a lone surrogate.
UNACCEPTABLE = (OverflowError, UnicodeEncodeError)


class Transient(Exception):
    """An error that another attempt may avoid. ``final`` is raised after the last attempt."""

    def __init__(self, final: HeadwayError) -> None:
        super().__init__(str(final))
        self.final = final


class Unanswered(Exception):
    """The connection broke after COMMIT was sent and before its answer came."""

    def __init__(self, transaction: Any, result: Any, trouble: Transient) -> None:
        super().__init__(str(trouble))
        self.transaction, self.result, self.trouble = transaction, result, trouble


class Driver(Pool):
    """An engine and its connections."""

    #: Statement that reads the number of the last migration that was applied.
    schema_version_query: str

    # ---- the database ----------------------------------------------------------------------------------------------

    @abstractmethod
    def migrate(self) -> None:
        """Migrate the schema to this release's version. Raises `StoreNewer` for a newer one."""

    def check(self, *, writable: bool) -> None:
        """Raise unless this is a Headway database. Changes nothing."""
        _ = writable

    def exists(self) -> bool:
        """Return whether the Headway schema exists."""
        return True

    def verify(self) -> None:
        """Raise `StoreCorrupt` if the engine finds damage."""

    @abstractmethod
    def size(self) -> int:
        """Return the bytes on disk, including the log of pending writes."""

    # ---- a connection ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _tx(self, connection: Any) -> Tx: ...

    @abstractmethod
    def _begin(self, connection: Any, *, slow: bool) -> None:
        """Begin a transaction that writes. With ``slow``, its statements have no time limit."""

    def _begin_read(self, connection: Any) -> None:
        """Begin a transaction that reads one snapshot."""
        connection.execute("BEGIN")

    @abstractmethod
    def _commit(self, connection: Any) -> None: ...

    @abstractmethod
    def _rollback(self, connection: Any) -> None: ...

    def _unanswered(self, connection: Any) -> Any:
        """After a failed COMMIT, return the id of a transaction whose outcome is unknown. None: it has failed."""
        _ = connection

    def _was_committed(self, transaction: Any) -> bool:
        """Return whether a transaction from `_unanswered` was committed. Raises `Transient` while that is unknown."""
        raise NotImplementedError(transaction)

    # ---- errors ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _errors(self) -> tuple[type[Exception], ...]:
        """The driver's exceptions."""

    @abstractmethod
    def _translate(self, error: Exception) -> HeadwayError | Transient:
        """Translate a driver's exception. `Transient` if another attempt may help."""


def unacceptable(error: Exception) -> InvalidInput:
    """Translate an `UNACCEPTABLE` error."""
    return InvalidInput(
        f"A value cannot be stored in a database: {error}.", hint="Use 64-bit numbers and text without lone surrogates."
    )
