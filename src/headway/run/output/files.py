"""Results in a file: JSON lines, each exactly once however often the run is killed, or a CSV table.

The ledger's table ``results`` is authoritative, and the file is a copy. Before the file is touched, the ledger
records that it belongs to this job. So a run that was killed at any later moment recognises its file. Lines are
appended and synced first; then the ledger records the new size. Content beyond that size comes from a run that died
before recording it. It is cut off and written again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from headway._sql import Database
from headway.errors import Held, InvalidInput, StorageError
from headway.ledger import Job, Ledger
from headway.ledger.store import output_files
from headway.run.output.results import lines, write_whole
from headway.telemetry import Log

log = Log("run")

#: How every line begins, and therefore every JSON file written here.
_HEAD = b'{"index": '

_CSV_HEAD = b"index,key,"
_OTHER_FORMATS = (".tsv", ".xlsx", ".parquet")


def refuse_foreign(path: Path, ledger: Ledger | None, id: str) -> None:
    """Raise `InvalidInput` if the file has content not written by job ``id``.

    Files of an archived job with the same id are accepted, because its results are still in the ledger.
    """
    if str(path) == "-":  # means stdout to other programs; a file named "-" is never intended
        raise InvalidInput("Results are written to a file.", hint=f"To print them afterwards: headway results {id}")
    if path.suffix.lower() in _OTHER_FORMATS:
        raise InvalidInput(
            f"Results are written as JSON lines or CSV, not as {path.suffix[1:].upper()}.",
            hint=f"Name it {path.stem}.jsonl or {path.stem}.csv",
        )
    try:
        if not path.absolute().parent.is_dir():
            raise InvalidInput(f"The directory of {path} does not exist.", hint="Make it, or name another --output.")
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{path} is not a file.", hint="Name another --output.")
        refuse_unwritable(path)
        if path.exists():
            with path.open("rb") as file:
                head = file.read(len(_head_of(path)))
            if head and (ledger is None or not _is_ours(ledger.database, path, head, id)):
                raise _foreign(path)
    except OSError as error:
        raise InvalidInput(f"The results cannot be written to {path}: {error.strerror}.") from error


def refuse_unwritable(path: Path) -> None:
    """Raise `InvalidInput` if the file cannot be written later.

    A table is written to a temporary file and moved only when the run ends, which is too late for this error.
    """
    place = Path(os.path.realpath(path))
    what = place.parent if is_csv(path) or not place.exists() else place
    if not os.access(what, os.W_OK):
        raise InvalidInput(
            f"The results cannot be written to {path}: {what} is not writable.", hint="Name another --output."
        )


def _is_ours(database: Database, path: Path, head: bytes, id: str) -> bool:
    owners = output_files.owners(database, os.path.realpath(path))
    noted = bool(owners) and all(
        name == id or (archived and name.startswith(f"{id[:100]}.")) for name, archived in owners
    )
    # The job is recorded before the first line is written, so another file may be there now. After a power cut the
    # file may hold a part of the first line, or only zeros.
    return noted and (_head_of(path).startswith(head) or not head.strip(b"\0"))


def is_csv(path: Path) -> bool:
    """Return whether results go to this path as CSV."""
    return path.suffix.lower() == ".csv"


def _head_of(path: Path) -> bytes:
    """Return the first bytes of a file that Headway writes to this path."""
    return _CSV_HEAD if is_csv(path) else _HEAD


def _foreign(path: Path) -> InvalidInput:
    return InvalidInput(
        f"{path} exists and was not written by this job.", hint="Move it away or name another --output."
    )


def refuse_incomplete(job: Job) -> None:
    """Refuse to write a file if results of done items were not kept."""
    missing = job.unkept_results()
    if missing > 0:
        raise InvalidInput(
            f"Job {job.id} has {job.info().done:,} done items, and the results of {missing:,} were not kept: they "
            "were not JSON or too long, or the job ran with --no-results.",
            hint=f"See those that were kept: headway results {job.id}. Or start over with --fresh.",
        )


class CsvOutput:
    """The results as a CSV table.

    Its columns are known only at the end, so it is written when a run ends and replaced atomically.
    """

    def __init__(self, job: Job, path: Path) -> None:
        self._job, self._path = job, path
        output_files.add(job, os.path.realpath(path))  # before the file is touched

    def write_sometimes(self) -> None:
        """Do nothing while the run is in progress."""

    def write(self) -> None:
        """Write the whole table."""
        refuse_foreign(self._path, Ledger(self._job.database), self._job.id)
        write_whole(self._path, lines(self._job, "csv", log.info))

    def close(self) -> None:
        """Do nothing: no file is open."""


def open_output(job: Job, path: Path) -> Output | CsvOutput:
    """Open the file of results: CSV or JSON lines, by its suffix."""
    path = Path(os.path.abspath(path))  # items that run in this process may change directory
    return CsvOutput(job, path) if is_csv(path) else Output(job, path)


def _lock(file: int) -> bool:
    """Lock the file for this process. Workers do not inherit the lock, so it ends with this process."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # the file system has no locks
        log.info("the file of results cannot be locked", error=str(error.strerror))
    return True


