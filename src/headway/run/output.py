"""Results in a file, one JSON object a line, each exactly once however often the run was killed.

The ledger's table ``results`` is the truth. The file is its copy: lines are appended and synced first, then the ledger
notes how far that is. What stands in the file beyond the noted size was written by a run that died before the note:
it is cut off and written again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from headway._sql import Tx
from headway.errors import InvalidInput, StorageError
from headway.ledger import Job


def refuse_foreign(path: Path, job: Job | None) -> None:
    """A file with something in it that this job did not write is not touched."""
    try:
        filled = path.exists() and path.stat().st_size > 0
        if not path.absolute().parent.is_dir():
            raise InvalidInput(f"The directory of {path} does not exist.", hint="Make it, or name another --output.")
    except OSError as error:
        raise InvalidInput(f"The results cannot be written to {path}: {error.strerror}.") from error
    sql = "SELECT 1 FROM outputs WHERE job = ? AND path = ?"
    if filled and (job is None or job.database.one(sql, (job.no, str(path.resolve()))) is None):
        raise InvalidInput(
            f"{path} exists and was not written by this job.", hint="Move it away or name another --output."
        )


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
