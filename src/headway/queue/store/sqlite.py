"""The task store on SQLite. A transaction that writes locks the whole database, so no statement locks rows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import groupby

from headway._sql import Database, Row, Tx
from headway.queue.store import ClaimCheck, insert
from headway.queue.store import claim as claims
from headway.queue.store.claim import CLAIM_VALUES, CLAIMED, DELAYED_DUE, Claimant, claim_values
from headway.queue.store.complete import COMPLETE_VALUES, Success
from headway.queue.store.tasks import COLUMNS, count_minutes, event_insert, pages, task_of
from headway.queue.task import Claim, NewTask, Priority, Task

_NOW = "(julianday('now') - 2440587.5) * 86400.0"
#: Seconds between two reads of the file's change counter.
_POLL_SECONDS = 0.1

_CHECK = (
    f"SELECT {_NOW}, EXISTS (SELECT 1 FROM task_limits), {DELAYED_DUE.format(now=_NOW)}, "
    "EXISTS (SELECT 1 FROM task_holds), q.name, q.paused_until FROM (SELECT 1) AS one LEFT JOIN task_queues q ON q.paused = 1"
)
# The queues are literals: only then does SQLite read the index in the order of service and stop at the limit.
_CLAIM_READY = f"""
WITH picked AS MATERIALIZED (
    SELECT no AS picked_no FROM tasks
    WHERE status = 'QUEUED' AND ready = 1 AND place IN ({{places}}) AND kind IN (SELECT value FROM json_each(?)){{hinted}}
    ORDER BY place, turn, no LIMIT ?
)
UPDATE tasks SET {CLAIM_VALUES.format(now=_NOW)} FROM picked WHERE no = picked_no RETURNING {CLAIMED}
"""
_CLAIM_NUMBERS = f"""
UPDATE tasks SET {CLAIM_VALUES.format(now=_NOW)} WHERE no IN (SELECT value FROM json_each(?)) RETURNING {CLAIMED}
"""
_COMPLETE = f"""
WITH given AS MATERIALIZED (
    SELECT json_extract(value, '$[0]') AS given_no, json_extract(value, '$[1]') AS given_token,
           json_extract(value, '$[2]') AS given_result, json_extract(value, '$[3]') AS given_message
    FROM json_each(?)
)
UPDATE tasks SET {COMPLETE_VALUES.format(now=_NOW)} FROM given
WHERE no = given_no AND token = given_token AND holder IS NOT NULL
RETURNING {COLUMNS}
"""
_APPEND_EVENTS = event_insert("json_object", "tasks WHERE id IN (SELECT value FROM json_each(?)) ORDER BY no")
_RESTART_LEASES = f"UPDATE tasks SET lease_until = {_NOW} + ?, holder = ? WHERE no = ?"


class _SqliteTasks:
    """`TaskStore` on SQLite. A statement costs no round trip, so every verb is a plain transaction."""

    def submit(self, database: Database, tasks: Sequence[NewTask], *, per_user: int | None, hinted: bool) -> list[Task]:
        return database.run(
            lambda tx: insert.submit(tx, tasks, per_user=per_user, hinted=hinted), operation="queue.submit"
        )

    def claim(
        self, database: Database, who: Claimant, *, queues: Sequence[Priority], limit: int, unhinted: bool
    ) -> list[Claim]:
        return database.run(
            lambda tx: claims.claim(tx, who, queues=queues, limit=limit, unhinted=unhinted), operation="queue.claim"
        )

    def complete(self, database: Database, successes: Sequence[Success]) -> dict[str, Task]:
        return database.run(lambda tx: self.complete_in(tx, successes), operation="queue.settle")

    def complete_and_claim(
        self, database: Database, successes: Sequence[Success], who: Claimant, *, queues: Sequence[Priority], limit: int
    ) -> tuple[set[str], list[Claim]]:
        def work(tx: Tx) -> tuple[set[str], list[Claim]]:
            return set(self.complete_in(tx, successes)), claims.claim(tx, who, queues=queues, limit=limit)

        return database.run(work, operation="queue.settle")

    def check_claim(self, tx: Tx) -> ClaimCheck:
        return claims.claim_check(tx.all(_CHECK))

    def claim_ready(
        self, tx: Tx, who: Claimant, *, queues: Sequence[Priority], limit: int, unhinted: bool
    ) -> list[Row]:
        statement = _CLAIM_READY.format(
            places=", ".join(str(queue.place) for queue in queues), hinted=" AND hinted_at IS NULL" if unhinted else ""
        )
        return self._claimed(tx, tx.all(statement, (json.dumps(who.kinds), limit, *claim_values(who))))

    def claim_numbers(self, tx: Tx, who: Claimant, numbers: Sequence[int]) -> list[Row]:
        return self._claimed(tx, tx.all(_CLAIM_NUMBERS, (*claim_values(who), json.dumps(numbers))))

    def _claimed(self, tx: Tx, rows: list[Row]) -> list[Row]:
        self.append_events(tx, [row[1] for row in rows])
        return rows

    def complete_in(self, tx: Tx, successes: Sequence[Success]) -> dict[str, Task]:
        given = json.dumps([[done.claim.no, done.claim.token, done.result, done.message] for done in successes])
        tasks = {task.id: task for task in map(task_of, tx.all(_COMPLETE, (given,)))}
        self.append_events(tx, tasks)
        recorded = sorted((done for done in successes if done.claim.id in tasks), key=_queue_and_kind)
        for _, group in groupby(recorded, key=_queue_and_kind):
            same = list(group)
            ended = [tasks[done.claim.id] for done in same]
            count_minutes(
                tx, ended[0].updated_at.timestamp(), completed=ended,
                wait_seconds=sum(done.claim.waited for done in same), run_seconds=sum(done.seconds for done in same),
            )  # fmt: skip
        return tasks

    def append_events(self, tx: Tx, ids: Iterable[str]) -> None:
        for page in pages(list(ids)):
            tx.execute(_APPEND_EVENTS, (json.dumps(page),))

    def restart_leases(self, tx: Tx, holders: Sequence[tuple[str | None, int]], seconds: float) -> None:
        tx.executemany(_RESTART_LEASES, [(seconds, holder, no) for holder, no in holders])

    def notify(self, tx: Tx) -> None:
        """Nothing: `wakeups` sees every commit."""

    def counter_share(self, tx: Tx) -> int:
        return 16  # the whole database is locked, so one share is enough

    def wakeups(self, database: Database) -> _FileChanges:
        return _FileChanges(database)


STORE = _SqliteTasks()


def _queue_and_kind(done: Success) -> tuple[Priority, str]:
    return done.claim.priority, done.claim.kind


class _FileChanges:
    """Polls the file's change counter, which reads one page."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: int | None = None

    def wait(self, seconds: float, stop: threading.Event) -> None:
        deadline = time.monotonic() + seconds
        while not stop.is_set() and time.monotonic() < deadline:
            row = self._database.one("PRAGMA data_version")
            # The counter is one of a connection, and the pool may give any of ours: only a difference means a change.
            if row is not None and row[0] != self._seen:
                self._seen = row[0]
                return
            stop.wait(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def close(self) -> None: ...