def _line(row: tuple[int, int, str | None, str]) -> bytes:
    _, idx, key, result = row
    return f'{{"index": {idx}, "key": {json.dumps(key, ensure_ascii=False)}, "result": {result}}}\n'.encode()


class Output:
    """A JSON line per done item, ``{"index": 17, "key": "inv-00421", "result": ...}``, in order of completion."""

    def __init__(self, job: Job, path: Path, *, every: float = 1.0) -> None:
        self._job = job
        self._path = path
        self._name = os.path.realpath(path)
        self._every = every
        self._written_at = time.monotonic()
        known = output_files.position(job, self._name)
        self._seq, self._size = known or (0, 0)
        self._file = self._open()
        try:
            job.put_empty_results()
            if known is None:
                self._note()  # record ownership before the file is changed
            if not self._stands():
                self._begin_anew()
            os.ftruncate(self._file, self._size)
        except OSError as error:
            self.close()
            raise self._cannot(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        """Open or create the file and lock it.

        Two runs writing one file would overwrite each other's lines. Its content is checked again under the lock.
        """
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._cannot(error) from error
        try:
            if not _lock(file) and not self._succeeds():
                raise Held(
                    f"Another run is writing results to {self._path}.",
                    hint="Wait until it has ended, or name another --output.",
                )
            head = os.pread(file, len(_HEAD), 0)
            if head and not _is_ours(self._job.database, self._path, head, self._job.id):
                raise _foreign(self._path)
        except BaseException:
            os.close(file)
            raise
        return file

    def _succeeds(self) -> bool:
        """Return whether only an earlier, fenced-off holder of this job can have the lock.

        That holder can only write the lines that this run writes in the same positions, because both follow the
        ledger's order.
        """
        return output_files.live_writers(self._job.database, self._name) == [self._job.no]

    def _cannot(self, error: OSError) -> InvalidInput:
        return InvalidInput(f"The results cannot be written to {self._path}: {error.strerror}.")

    def write_sometimes(self) -> None:
        """Write if the last write was at least ``every`` seconds ago."""
        if time.monotonic() - self._written_at >= self._every:
            self.write()

    def write(self) -> None:
        """Append the recorded results that are not in the file yet.

        Raises `StaleClaim` before the file is touched if the job was taken over. Its new holder may have restarted
        the file, so this run's offsets are no longer valid.
        """
        self._written_at = time.monotonic()
        output_files.check_hold(self._job)
        self._find_again()
        while rows := self._job.results(self._seq):
            lines = b"".join(map(_line, rows))
            try:
                view = memoryview(lines)
                at = self._size
                while view:
                    count = os.pwrite(self._file, view, at)
                    view, at = view[count:], at + count
                os.fsync(self._file)
            except OSError as error:
                raise StorageError(
                    f"The results cannot be written to {self._path}: {error.strerror}.",
                    hint="They are safe in the ledger. Free some space and run the same command again.",
                ) from error
            self._seq, self._size = rows[-1][0], at
            self._note()

    def _find_again(self) -> None:
        """Check that the file still has its name and content.

        A file that was removed, replaced or changed is rewritten from the ledger. A foreign file in its place is
        refused.
        """
        ours = os.fstat(self._file)
        try:
            named = os.stat(self._path)
            same = (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
        except OSError:
            same = False  # missing: `_open` creates it or raises
        if same and self._stands():
            return
        if not same:
            file, self._file = self._file, self._open()
            os.close(file)
        self._begin_anew()
        try:
            os.ftruncate(self._file, 0)
        except OSError as error:
            raise self._cannot(error) from error

    def _stands(self) -> bool:
        """Return whether the last line ends at the recorded size.

        If not, the file was edited in place, and appending there would corrupt it.
        """
        if not self._size:
            return True
        last = self._job.results(self._seq - 1, 1)
        line = _line(last[0]) if last and last[0][0] == self._seq else b""
        begins = self._size - len(line)  # negative: the result was changed in the ledger
        return bool(line) and begins >= 0 and os.pread(self._file, len(line), begins) == line

    def _begin_anew(self) -> None:
        log.warning("the file of results was removed or changed; it is rewritten", path=str(self._path))
        self._seq = self._size = 0

    def _note(self) -> None:
        output_files.put_position(self._job, self._name, self._seq, self._size)

    def close(self) -> None:
        os.close(self._file)
