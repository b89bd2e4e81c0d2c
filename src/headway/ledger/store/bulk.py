"""Bulk inserts on PostgreSQL: each column is one array parameter, which ``unnest`` expands into rows.

Separate parameters per row cost the driver more time than the server needs for the insert. The arrays are encoded as
text, so the driver sends a handful of strings for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway._sql import Tx, array
from headway.ledger.values import Done

_PUT_NEW_DONE = (
    "INSERT INTO progress (job, idx, status, meta, updated_at, seconds, worker, unkept) "
    "SELECT i.job, i.idx, 'done', u.meta, CAST(? AS DOUBLE PRECISION), u.seconds, u.worker, u.unkept "
    "FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[]), CAST(? AS DOUBLE PRECISION[]), CAST(? AS TEXT[]), "
    "CAST(? AS INTEGER[])) AS u (idx, meta, seconds, worker, unkept) "
    # The BETWEEN bounds the range: without statistics PostgreSQL would otherwise read the whole job.
    "JOIN input_products i ON i.job = ? AND i.idx = u.idx AND i.idx BETWEEN ? AND ? "
    "ON CONFLICT (job, idx) DO NOTHING"
)
_PUT_RESULTS = (
    "INSERT INTO results (job, idx, result) SELECT ?, u.idx, u.result "
    "FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[])) AS u (idx, result) "
    "ON CONFLICT (job, idx) DO UPDATE SET result = excluded.result"
)
_PUT_PRINTED = (
    "INSERT INTO printed (job, idx, text) SELECT ?, u.idx, u.text "
    "FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[])) AS u (idx, text) "
    "ON CONFLICT (job, idx) DO UPDATE SET text = excluded.text"
)
_PUT_ITEMS = (
    "INSERT INTO input_products (job, idx, key, payload, fingerprint) "
    "SELECT ?, u.idx, u.key, u.payload, u.fingerprint FROM unnest(CAST(? AS BIGINT[]), CAST(? AS TEXT[]), "
    "CAST(? AS TEXT[]), CAST(? AS BIGINT[])) AS u (idx, key, payload, fingerprint) "
    "ON CONFLICT (job, idx) DO NOTHING"
)


def put_new_done(tx: Tx, job: int, now: float, outcomes: Sequence[Done]) -> bool:
    """Record untried items as done.

    Returns False if one was tried before, is not registered, or is given twice. Only some rows were written then, and
    the caller must roll the transaction back.
    """
    indices = [outcome.idx for outcome in outcomes]
    columns = (
        array(indices),
        array([outcome.meta for outcome in outcomes]),
        array([outcome.seconds for outcome in outcomes]),
        array([outcome.worker for outcome in outcomes]),
        array([1 if outcome.unkept else None for outcome in outcomes]),
    )
    if tx.execute(_PUT_NEW_DONE, (now, *columns, job, min(indices), max(indices))) != len(indices):
        return False
    returned = [outcome for outcome in outcomes if outcome.result is not None]
    if returned:
        tx.execute(_PUT_RESULTS, (job, array([o.idx for o in returned]), array([o.result for o in returned])))
    printed = [outcome for outcome in outcomes if outcome.printed is not None]
    if printed:
        tx.execute(_PUT_PRINTED, (job, array([o.idx for o in printed]), array([o.printed for o in printed])))
    return True


def put_items(tx: Tx, job: int, rows: Sequence[tuple[int, int, str | None, str | None, int | None]]) -> int:
    """Register items (job, idx, key, payload, fingerprint). Return how many are new."""
    _, indices, keys, payloads, marks = zip(*rows, strict=True)
    return tx.execute(_PUT_ITEMS, (job, array(indices), array(keys), array(payloads), array(marks)))
