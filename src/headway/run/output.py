"""Results in a file: one JSON object a line, each exactly once however often the run was killed, or a table (CSV).

The ledger's table ``results`` is the truth. The file is its copy. The ledger notes that the file is this job's before
the file is touched, so that a run killed at any moment after that finds its own file again. Lines are appended and
synced first, then the ledger notes how far that is. What stands in the file beyond the noted size was written by a run
that died before the note: it is cut off and written again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from headway._lease import has_ended
from headway._sql import Database, Tx
from headway.errors import Held, InvalidInput, StorageError
from headway.ledger import Job, Ledger
from headway.run.results import lines, write_whole
from headway.telemetry import Log

log = Log("run")

#: How every line begins, and so every file of ours.
_HEAD = b'{"index": '

_CSV_HEAD = b"index,key,"
_OTHER_FORMATS = (".tsv", ".xlsx", ".parquet")


def refuse_foreign(path: Path, ledger: Ledger | None, id: str) -> None:
    """A file with something in it that job ``id`` did not write is not touched. What an earlier job of that id wrote,
    which was put aside by a fresh start, is the job's own: its results are still in the ledger."""
    if str(path) == "-":  # to other programs that is standard output, and a file of that name is nobody's wish
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
    """A table is written beside its place and moved there, when the run ends: too late to learn that it cannot be."""
    place = Path(os.path.realpath(path))
    what = place.parent if is_csv(path) or not place.exists() else place
    if not os.access(what, os.W_OK):
        raise InvalidInput(
            f"The results cannot be written to {path}: {what} may not be written.", hint="Name another --output."
        )


def _is_ours(database: Database, path: Path, head: bytes, id: str) -> bool:
    rows = database.all(
        "SELECT j.id, j.archived FROM outputs o JOIN jobs j ON j.no = o.job WHERE o.path = ?", (os.path.realpath(path),)
    )
    noted = bool(rows) and all(name == id or (archived and name.startswith(f"{id[:100]}.")) for name, archived in rows)
    # The note comes before the first line: somebody may have put another file there since. What a power cut left of our
    # first line is a part of it, or nothing but zeros.
    return noted and (_head_of(path).startswith(head) or not head.strip(b"\0"))


def is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _head_of(path: Path) -> bytes:
    """How our file of that name begins."""
    return _CSV_HEAD if is_csv(path) else _HEAD


def _foreign(path: Path) -> InvalidInput:
    return InvalidInput(
        f"{path} exists and was not written by this job.", hint="Move it away or name another --output."
    )


def refuse_incomplete(job: Job) -> None:
    """Refuse to write a file that would lack the results of items which were done while nobody asked to keep them."""
    missing = job.unkept_results()
    if missing > 0:
        raise InvalidInput(
            f"Job {job.id} has {job.info().done:,} done items, and the results of {missing:,} of them were not kept: they "
            "were not JSON or very long, or it ran with --no-results.",
            hint=f"See those that were kept: headway results {job.id}. Or start over with --fresh.",
        )


def keeps_results(job: Job) -> bool:
    """Whether the job has ever written results to a file: then it goes on keeping them."""
    return job.database.one("SELECT 1 FROM outputs WHERE job = ? LIMIT 1", (job.no,)) is not None


class CsvOutput:
    """The results as a table. Its columns are known when all results are, so it is written as a whole when a run ends,
    and replaced in one step."""

    def __init__(self, job: Job, path: Path) -> None:
        self._job, self._path = job, path
        name = os.path.realpath(path)
        job.database.run(  # before the file is touched: from now on it is ours
            lambda tx: tx.execute(
                "INSERT INTO outputs (job, path, seq, size) VALUES (?, ?, 0, 0) ON CONFLICT (job, path) DO NOTHING",
                (job.no, name),
            ),
            operation="output",
        )

    def write_sometimes(self) -> None:
        """Nothing to do while the run goes on."""

    def write(self) -> None:
        refuse_foreign(self._path, Ledger(self._job.database), self._job.id)
        write_whole(self._path, lines(self._job, "csv", log.info))

    def close(self) -> None:
        """Nothing is open."""


