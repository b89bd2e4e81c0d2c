"""A SQLite file as a thing on disk: made whole or not at all, recognised before it is trusted, its errors explained."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.errors import (
    HeadwayError,
    StorageError,
    StoreCorrupt,
    StoreForeign,
    StoreFull,
    StoreReadOnly,
)
from headway.telemetry import Log

log = Log("sql")

#: "Hdwy" in the file header says that the file is ours.
APPLICATION_ID = 0x48647779

_MAGIC = b"SQLite format 3\0"


def create(path: Path, migrations: Sequence[tuple[int, list[str]]]) -> None:
    """Make the file with its whole schema, readable by its owner only.

    It is built under another name and linked into place, so that a crash in between leaves no half-made file that
    would later look like a lost database. Raises FileExistsError if somebody else was quicker.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            connection.execute("BEGIN")
            for _, statements in migrations:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(migrations)}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        _fsync(draft)
        _place(draft, path)
        _fsync(path.parent)
    except FileExistsError:
        raise
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _meaning_of_os_error(error, path) from error
    except sqlite3.Error as error:
        raise meaning(error, path) from error
    finally:
        for leftover in (draft, Path(f"{draft}-journal"), Path(f"{draft}-wal"), Path(f"{draft}-shm")):
            with suppress(OSError):
                leftover.unlink(missing_ok=True)


def _place(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)  # unlike rename it fails when the name is taken
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.rename(draft, path)  # a file system without hard links


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_header(path: Path, *, writable: bool) -> None:
    """Refuse what is not a headway database by looking at its first bytes, before SQLite may change anything."""
    try:
        with open(path, "rb") as file:
            header = file.read(100)
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except IsADirectoryError as error:
        raise StoreForeign(f"{path} is a directory, not a database.") from error
    except OSError as error:
        raise _meaning_of_os_error(error, path) from error
    if not header:
        raise StoreCorrupt(f"The database {path} is empty (0 bytes): its content was lost.")
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise StoreCorrupt(f"{path} is not a SQLite database, or its header is damaged.")
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise StoreForeign(f"{path} is a SQLite database of another program.")
    if writable and not os.access(path, os.W_OK):
        raise StoreReadOnly(f"The database {path} may not be written.")
    if mode & 0o077:
        with suppress(OSError):  # not the owner: then it is the owner's business
            os.chmod(path, 0o600)
            log.warning("others could read the database; its mode is now 0600", path=str(path))


def check_identity(path: Path, read: Callable[[str], list[Any]]) -> None:
    """Notice a ``-wal`` file that belongs to another database: SQLite would replay it without a word.

    The database's uuid is written when the file is made and never again, so the page that holds it must say the
    same in the bare file as through SQLite, which looks into the ``-wal`` first. Every job row repeats the uuid,
    because each commit rewrites that page.
    """
    row = read(
        "SELECT value, (SELECT rootpage FROM sqlite_schema WHERE name = 'meta') FROM meta WHERE name = 'database'"
    )
    if not row:
        raise StoreCorrupt(f"The database {path} has lost its identity.")
    uuid, rootpage = row[0]
    page_size = read("PRAGMA page_size")[0][0]
    with open(path, "rb") as file:
        file.seek((rootpage - 1) * page_size)
        genuine = uuid.encode() in file.read(page_size)
    if not genuine or read(
        "SELECT 1 FROM jobs WHERE origin <> (SELECT value FROM meta WHERE name = 'database') LIMIT 1"
    ):
        raise StoreCorrupt(
            f"The file {path}-wal belongs to another database than {path}.",
            hint=f"Put the right -wal file back beside {path}, or move the wrong one away. Nothing was written.",
        )


def size(path: Path) -> int:
    """Bytes of the file and its companions."""
    total = 0
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            total += name.stat().st_size
    return total


def meaning(error: sqlite3.Error, path: Path | None) -> HeadwayError:
    """What an error of SQLite means to the person who runs us."""
    code = getattr(error, "sqlite_errorcode", None)
    where = f"The database {path}" if path else "The in-memory database"
    if code is None:
        return StorageError(f"{where} cannot be used: {error}.")
    match code & 0xFF:
        case sqlite3.SQLITE_FULL:
            return StoreFull(f"{where} cannot grow: no space is left on the disk.")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StoreCorrupt(f"{where} is damaged: {error}.")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH | sqlite3.SQLITE_CANTOPEN:
            return StoreReadOnly(f"{where} may not be written: {error}.")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageError(
                f"{where} is locked by another process that does not let go.",
                hint="Look for a program that keeps it open in a transaction (a database browser?).",
            )
        case sqlite3.SQLITE_IOERR:
            return (
                StoreFull(f"{where} could not be written: {error}.")
                if _disk_is_full(path)
                else StorageError(
                    f"{where} could not be read or written: {error}.", hint="Check the disk and its messages (dmesg)."
                )
            )
        case sqlite3.SQLITE_CONSTRAINT:
            return StorageError(f"A constraint of the database was violated: {error}.")
        case _:
            return StorageError(f"{where} failed: {error}.")


def _disk_is_full(path: Path | None) -> bool:
    if path is None:
        return False
    try:
        room = os.statvfs(path.parent)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < 64 * 1024


def _meaning_of_os_error(error: OSError, path: Path) -> HeadwayError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"There is no space left for {path}.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreReadOnly(f"{path} may not be opened or made: {error.strerror}.")
    return StorageError(f"{path} cannot be opened: {error.strerror}.")
