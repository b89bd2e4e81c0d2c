"""The ledger's statements for SQLite, where a writing transaction locks the whole database from its start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from headway._sql import Database, Row, Tx, Value, marks
from headway.ledger.store import items
from headway.ledger.store.contract import NewRow, Prior, TriedBefore
from headway.ledger.values import Done

#: Items per statement. Some builds of SQLite allow only 32,766 parameters.
PAGE = 1000

_ITEM = """\
SELECT i.idx, i.key, p.status, d.idx, p.lease_until, coalesce(p.attempts, 0), p.updated_at, p.seconds, p.worker, p.meta,
    p.next_attempt_at, i.payload, p.holder,
    coalesce(d.error, 'RetryLater: ' || w.reason,
        (SELECT a.error FROM attempts a WHERE a.job = i.job AND a.idx = i.idx ORDER BY a.no DESC LIMIT 1)),
    coalesce(d.cause, (SELECT a.cause FROM attempts a WHERE a.job = i.job AND a.idx = i.idx ORDER BY a.no DESC LIMIT 1))
FROM input_products i
LEFT JOIN progress p ON p.job = i.job AND p.idx = i.idx
LEFT JOIN dead_letters d ON d.job = i.job AND d.idx = i.idx
LEFT JOIN item_delays w ON w.job = p.job AND w.idx = p.idx AND w.until = p.next_attempt_at"""

# SQLite itself would assign the largest existing number plus one, which may be that of a deleted job.
_INSERT_JOB = """\
INSERT INTO jobs (no, id, function, source, keyed_by, max_retries, created_at, updated_at, retry_base, retry_factor,
    retry_cap, retry_jitter, origin)
SELECT max((SELECT coalesce(max(no), 0) FROM jobs),
    (SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM meta WHERE name = 'last_forgotten')) + 1,
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, value
FROM meta WHERE name = 'database' ON CONFLICT (id) DO NOTHING"""

_RETIRE_NUMBER = """\
INSERT INTO meta (name, value) VALUES ('last_forgotten', ?) ON CONFLICT (name) DO UPDATE SET
    value = max(CAST(value AS INTEGER), CAST(excluded.value AS INTEGER))"""

_INSERT_ITEM = """\
INSERT INTO input_products (job, idx, key, payload, fingerprint) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (job, idx) DO NOTHING"""

_COUNT_UNTRIED = """\
SELECT count(*) FROM input_products i
WHERE NOT EXISTS (SELECT 1 FROM progress p WHERE p.job = i.job AND p.idx = i.idx) AND i.job = ? AND i.idx IN ({marks})"""

_INSERT_ONE_DONE = """\
INSERT INTO progress (job, idx, status, meta, updated_at, seconds, worker)
SELECT job, idx, 'done', ?, ?, ?, ? FROM input_products WHERE job = ? AND idx = ?
ON CONFLICT (job, idx) DO NOTHING"""

# Changes no row if the success would finish the job or open a new minute: `JobRow` handles both.
_COUNT_ONE_DONE = """\
UPDATE jobs SET version = version + 1, total = total + ?, done = done + 1, minute_done = minute_done + 1,
    minute_seconds = minute_seconds + ?, updated_at = ?
WHERE no = ? AND minute = ? AND finished_at IS NULL AND archived = 0 AND (sealed = 0 OR done + dead + 1 < total + ?)"""

_PRIOR = """\
SELECT i.idx, i.key, p.status, coalesce(p.attempts, 0), p.token, p.lease_until, d.idx IS NOT NULL
FROM input_products i
LEFT JOIN progress p ON p.job = i.job AND p.idx = i.idx
LEFT JOIN dead_letters d ON d.job = i.job AND d.idx = i.idx
WHERE i.job = ? AND i.idx IN ({marks})"""


class SQLiteItems:
    """Implements `headway.ledger.store.contract.ItemStore`."""

    item_query = _ITEM

    def insert_job(self, tx: Tx, values: Sequence[Value]) -> None:
        tx.execute(_INSERT_JOB, values)

    def retire_number(self, tx: Tx, job: int) -> None:
        tx.execute(_RETIRE_NUMBER, (str(job),))

    def insert_items(self, tx: Tx, rows: Sequence[NewRow]) -> int:
        return tx.insert(_INSERT_ITEM, rows)

    def insert_done(self, tx: Tx, job: int, now: float, outcomes: Sequence[Done]) -> bool:
        indices = [outcome.idx for outcome in outcomes]
        if len(set(indices)) < len(indices):
            return False
        for page in _pages(indices):
            if tx.one(_COUNT_UNTRIED.format(marks=marks(len(page))), (job, *page)) != (len(page),):
                return False
        items.put_done(tx, job, now, outcomes)
        return True

    def record_one(self, database: Database, job: int, outcome: Done, *, register: bool) -> bool:
        def work(tx: Tx) -> None:
            now = time.time()
            row = (outcome.meta, now, outcome.seconds, outcome.worker, job, outcome.idx)
            fresh, new = tx.execute(_INSERT_ONE_DONE, row), 0
            if not fresh and register:
                new = tx.execute(items.REGISTER, (job, outcome.idx))
                fresh = tx.execute(_INSERT_ONE_DONE, row) if new else 0
            counts = (new, outcome.seconds or 0.0, now, job, int(now // 60), new)
            if not fresh or not tx.execute(_COUNT_ONE_DONE, counts):
                raise TriedBefore

        try:
            database.run(work, operation="record")
        except TriedBefore:
            return False
        return True

    def prior_states(self, tx: Tx, job: int, indices: Sequence[int]) -> dict[int, Prior]:
        found = {}
        for page in _pages(indices):
            for idx, *state in tx.all(_PRIOR.format(marks=marks(len(page))), (job, *page)):
                found[idx] = Prior(*state)
        return found

    def progress_at(self, tx: Tx, columns: str, job: int, indices: Sequence[int]) -> list[Row]:
        among = marks(len(indices))
        return tx.all(f"SELECT {columns} FROM progress WHERE job = ? AND idx IN ({among})", (job, *indices))


def _pages(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    return (indices[start : start + PAGE] for start in range(0, len(indices), PAGE))
