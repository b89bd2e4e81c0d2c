"""The ledger's statements for PostgreSQL.

Bulk writes pass each column as one array parameter, which ``unnest`` expands into rows. Separate parameters per row cost
the driver more time than the server needs for the insert. The arrays are encoded as text, so the driver sends a handful
of strings for any number of rows.

Reads of many items use ``LATERAL (… LIMIT 1)``, which forces one lookup by key per item. Without statistics (a table
that was just filled) the planner might execute a plain join as a scan of the whole job, or as a nested loop over the
batch. ``tests/ledger/test_query_plans.py`` measures the rows that every statement reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway._sql import Database, Row, Tx, Value, array
from headway.ledger.store.contract import NewRow, Prior, TriedBefore
from headway.ledger.values import Done

_ITEM = """\
SELECT i.idx, i.key, p.status, d.idx, p.lease_until, coalesce(p.attempts, 0), p.updated_at, p.seconds, p.worker, p.meta,
    p.next_attempt_at, i.payload, p.holder,
    coalesce(d.error, 'RetryLater: ' || w.reason,
        (SELECT a.error FROM attempts a WHERE a.job = i.job AND a.idx = i.idx ORDER BY a.no DESC LIMIT 1)),
    coalesce(d.cause, (SELECT a.cause FROM attempts a WHERE a.job = i.job AND a.idx = i.idx ORDER BY a.no DESC LIMIT 1))
FROM input_products i
LEFT JOIN LATERAL (SELECT * FROM progress o WHERE o.job = i.job AND o.idx = i.idx LIMIT 1) p ON true
LEFT JOIN LATERAL (SELECT * FROM dead_letters o WHERE o.job = i.job AND o.idx = i.idx LIMIT 1) d ON true
LEFT JOIN LATERAL (SELECT * FROM item_delays o WHERE o.job = p.job AND o.idx = p.idx AND o.until = p.next_attempt_at LIMIT 1) w
    ON true"""

_INSERT_JOB = """\
INSERT INTO jobs (id, function, source, keyed_by, max_retries, created_at, updated_at, retry_base, retry_factor,
    retry_cap, retry_jitter, origin)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, value FROM meta WHERE name = 'database' ON CONFLICT (id) DO NOTHING"""

_INSERT_ITEMS = """\
INSERT INTO input_products (job, idx, key, payload, fingerprint)
SELECT ?, u.idx, u.key, u.payload, u.fingerprint
FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[]), CAST(? AS TEXT[]), CAST(? AS BIGINT[]))
    AS u (idx, key, payload, fingerprint)
ON CONFLICT (job, idx) DO NOTHING"""

# The BETWEEN bounds the range: without statistics PostgreSQL would otherwise read the whole job.
_INSERT_DONE = """\
INSERT INTO progress (job, idx, status, meta, updated_at, seconds, worker, unkept)
SELECT i.job, i.idx, 'done', u.meta, CAST(? AS DOUBLE PRECISION), u.seconds, u.worker, u.unkept
FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[]), CAST(? AS DOUBLE PRECISION[]), CAST(? AS TEXT[]),
    CAST(? AS INTEGER[])) AS u (idx, meta, seconds, worker, unkept)
JOIN input_products i ON i.job = ? AND i.idx = u.idx AND i.idx BETWEEN ? AND ?
ON CONFLICT (job, idx) DO NOTHING"""

_PUT_RESULTS = """\
INSERT INTO results (job, idx, result)
SELECT ?, u.idx, u.result FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[])) AS u (idx, result)
ON CONFLICT (job, idx) DO UPDATE SET result = excluded.result"""

_PUT_PRINTED = """\
INSERT INTO printed (job, idx, text)
SELECT ?, u.idx, u.text FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[])) AS u (idx, text)
ON CONFLICT (job, idx) DO UPDATE SET text = excluded.text"""

_PRIOR = """\
SELECT i.idx, i.key, p.status, coalesce(p.attempts, 0), p.token, p.lease_until, d.idx IS NOT NULL
FROM unnest(CAST(? AS BIGINT[])) AS wanted (at)
CROSS JOIN LATERAL (SELECT job, idx, key FROM input_products WHERE job = ? AND idx = wanted.at LIMIT 1) i
LEFT JOIN LATERAL (SELECT * FROM progress o WHERE o.job = i.job AND o.idx = i.idx LIMIT 1) p ON true
LEFT JOIN LATERAL (SELECT o.idx FROM dead_letters o WHERE o.job = i.job AND o.idx = i.idx LIMIT 1) d ON true"""


class PostgresItems:
    """Implements `headway.ledger.store.contract.ItemStore`."""

    item_query = _ITEM

    def insert_job(self, tx: Tx, values: Sequence[Value]) -> None:
        tx.execute(_INSERT_JOB, values)

    def retire_number(self, tx: Tx, job: int) -> None:
        """Do nothing: the sequence never returns a number twice."""

    def insert_items(self, tx: Tx, rows: Sequence[NewRow]) -> int:
        jobs, *columns = zip(*rows, strict=True)
        return tx.execute(_INSERT_ITEMS, (jobs[0], *map(array, columns)))

    def insert_done(self, tx: Tx, job: int, now: float, outcomes: Sequence[Done]) -> bool:
        indices = [outcome.idx for outcome in outcomes]
        columns = (
            array(indices),
            array([outcome.meta for outcome in outcomes]),
            array([outcome.seconds for outcome in outcomes]),
            array([outcome.worker for outcome in outcomes]),
            array([1 if outcome.unkept else None for outcome in outcomes]),
        )
        if tx.execute(_INSERT_DONE, (now, *columns, job, min(indices), max(indices))) != len(indices):
            raise TriedBefore
        results = [(outcome.idx, outcome.result) for outcome in outcomes if outcome.result is not None]
        if results:
            tx.execute(_PUT_RESULTS, (job, *map(array, zip(*results, strict=True))))
        printed = [(outcome.idx, outcome.printed) for outcome in outcomes if outcome.printed is not None]
        if printed:
            tx.execute(_PUT_PRINTED, (job, *map(array, zip(*printed, strict=True))))
        return True

    def record_one(self, database: Database, job: int, outcome: Done, *, register: bool) -> bool:
        """Return False: writing an item before locking its job's row could deadlock with the opposite order."""
        return False

    def prior_states(self, tx: Tx, job: int, indices: Sequence[int]) -> dict[int, Prior]:
        return {idx: Prior(*state) for idx, *state in tx.all(_PRIOR, (array(indices), job))}

    def progress_at(self, tx: Tx, columns: str, job: int, indices: Sequence[int]) -> list[Row]:
        return tx.all(
            "SELECT p.* FROM unnest(CAST(? AS BIGINT[])) AS wanted (at) CROSS JOIN LATERAL "
            f"(SELECT {columns} FROM progress WHERE job = ? AND idx = wanted.at LIMIT 1) AS p",
            (array(indices), job),
        )
