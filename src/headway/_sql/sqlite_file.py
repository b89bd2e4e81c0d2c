"""SQLite files on disk: atomic creation, checks before use, and explanations of errors."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import stat
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

from headway.core.lifecycle import check_descriptors
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

#: "Hdwy", the application id in the header of our files.
APPLICATION_ID = 0x48647779

#: Seconds by which a file may be newer than its -wal before its pages are checked. A checkpoint takes less.
OVERLAID_SECONDS = 60.0

_MAGIC = b"SQLite format 3\0"


def create(path: Path, migrations: Sequence[tuple[int, list[str]]]) -> None:
    """Create the file with its whole schema, readable by its owner only.

    It is built under another name and linked into place, so that a crash leaves no partial file, which would look like a
    damaged database. Raises FileExistsError if another process has created it.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
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
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        raise _translate_os_error(error, path) from error
    except sqlite3.Error as error:
        raise translate(error, path) from error
    finally:
        for leftover in (draft, Path(f"{draft}-journal"), Path(f"{draft}-wal"), Path(f"{draft}-shm")):
            with suppress(OSError):
                leftover.unlink(missing_ok=True)


def _place(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)  # unlike rename, it fails if the name exists
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if path.exists():  # this file system has no hard links, so the check cannot be atomic
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(draft, path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exists(path: Path) -> bool:
    """Return whether the path exists. Raises if its directory may not be searched."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _translate_os_error(error, path) from error
    return True


class OpenFile:
    """The single descriptor by which this process reads a database file outside SQLite.

    When a process closes any descriptor of a file, POSIX drops all of its locks on that file, including SQLite's. Another
    process that closes the database would then seem to be its last user and remove the -wal, and our later writes would be
    lost. So the process shares one descriptor per file, and closes it after SQLite has closed its own.
    """

    _lock = threading.Lock()
    _open: ClassVar[dict[tuple[int, int], tuple[int, int]]] = {}  # device and inode: descriptor, users
    _inherited: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = os.fspath(path.absolute())
        self._wal_name = f"{self._name}-wal"
        self._wal: tuple[int, int] | None = None
        self._released = False
        try:
            with self._lock:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):  # checked first, because opening a pipe would block
                    kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                    raise StoreForeign(f"{path} is {kind}, not a database.")
                self._file = (status.st_dev, status.st_ino)
                if self._file in self._inherited:
                    raise HeadwayError(
                        f"{path} was in use when this process was forked, and cannot be used here: its locks belong to "
                        "the parent process.",
                        hint="Fork when no thread is in the middle of a transaction, or start a new process (spawn).",
                    )
                self._descriptor, users = self._open.get(self._file) or (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0)
                self._open[self._file] = (self._descriptor, users + 1)
        except OSError as error:
            raise _translate_os_error(error, path) from error

    def read(self, offset: int, count: int) -> bytes:
        """Read bytes of the file."""
        return os.pread(self._descriptor, count, offset)

    def version_at_rest(self) -> tuple[int, int] | None:
        """Return the version of a file that must be read in place, or None if SQLite can open it normally.

        In a directory without write permission (a read-only mount, a backup) SQLite cannot create the -shm file. Without
        pending changes in a -wal, the file can be read as it is. The version changes with its content.

        A process that writes by another path to the file creates a -wal before the file changes.
        """
        try:
            if os.access(os.path.dirname(self._name), os.W_OK) or os.stat(self._wal_name).st_size:
                return None
        except FileNotFoundError:
            pass
        except OSError:
            return None
        status = os.stat(self._name)
        return status.st_mtime_ns, status.st_size

    def address(self, *, at_rest: bool) -> str:
        """Return the URI for opening the file to read."""
        return f"{Path(self._name).as_uri()}?{'immutable=1' if at_rest else 'mode=ro'}"

    def check_place(self) -> None:
        """Raise unless the path still names this file.

        SQLite reports no error for writes to a deleted or replaced file.
        """
        if self._found(self._name) != self._file:
            raise self._misplaced(self._name)

    @property
    def knows_wal(self) -> bool:
        """Whether the identity of the ``-wal`` is recorded."""
        return self._wal is not None

    def check_wal(self) -> None:
        """Raise if the ``-wal`` was replaced. It stays the same file while this process has the database open."""
        found = self._found(self._wal_name)
        if self._wal is None:
            self._wal = found  # the first check after opening
        elif found != self._wal:
            raise self._misplaced(self._wal_name)

    @staticmethod
    def _found(name: str) -> tuple[int, int] | None:
        try:
            status = os.stat(name)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _misplaced(self, name: str) -> StorageError:
        return StorageError(
            f"{name} was deleted, moved or replaced while it was in use. It lacks the last writes of this process.",
            hint="Put the file back with its -wal file and run the same command again. Stop every run before you move it.",
        )

    def forget_wal(self) -> None:
        """Forget the -wal after this process has closed the database, because the next one may be another file."""
        self._wal = None

    def mark_inherited(self) -> None:
        """Forbid this forked process to open the file, because a connection to it was in use during the fork."""
        self._inherited.add(self._file)

    @classmethod
    def renew_lock(cls) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        cls._lock = threading.Lock()

    def release(self) -> None:
        """Close the descriptor after its last user. May be called more than once."""
        with self._lock:
            if self._released:
                return
            self._released = True
            descriptor, users = self._open.pop(self._file)
            if users > 1:
                self._open[self._file] = (descriptor, users - 1)
            else:
                os.close(descriptor)


def check_header(file: OpenFile, *, writable: bool) -> None:
    """Raise unless the header is that of a Headway database. Called before SQLite opens the file."""
    path = file.path
    try:
        header = file.read(0, 100)
    except OSError as error:
        raise _translate_os_error(error, path) from error
    if not header:
        raise StoreCorrupt(f"The database {path} is empty (0 bytes): its content was lost.")
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise StoreCorrupt(f"{path} is not a SQLite database, or its header is damaged.")
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise StoreForeign(f"{path} is a SQLite database of another program.")
    if writable and not os.access(path, os.W_OK):
        raise StoreReadOnly(f"The database {path} is not writable.")
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(OSError):  # missing, or owned by another user
            mode = stat.S_IMODE(name.stat().st_mode)
            if mode & 0o077:
                os.chmod(name, 0o600)
                log.warning("other users could read the database; its mode is now 0600", path=str(name))
            elif writable and not mode & 0o200:
                os.chmod(name, 0o600)  # created by a reader while the database was read-only


def check_identity(file: OpenFile) -> None:
    """Raise if the ``-wal`` belongs to another database, because SQLite would replay it without an error.

    The check uses a read-only connection: one that can write would, on closing, copy the wrong ``-wal`` into the database.

    The database's uuid is written only at its creation. So its page must be the same in the file as through SQLite, which
    reads the ``-wal`` first. Every job's row repeats the uuid, because each commit rewrites that page.
    """
    path = file.path
    overlaid = _overlaid(path)
    try:
        at_rest = file.version_at_rest() is not None
        with closing(sqlite3.connect(file.address(at_rest=at_rest), uri=True, timeout=5.0)) as connection:
            genuine = _is_genuine(file, connection) and not (overlaid and _is_damaged(connection))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not overlaid or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise translate(error, path) from error
        genuine = False
    except OSError as error:
        raise _translate_os_error(error, path) from error
    if not genuine:
        raise StoreCorrupt(
            f"The file {path}-wal belongs to another database than {path}, or to {path} before it was restored.",
            hint=f"Put the right -wal file back beside {path}, or move the wrong one away. Nothing was written.",
        )
    if overlaid:
        # The -wal fits: both may have been copied or moved, or a process was killed. If the file is a restored backup,
        # the -wal has undone the restore, which only a person can know.
        log.warning(
            "the -wal file is older than the database and fits it, so its changes were replayed; "
            "if the database is a restored backup, remove the -wal file and restore the backup again",
            path=str(path),
        )


def _overlaid(path: Path) -> bool:
    """Return whether the file is much newer than its ``-wal``, such as a backup restored over a remaining log.

    The uuid is the same then, but the pages may not fit: see `_is_damaged`. SQLite itself writes the log first and the file
    soon after. The change time of the inode is also set for a copy that preserves the modification time.
    """
    try:
        log_status, status = os.stat(f"{path}-wal"), os.stat(path)
    except OSError:
        return False
    return log_status.st_size > 0 and status.st_ctime > log_status.st_mtime + OVERLAID_SECONDS


def _is_damaged(connection: sqlite3.Connection) -> bool:
    return connection.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]


def _is_genuine(file: OpenFile, connection: sqlite3.Connection) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema WHERE name IN ('meta', 'jobs')").fetchone()
    row = (
        tables == 2
        and connection.execute(
            "SELECT value, (SELECT rootpage FROM sqlite_schema WHERE name = 'meta') FROM meta WHERE name = 'database'"
        ).fetchone()
    )
    if not row or not isinstance(row[0], str) or not isinstance(row[1], int) or row[1] < 1:
        raise StoreCorrupt(f"The database {file.path} has lost its identity.")
    uuid, rootpage = row
    (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    if uuid.encode() not in file.read((rootpage - 1) * page_size, page_size):
        return False
    return connection.execute("SELECT 1 FROM jobs WHERE origin <> ? LIMIT 1", (uuid,)).fetchone() is None


def size(path: Path) -> int:
    """Return the bytes of the file and its -wal and -shm."""
    total = 0
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            total += name.stat().st_size
    return total


def translate(error: sqlite3.Error | UnicodeDecodeError, path: Path | None) -> HeadwayError:
    """Translate an error of SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    where = f"The database {path}" if path else "The in-memory database"
    # Python raises UnicodeDecodeError if the error's own text quotes a damaged schema.
    if code is None and ("decode to UTF-8" in str(error) or isinstance(error, UnicodeDecodeError)):
        return StoreCorrupt(f"{where} is damaged: a text in it is not UTF-8.")
    if code is None:
        return StorageError(f"{where} cannot be used: {error}.")
    match code & 0xFF:
        case sqlite3.SQLITE_FULL:
            return StoreFull(f"{where} cannot grow: no space is left on the disk.")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StoreCorrupt(f"{where} is damaged: {error}.")
        case sqlite3.SQLITE_CANTOPEN if path and _has_log_out_of_reach(path):
            return StoreReadOnly(
                f"{where} cannot be read in a directory without write permission: its last changes are in {path.name}-wal.",
                hint=f"Copy both files to a writable directory, and use the copy: --database sqlite:///{path.name}",
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH | sqlite3.SQLITE_CANTOPEN:
            return StoreReadOnly(f"{where} is not writable: {error}.")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageError(
                f"{where} is locked by another process.",
                hint="Find the program that keeps a transaction open, such as a database browser.",
            )
        case sqlite3.SQLITE_IOERR:
            return (
                StoreFull(f"{where} cannot grow: no space is left, or files may not get larger (ulimit -f).")
                if _no_room(path)
                else StorageError(
                    f"{where} could not be read or written: {error}.", hint="Check the disk and its messages (dmesg)."
                )
            )
        case sqlite3.SQLITE_CONSTRAINT:
            return StorageError(f"A constraint of the database was violated: {error}.")
        case _:
            return StorageError(f"{where} failed: {error}.")


def lacks_descriptors(error: BaseException | None) -> bool:
    """Return whether SQLite failed to open a file for lack of descriptors. Its own error does not tell."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CANTOPEN:
        return False
    try:
        check_descriptors(3)  # the database, its -wal and -shm
    except OSError as found:
        return found.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _has_log_out_of_reach(path: Path) -> bool:
    """Return whether SQLite cannot read pending changes in a -wal, because it cannot create the -shm."""
    try:
        return os.stat(f"{path}-wal").st_size > 0 and not os.access(path.absolute().parent, os.W_OK)
    except OSError:
        return False


def _no_room(path: Path | None) -> bool:
    """Return whether a write failed for lack of space. SQLite's error code does not always tell."""
    if path is None:
        return False
    try:
        room = os.statvfs(path.parent)
        largest = max(name.stat().st_size for name in (path, Path(f"{path}-wal")) if name.exists())
    except (OSError, ValueError):
        return False
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return room.f_bavail * room.f_frsize < 64 * 1024 or largest + 64 * 1024 > limit != resource.RLIM_INFINITY


def _translate_os_error(error: OSError, path: Path) -> HeadwayError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"There is no space left for {path}.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreReadOnly(f"{path} cannot be opened or created: {error.strerror}.")
    return StorageError(f"{path} cannot be opened: {error.strerror}.")