def open_output(job: Job, path: Path) -> Output | CsvOutput:
    path = Path(os.path.abspath(path))  # items that run in this process may change its directory
    return CsvOutput(job, path) if is_csv(path) else Output(job, path)


def _lock(file: int) -> bool:
    """Lock it for this process alone: workers do not inherit that, so it ends with us, however we end."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # a file system without locks
        log.info("the file of results cannot be locked", error=str(error.strerror))
    return True


def _line(row: tuple[int, int, str | None, str]) -> bytes:
    _, idx, key, result = row
    return f'{{"index": {idx}, "key": {json.dumps(key, ensure_ascii=False)}, "result": {result}}}\n'.encode()


class Output:
    """``{"index": 17, "key": "inv-00421", "result": ...}`` per done item, in the order they were done."""

    def __init__(self, job: Job, path: Path, *, every: float = 1.0) -> None:
        self._job = job
        self._path = path
        self._name = os.path.realpath(path)
        self._every = every
        self._written_at = time.monotonic()
        row = job.database.one("SELECT seq, size FROM outputs WHERE job = ? AND path = ?", (job.no, self._name))
        self._seq, self._size = row or (0, 0)
        self._file = self._open()
        try:
            job.put_empty_results()
            if row is None:
                job.database.run(self._note, operation="output")  # before a byte is changed: from now on it is ours
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
        """The file, made if it is not there. It is locked, because two runs that write one file would overwrite each
        other's lines, and looked at once more under the lock."""
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
        """Whether the file's lock can only be that of an earlier holder of this job, who is stopped and fenced off: what
        it may still write are the lines that we write there, for they are in the ledger's order."""
        database = self._job.database
        rows = database.all(
            "SELECT o.job, j.holder, j.lease_until FROM outputs o JOIN jobs j ON j.no = o.job WHERE o.path = ?",
            (self._name,),
        )
        now = database.now()
        held = [job for job, holder, until in rows if holder is not None and not has_ended(holder, until, now)]
        return held == [self._job.no]

    def _cannot(self, error: OSError) -> InvalidInput:
        return InvalidInput(f"The results cannot be written to {self._path}: {error.strerror}.")

    def write_sometimes(self) -> None:
        if time.monotonic() - self._written_at >= self._every:
            self.write()

    def write(self) -> None:
        """Bring the file up to what is recorded. `StaleClaim` before anything is touched if the job was taken over: its
        new holder may have begun the file anew, and what we know of its places is no longer so."""
        self._written_at = time.monotonic()
        self._job.database.run(self._job.open, operation="output")
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
            self._job.database.run(self._note, operation="output")

    def _find_again(self) -> None:
        """What was written must still stand under the file's name: one that was removed, replaced or changed while the
        run went on is written anew from the ledger, and one that somebody else put there is refused."""
        ours = os.fstat(self._file)
        try:
            named = os.stat(self._path)
            same = (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
        except OSError:
            same = False  # it is not there: `_open` makes it, or says why it cannot
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
        """Whether the line that was written last ends where it is noted to end. Else somebody shortened or edited the file
        in place, and to go on at that size would be in the middle of something."""
        if not self._size:
            return True
        last = self._job.results(self._seq - 1, 1)
        line = _line(last[0]) if last and last[0][0] == self._seq else b""
        begins = self._size - len(line)  # below 0: the result itself was changed in the ledger
        return bool(line) and begins >= 0 and os.pread(self._file, len(line), begins) == line

    def _begin_anew(self) -> None:
        log.warning("the file of results was removed or changed; it is written anew", path=str(self._path))
        self._seq = self._size = 0

    def _note(self, tx: Tx) -> None:
        self._job.open(tx)
        tx.execute(
            "INSERT INTO outputs (job, path, seq, size) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (job, path) DO UPDATE SET seq = excluded.seq, size = excluded.size",
            (self._job.no, self._name, self._seq, self._size),
        )

    def close(self) -> None:
        os.close(self._file)
