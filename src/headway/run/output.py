"""Results in a file, one JSON object a line, each exactly once however often the run was killed.

The ledger's table ``results`` is the truth. The file is its copy. The ledger notes that the file is this job's before
the file is touched, so that a run killed at any moment after that finds its own file again. Lines are appended and
synced first, then the ledger notes how far that is. What stands in the file beyond the noted size was written by a run
that died before the note: it is cut off and written again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from headway._sql import Tx
from headway.errors import InvalidInput, StorageError
from headway.ledger import Job, Ledger

#: How every line begins, and so every file of ours.
_HEAD = b'{"index": '

_OTHER_FORMATS = (".csv", ".tsv", ".xlsx", ".parquet")


def refuse_foreign(path: Path, ledger: Ledger | None, id: str) -> None:
    """A file with something in it that job ``id`` did not write is not touched. What an earlier job of that id wrote,
    which was put aside by a fresh start, is the job's own: its results are still in the ledger."""
    if path.suffix.lower() in _OTHER_FORMATS:
        raise InvalidInput(
            f"Results are written as JSON lines, not as {path.suffix[1:].upper()}.", hint=f"Name it {path.stem}.jsonl"
        )
    try:
        if not path.absolute().parent.is_dir():
            raise InvalidInput(f"The directory of {path} does not exist.", hint="Make it, or name another --output.")
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{path} is not a file.", hint="Name another --output.")
        filled = path.exists() and path.stat().st_size > 0
        if filled and not _is_ours(path, ledger, id):
            raise InvalidInput(
                f"{path} exists and was not written by this job.", hint="Move it away or name another --output."
            )
    except OSError as error:
        raise InvalidInput(f"The results cannot be written to {path}: {error.strerror}.") from error


def _is_ours(path: Path, ledger: Ledger | None, id: str) -> bool:
    if ledger is None:
        return False
    rows = ledger.database.all(
        "SELECT j.id, j.archived FROM outputs o JOIN jobs j ON j.no = o.job WHERE o.path = ?", (str(path.resolve()),)
    )
    noted = bool(rows) and all(name == id or (archived and name.startswith(f"{id[:100]}.")) for name, archived in rows)
    # The note comes before the first line: somebody may have put another file there since. What a power cut left of our
    # first line is a part of it, or nothing but zeros.
    with path.open("rb") as file:
        head = file.read(len(_HEAD))
    return noted and (_HEAD.startswith(head) or not head.strip(b"\0"))


def refuse_incomplete(job: Job) -> None:
    """Refuse to write a file that would lack the results of items which were done while nobody asked to keep them."""
    done = job.info().done
    row = job.database.one("SELECT count(*) FROM results WHERE job = ?", (job.no,))
    missing = done - (row[0] if row else 0)
    if missing > 0:
        raise InvalidInput(
            f"Job {job.id} has {done:,} done items, and the results of {missing:,} of them were not kept, because it ran "
            "without --output then.",
            hint="Go on without --output, or start over with --fresh.",
        )


def keeps_results(job: Job) -> bool:
    """Whether the job has ever written results to a file: then it goes on keeping them."""
    return job.database.one("SELECT 1 FROM outputs WHERE job = ? LIMIT 1", (job.no,)) is not None


class Output:
    """``{"index": 17, "key": "inv-00421", "result": ...}`` per done item, in the order they were done."""

    def __init__(self, job: Job, path: Path, *, every: float = 1.0) -> None:
        self._job = job
        self._path = path
        self._name = str(path.resolve())
        self._every = every
        self._written_at = time.monotonic()
        row = job.database.one("SELECT seq, size FROM outputs WHERE job = ? AND path = ?", (job.no, self._name))
        self._seq, self._size = row or (0, 0)
        if row is None:
            job.database.run(self._note, operation="output")  # before the file is touched: from now on it is ours
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._file).st_size < self._size:  # shortened or removed by somebody: write it anew
                self._seq, self._size = 0, 0
            os.ftruncate(self._file, self._size)
        except OSError as error:
            raise InvalidInput(f"The results cannot be written to {path}: {error.strerror}.") from error

    def write_sometimes(self) -> None:
        if time.monotonic() - self._written_at >= self._every:
            self.write()

    def write(self) -> None:
        """Bring the file up to what is recorded."""
        self._written_at = time.monotonic()
        while rows := self._job.results(self._seq):
            lines = "".join(
                f'{{"index": {idx}, "key": {json.dumps(key, ensure_ascii=False)}, "result": {result}}}\n'
                for _, idx, key, result in rows
            ).encode()
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

    def _note(self, tx: Tx) -> None:
        tx.execute(
            "INSERT INTO outputs (job, path, seq, size) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (job, path) DO UPDATE SET seq = excluded.seq, size = excluded.size",
            (self._job.no, self._name, self._seq, self._size),
        )

    def close(self) -> None:
        os.close(self._file)
