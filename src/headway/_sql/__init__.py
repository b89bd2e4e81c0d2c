"""Access to SQLite and PostgreSQL.

`connect` opens a `Database` by its address.

    database.py     Database: transactions, retries, metrics
    driver.py       Driver: the contract of sqlite.py and postgresql.py
    pool.py         Pool: the connections of one database
    tx.py           Tx: an open transaction
    schema.py       the numbered migrations
    joined.py       join: our statements in a transaction of the caller
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from headway._sql import sqlite_file
from headway._sql.database import Database
from headway._sql.joined import is_two_phase, join
from headway._sql.schema import migrations
from headway._sql.sqlite import SQLite
from headway._sql.tx import NOW, Engine, Row, Tx, Value, array, listed, marks
from headway.core.retry import STORE, pause
from headway.errors import InvalidInput, NotFound, StorageError
from headway.telemetry import Log, redact

__all__ = [
    "NOW", "Database", "Engine", "Row", "Tx", "Value", "absolute", "array", "connect", "is_two_phase", "join", "listed",
    "marks", "migrations", "require_open", "sqlite_path",
]  # fmt: skip

log = Log("sql")


def connect(url: str, *, create: bool = True, stop: threading.Event | None = None) -> Database:
    """Open ``sqlite:///file.db`` (three slashes: relative, four: absolute), ``sqlite:///:memory:`` or ``postgresql://...``.

    With ``create`` a missing database is created. Without it, a missing one raises `NotFound`. An older schema is migrated.
    """
    database = _sqlite(url, create=create, stop=stop) if _split(url).scheme == "sqlite" else _postgresql(url, stop)
    try:
        database.check(writable=create)
        if not create and not database.exists():
            raise _missing(f"There are no Headway tables in {database.name}.")
        database.migrate()
    except BaseException:
        database.close()
        raise
    return database


def require_open(database: object) -> Database:
    """Return ``database`` if it is a `Database`; otherwise raise `InvalidInput`."""
    if isinstance(database, Database):
        return database
    raise InvalidInput(
        f"database must be an address or an open database, not {type(database).__name__}.",
        hint="Use sqlite:///file.db or postgresql://user@host/name",
    )


def _postgresql(url: str, stop: threading.Event | None) -> Database:
    from headway._sql.postgresql import PostgreSQL

    return PostgreSQL(url, stop=stop)


def _sqlite(url: str, *, create: bool, stop: threading.Event | None) -> Database:
    options = parse_qs(_split(url).query, keep_blank_values=True)
    synchronous = options.pop("synchronous", ["full"])[-1].upper()
    if synchronous not in ("FULL", "NORMAL"):
        raise InvalidInput(
            f"synchronous must be full or normal (got {synchronous.lower()}).", hint="Leave it out to use full."
        )
    if options:
        raise InvalidInput(f"Unknown SQLite option {next(iter(options))!r}.", hint="The only option is synchronous.")
    path = sqlite_path(url)
    if path is None:
        return SQLite(None, synchronous=synchronous, stop=stop)
    if not sqlite_file.exists(path):
        if not create:
            raise _missing(f"There is no database at {path}.")
        _create_when_possible(path, stop)
    return SQLite(path, synchronous=synchronous, stop=stop)


def _no_address(url: str) -> InvalidInput:
    return InvalidInput(
        f"{redact(url)!r} is not a database address.",
        hint="Use sqlite:///file.db, sqlite:////absolute/file.db or postgresql://user@host/name",
    )


def _missing(what: str) -> NotFound:
    return NotFound(
        what,
        hint="Start a job first (headway run ...), or set another database: --database sqlite:///FILE",
    )


def sqlite_path(url: str) -> Path | None:
    """Return the path of a SQLite file, with symbolic links resolved.

    Returns None for a database in memory or on a server.
    """
    parts = _split(url)
    location = unquote(parts.path[1:], errors="surrogateescape")  # a file name is bytes in any encoding
    if parts.scheme != "sqlite" or location == ":memory:":
        return None
    if not location or "\0" in location:  # SQLite would open a temporary database for an empty name
        raise _no_address(url)
    if os.path.islink(location):
        return Path(os.path.realpath(location))  # SQLite places the file and its -wal there
    return Path(location)


def absolute(url: str) -> str:
    """Make a SQLite address independent of the working directory and of symbolic links."""
    path = sqlite_path(url)
    if path is None:
        return url
    _, mark, options = url.partition("?")
    return f"sqlite:///{quote(os.fsencode(os.path.abspath(path)))}{mark}{options}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url, allow_fragments=False)  # a file name may contain #
        if "," not in parts.netloc:  # PostgreSQL accepts several hosts
            _ = parts.port
    except ValueError as error:
        raise _no_address(url) from error
    if parts.scheme not in ("postgresql", "postgres") and (parts.scheme != "sqlite" or parts.netloc):
        raise _no_address(url)
    return parts


def _create_when_possible(path: Path, stop: threading.Event | None) -> None:
    """Create a SQLite file, and retry for a moment while its directory is missing.

    The directory may be on a mount that is not up yet.
    """
    failures = 0
    while True:
        try:
            sqlite_file.create(path, migrations("sqlite"))
            return
        except FileNotFoundError as error:
            failures += 1
            if STORE.exhausted(failures):
                raise StorageError(
                    f"The directory {path.parent} does not exist.", hint="Create it, or set another file: --database"
                ) from error
            log.warning("the directory of the database does not exist yet", path=str(path.parent), attempt=failures)
            pause(STORE.delay(failures), stop)
        except FileExistsError:
            return  # another process has created it
