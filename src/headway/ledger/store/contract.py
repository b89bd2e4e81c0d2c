"""The contract of the statements whose best form differs between the engines.

`headway.ledger.store.sqlite` and `headway.ledger.store.postgres` implement it. Every other statement of the ledger is
written once, in the other modules of this package. A method with a ``tx`` runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from headway._sql import Database, Engine, Row, Tx, Value
from headway.ledger.values import Done

#: A row of ``input_products``: job, idx, key, payload, fingerprint.
NewRow = tuple[int, int, str | None, str | None, int | None]


class Prior(NamedTuple):
    """The state of an item before an outcome is recorded. ``status`` is None if the item was never tried."""

    key: str | None
    status: str | None
    attempts: int
    token: int | None
    lease_until: float | None
    dead: bool  # 0 or 1 on SQLite


class TriedBefore(Exception):
    """`ItemStore.insert_done` wrote some rows of a batch that also has tried items. The caller must roll back."""


class ItemStore(Protocol):
    """Engine-specific statements of the ledger."""

    @property
    def item_query(self) -> str:
        """A SELECT of items ``i`` with their progress ``p`` and dead letter ``d``, without its WHERE clause.

        Columns: idx, key, status, dead letter's idx, lease_until, attempts, updated_at, seconds, worker, meta,
        next_attempt_at, payload, holder, error, cause.
        """
        ...

    def insert_job(self, tx: Tx, values: Sequence[Value]) -> None:
        """Insert a job's row, unless its id exists.

        Numbers are never reused: a process may still have a deleted job. ``values``: id, function, source, keyed_by,
        max_retries, created_at, updated_at, retry_base, retry_factor, retry_cap, retry_jitter.
        """
        ...

    def retire_number(self, tx: Tx, job: int) -> None:
        """Ensure that the number of a job that is about to be deleted is not used again."""
        ...

    def insert_items(self, tx: Tx, rows: Sequence[NewRow]) -> int:
        """Insert items that are not registered yet. Return how many."""
        ...

    def insert_done(self, tx: Tx, job: int, now: float, outcomes: Sequence[Done]) -> bool:
        """Record successes of distinct, registered items that were never tried, in as few statements as possible.

        Returns False, with nothing written, for any other batch. May raise `TriedBefore` instead. The caller holds the
        lock of the job's row, or of the rows of the items' blocks.
        """
        ...

    def record_one(self, database: Database, job: int, outcome: Done, *, register: bool) -> bool:
        """Record the success of one untried item, together with the counters, without reading the job's row.

        Returns False, with nothing written, if the item was tried before, if the success would finish the job, or if
        the engine cannot do it safely. ``register`` inserts an unknown item.
        """
        ...

    def prior_states(self, tx: Tx, job: int, indices: Sequence[int]) -> dict[int, Prior]:
        """Return the state of each registered item among ``indices``."""
        ...

    def progress_at(self, tx: Tx, columns: str, job: int, indices: Sequence[int]) -> list[Row]:
        """Return ``columns`` of the progress rows at ``indices``. Each row is found by its key."""
        ...


@lru_cache
def item_store(engine: Engine) -> ItemStore:
    """Return the statements for an engine."""
    if engine == "sqlite":
        from headway.ledger.store.sqlite import SQLiteItems

        return SQLiteItems()
    from headway.ledger.store.postgres import PostgresItems

    return PostgresItems()
