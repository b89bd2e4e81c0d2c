"""A SQLite file as a thing on disk: made whole or not at all, recognised before it is trusted, its errors explained."""

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

#: "Hdwy" in the file header says that the file is ours.
APPLICATION_ID = 0x48647779

#: A file that was changed so much later than its -wal is looked through before it is trusted. A checkpoint takes less.
OVERLAID_SECONDS = 60.0

_MAGIC = b"SQLite format 3\0"


def create(path: Path, migrations: Sequence[tuple[int, list[str]]]) -> None:
    """Make the file with its whole schema, readable by its owner only.

    It is built under another name and linked into place, so that a crash in between leaves no half-made file that
    would later look like a lost database. Raises FileExistsError if somebody else was quicker.
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
    except FileExistsError:
        raise
    except FileNotFoundError:
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
        os.link(draft, path)  # unlike rename it fails when the name is taken
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if path.exists():  # a file system without hard links has no better way to ask
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(draft, path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exists(path: Path) -> bool:
    """Whether something has this name; a directory we may not look into is an error, not a *no*."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _translate_os_error(error, path) from error
    return True


class OpenFile:
    """The one descriptor by which this process looks into a database file, open for as long as it has the database open.

    POSIX drops *every* lock a process has on a file when the process closes *any* descriptor of it, SQLite's locks
    included. Another process that closes the database would then take itself for its last user and remove the -wal
    file under us, and what we write after that would be lost. So all of this process shares one descriptor per file,
    and it is closed after SQLite has closed its own.
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
                if not stat.S_ISREG(
                    status.st_mode
                ):  # asked before opening: to open a pipe is to wait for its other end
                    kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
                    raise StoreForeign(f"{path} is {kind}, not a database.")
                self._file = (status.st_dev, status.st_ino)
                if self._file in self._inherited:
                    raise HeadwayError(
                        f"{path} was in use when this process was forked, and cannot be used here: SQLite takes itself "
                        "to have locks on it that are the parent's.",
                        hint="Fork when no thread is in the middle of a transaction, or start a new process (spawn).",
                    )
                self._descriptor, users = self._open.get(self._file) or (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0)
                self._open[self._file] = (self._descriptor, users + 1)
        except OSError as error:
            raise _translate_os_error(error, path) from error

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, offset)

    def version_at_rest(self) -> tuple[int, int] | None:
        """What tells this content of the file from any later one, if it can be read as it lies there: where we may make
        nothing beside it (a read-only mount, a backup) and no log with something in it lies there. SQLite cannot open it
        in its usual way then, for want of the -shm file. None where it can, or must say itself why it cannot.

        Whoever writes to the file by another way to it begins with a log, which is there before the file changes."""
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
        """By which SQLite opens it to read."""
        return f"{Path(self._name).as_uri()}?{'immutable=1' if at_rest else 'mode=ro'}"

    def check_place(self) -> None:
        """Raise unless the file still has its name. Whoever writes into one that was deleted or replaced is told by
        SQLite that all is well, and what is written there is gone with the process."""
        if self._found(self._name) != self._file:
            raise self._misplaced(self._name)

    @property
    def knows_wal(self) -> bool:
        return self._wal is not None

    def check_wal(self) -> None:
        """The same for its ``-wal`` file, which is one and the same while this process has the database open."""
        found = self._found(self._wal_name)
        if self._wal is None:
            self._wal = found  # the first look after it was opened
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
            f"{name} was deleted, moved or replaced while it was in use: what this process wrote last is not in it.",
            hint="Put the file back with its -wal file and run the same command again. Stop every run before you move it.",
        )

    def forget_wal(self) -> None:
        """This process has closed the database: the next -wal may be another one."""
        self._wal = None

    def mark_inherited(self) -> None:
        """A connection to this file was in use when this process was forked: nobody may open it here, by no new one."""
        self._inherited.add(self._file)

    @classmethod
    def renew_lock(cls) -> None:
        """In a forked child: a thread of the parent may have held it."""
        cls._lock = threading.Lock()

    def release(self) -> None:
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
    """Refuse what is not a headway database by looking at its first bytes, before SQLite may change anything."""
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
        raise StoreReadOnly(f"The database {path} may not be written.")
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(OSError):  # it is not there, or not ours: then it is its owner's business
            mode = stat.S_IMODE(name.stat().st_mode)
            if mode & 0o077:
                os.chmod(name, 0o600)
                log.warning("others could read the database; its mode is now 0600", path=str(name))
            elif writable and not mode & 0o200:
                os.chmod(name, 0o600)  # made by a reader while the database itself was read-only


def check_identity(file: OpenFile) -> None:
    """Notice a ``-wal`` file that belongs to another database: SQLite would replay it without a word.

    It is looked at through a connection that may only read: one that may write would, on closing, copy the wrong
    ``-wal`` into the database and be the end of it.

    The database's uuid is written when the file is made and never again, so the page that holds it must say the
    same in the bare file as through SQLite, which looks into the ``-wal`` first. Every job row repeats the uuid,
    because each commit rewrites that page.
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
        # It fits, so it may be the file's own: of a copy or a move of both, or of a process that was killed. Only a person
        # knows whether the file is a backup from which nothing was copied out of the log since: then it undoes the restore.
        log.warning(
            "the -wal file is older than the database and fits it, so what it holds is in the database again; "
            "was a backup put in its place? then remove the -wal file and put the backup there once more",
            path=str(path),
        )


def _overlaid(path: Path) -> bool:
    """Whether the file was put in its place long after its ``-wal`` was written last: a backup, maybe, restored over a log
    that nobody removed. It has the same uuid, and what tells is that the two do not fit: see `_is_damaged`.

    SQLite writes the log first and the file soon after it. The file's time is that of its inode, which also a copy has
    that keeps the times of its original."""
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
    """Bytes of the file and its companions."""
    total = 0
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            total += name.stat().st_size
    return total


def translate(error: sqlite3.Error | UnicodeDecodeError, path: Path | None) -> HeadwayError:
    """What an error of SQLite means to the person who runs us."""
    code = getattr(error, "sqlite_errorcode", None)
    where = f"The database {path}" if path else "The in-memory database"
    # The second is how Python tells of an error whose own text quotes a damaged schema.
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
                f"{where} cannot be read where nothing may be written: the last changes are in {path.name}-wal beside it.",
                hint=f"Copy both files to a directory where you may write, and name the copy: --database "
                f"sqlite:///{path.name}",
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH | sqlite3.SQLITE_CANTOPEN:
            return StoreReadOnly(f"{where} may not be written: {error}.")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageError(
                f"{where} is locked by another process that does not let go.",
                hint="Look for a program that keeps it open in a transaction (a database browser?).",
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
    """Whether SQLite could not open a file because this process may have no more of them; it says only that it could not."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CANTOPEN:
        return False
    try:
        check_descriptors(3)  # the database, its log, the index of that
    except OSError as found:
        return found.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _has_log_out_of_reach(path: Path) -> bool:
    """Whether changes of the database lie in a log that SQLite cannot read for want of a place for its index."""
    try:
        return os.stat(f"{path}-wal").st_size > 0 and not os.access(path.absolute().parent, os.W_OK)
    except OSError:
        return False


def _no_room(path: Path | None) -> bool:
    """Whether a write failed for want of space; SQLite calls only some of these cases by their name."""
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
        return StoreReadOnly(f"{path} may not be opened or made: {error.strerror}.")
    return StorageError(f"{path} cannot be opened: {error.strerror}.")
