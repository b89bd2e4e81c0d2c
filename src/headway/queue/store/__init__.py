"""The task store: what SQLite and PostgreSQL do with different statements.

`headway.queue.store.sqlite` and `headway.queue.store.postgres` implement the protocol. The modules `insert`, `claim` and
`complete` have the rules that both engines share, and call it. Nothing above this package knows an engine or writes SQL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headway._sql import Database, Row, Tx
from headway.queue.task import Claim, NewTask, Priority, Task

if TYPE_CHECKING:
    from headway.queue.store.claim import Claimant
    from headway.queue.store.complete import Success


class ClaimCheck(NamedTuple):
    """What a claim needs to know first, read by one query."""

    now: float
    paused: set[Priority]
    is_limited: bool  # there are concurrency or rate limits
    is_due: bool  # delayed tasks have become ready
    is_held: bool  # there are holds of kinds


class Wakeups(Protocol):
    """Waits for tasks that other processes submit."""

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Return when tasks may be claimable, when ``stop`` is set, or after ``seconds``."""
        ...

    def close(self) -> None: ...


class TaskStore(Protocol):
    """Statements on task rows that differ by engine. An implementation has no state.

    Verbs that take a ``database`` are one transaction and may be repeated after a lost reply. PostgreSQL sends each of them
    in one round trip if possible. Verbs that take a ``tx`` are part of the caller's transaction.
    """

    def submit(self, database: Database, tasks: Sequence[NewTask], *, per_user: int | None, hinted: bool) -> list[Task]:
        """Run `insert.submit`."""
        ...

    def claim(
        self, database: Database, who: Claimant, *, queues: Sequence[Priority], limit: int, unhinted: bool
    ) -> list[Claim]:
        """Run `claim.claim`; it may be sent again, see `claim.claim_next`."""
        ...

    def complete(self, database: Database, successes: Sequence[Success]) -> dict[str, Task]:
        """Run `complete_in`."""
        ...

    def complete_and_claim(
        self, database: Database, successes: Sequence[Success], who: Claimant, *, queues: Sequence[Priority], limit: int
    ) -> tuple[set[str], list[Claim]]:
        """Complete every claim of a worker and claim its next tasks; return (ids of the completed tasks, claims)."""
        ...

    def check_claim(self, tx: Tx) -> ClaimCheck:
        """Read what a claim needs to know first."""
        ...

    def claim_ready(
        self, tx: Tx, who: Claimant, *, queues: Sequence[Priority], limit: int, unhinted: bool
    ) -> list[Row]:
        """Claim ready tasks, ignoring limits, and append their events; return the columns `claim.CLAIMED`."""
        ...

    def claim_numbers(self, tx: Tx, who: Claimant, numbers: Sequence[int]) -> list[Row]:
        """Claim the rows with these numbers, which the transaction has locked; otherwise like `claim_ready`."""
        ...

    def complete_in(self, tx: Tx, successes: Sequence[Success]) -> dict[str, Task]:
        """Record successes, events and counters; return the tasks by id. Claims with a stale token are left out."""
        ...

    def append_events(self, tx: Tx, ids: Iterable[str]) -> None:
        """Append the event of the last change of each task."""
        ...

    def restart_leases(self, tx: Tx, holders: Sequence[tuple[str | None, int]], seconds: float) -> None:
        """Restart the lease of running rows; ``holders`` are (holder, number)."""
        ...

    def notify(self, tx: Tx) -> None:
        """Wake workers that wait with `wakeups` when the transaction commits."""
        ...

    def counter_share(self, tx: Tx) -> int:
        """Return a share of the minute counters for this connection alone, for a transaction that may last long."""
        ...

    def wakeups(self, database: Database) -> Wakeups:
        """Return an object that waits for new tasks."""
        ...


def task_store(of: Database | Tx) -> TaskStore:
    """Return the implementation for the engine of a database or transaction."""
    # Imported here because both implementations import the shared rules, which call this function.
    if of.engine == "postgresql":
        from headway.queue.store import postgres

        return postgres.STORE
    from headway.queue.store import sqlite

    return sqlite.STORE
