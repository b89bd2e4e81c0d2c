"""The records: one small door to SQLite and PostgreSQL.

`connect` takes an address and gives a `Database`. Its verbs are in ``database.py``, its connections in ``pool.py``, an
open transaction in ``tx.py``, the numbered migrations in ``schema.py``; what differs between the engines in
``sqlite.py`` and ``postgresql.py``.
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

    With ``create`` the database is made or brought to this schema version; without it a missing one is `NotFound`.
    """
    database = _sqlite(url, create=create, stop=stop) if _split(url).scheme == "sqlite" else _postgresql(url, stop)
    try:
        database.check(writable=create)
        if not create and not database.exists():
            raise _missing(f"There are no records of headway in {database.name}.")
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
        raise InvalidInput(f"synchronous={synchronous.lower()} is not known.", hint="Use full (default) or normal.")
    if options:
        raise InvalidInput(f"{next(iter(options))!r} is no option of a SQLite database.", hint="There is: synchronous.")
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
        hint="Start a job first (headway run ...), or name the right one: --database sqlite:///FILE",
    )


def sqlite_path(url: str) -> Path | None:
    """The file an address names, or leads to by a link; None for a database in memory or on a server."""
    parts = _split(url)
    location = unquote(parts.path[1:], errors="surrogateescape")  # a file's name is bytes, of whatever encoding
    if parts.scheme != "sqlite" or location == ":memory:":
        return None
    if not location or "\0" in location:  # an empty name would be a database that is gone with the process
        raise _no_address(url)
    if os.path.islink(location):
        return Path(os.path.realpath(location))  # beside which SQLite has its log, and where it would make the file
    return Path(location)


def absolute(url: str) -> str:
    """The address as it means the same database also after this process changed its directory, or somebody a link to it."""
    path = sqlite_path(url)
    if path is None:
        return url
    _, mark, options = url.partition("?")
    return f"sqlite:///{quote(os.fsencode(os.path.abspath(path)))}{mark}{options}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url, allow_fragments=False)  # a file's name may have a #
        if "," not in parts.netloc:  # PostgreSQL takes several hosts
            _ = parts.port
    except ValueError as error:
        raise _no_address(url) from error
    if parts.scheme not in ("postgresql", "postgres") and (parts.scheme != "sqlite" or parts.netloc):
        raise _no_address(url)
    return parts


def _create_when_possible(path: Path, stop: threading.Event | None) -> None:
    """The directory may be on a mount that is just coming up: ask again for a moment before giving up."""
    failures = 0
    while True:
        try:
            sqlite_file.create(path, migrations("sqlite"))
            return
        except FileNotFoundError as error:
            failures += 1
            if STORE.exhausted(failures):
                raise StorageError(
                    f"The directory {path.parent} does not exist.", hint="Make it, or name another file: --database"
                ) from error
            log.warning("the directory is not there yet", path=str(path.parent), attempt=failures)
            pause(STORE.delay(failures), stop)
        except FileExistsError:
            return  # another process made it first: use theirs
