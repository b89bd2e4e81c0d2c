"""Accept new tasks: assign each one a free slot of its user and a turn in its queue.

Every function works inside the caller's transaction. A unique index guards the user slots. When two transactions take the
same slot, the loser retries. `headway.queue.store.postgres` has a faster path for simple cases.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway._sql import Database, Tx, Value, marks
from headway.errors import InvalidInput, StorageError
from headway.queue.store import task_store
from headway.queue.store.tasks import COLUMNS, NO_TURN, count_minutes, get, pages, read, task_of
from headway.queue.task import NewTask, Priority, Status, Task, TaskConflict, UserBusy

#: Rows per INSERT statement.
ROWS_TOGETHER = 100

_INSERT = (
    "INSERT INTO tasks (id, kind, queue, place, turn, party, status, ready, user_id, slot, role, payload, fingerprint, "
    "retries, retry_delay, timeout, run_at, created_at, updated_at, hinted_at) VALUES "
)
_ROW = "(?, ?, ?, ?, ?, ?, 'QUEUED', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def submit_alone(database: Database, tasks: Sequence[NewTask], *, per_user: int | None, hinted: bool) -> list[Task]:
    """Run `submit` in its own transaction, which may be sent again when its reply was lost."""
    return task_store(database).submit(database, tasks, per_user=per_user, hinted=hinted)


def submit(
    tx: Tx, tasks: Sequence[NewTask], *, per_user: int | None, hinted: bool = False, share: int | None = None,
    notify: bool = True,
) -> list[Task]:  # fmt: skip
    """Insert tasks, all or none. An existing task with the same user, kind and payload is returned unchanged.

    ``hinted``: the caller will send the RQ hints. The rows are marked as hinted in advance, because a second commit would
    double the cost of a submission. If the caller dies first, the sweeper notices the missing hint and sends it.
    ``share``: see `count_minutes`. ``notify``: wake workers that listen to the database; the others poll every second.

    Raises `UserBusy` if a user would have more than ``per_user`` active tasks. Raises `TaskConflict` if a task with the
    same id has another user, kind or payload.
    """
    now = tx.now()
    turns = _Turns(tx, tasks)
    found: dict[str, Task] = {}
    new: set[str] = set()
    left = list({task.id: task for task in tasks}.values())
    if len(left) < len(tasks):
        raise InvalidInput("Two tasks of one call have the same id.", hint="Give each its own, or none.")
    while left:
        # Another transaction may take a slot meanwhile; then retry. Each iteration inserts a task or raises.
        slots = _free_slots(tx, left, per_user)
        inserted = _insert(tx, [task for task in left if task.id in slots], slots, turns, now, hinted=hinted)
        new |= inserted
        left = [task for task in left if task.id not in inserted]
        known = _by_ids(tx, [task.id for task in left])
        for task in left:
            if task.id in known:
                found[task.id] = _same(task, *known[task.id])
            elif task.id not in slots:
                raise _user_busy(tx, task, per_user)
        left = [task for task in left if task.id not in found]
    added = {task.id: task for task in read(tx, new)}
    store = task_store(tx)
    store.append_events(tx, added)
    count_minutes(tx, now, submitted=added.values(), share=share)
    if added and notify and not hinted:
        store.notify(tx)
    return [added.get(task.id) or found[task.id] for task in tasks]


class _Turns:
    """Assigns turns. Tasks of one party get consecutive turns, and a new party starts in the current round.

    So one user's ten thousand tasks are not all served before another user's first.
    """

    def __init__(self, tx: Tx, tasks: Sequence[NewTask]) -> None:
        self._next: dict[tuple[Priority, str], int] = {}
        for priority in {task.priority for task in tasks}:
            parties = sorted({task.party for task in tasks if task.priority is priority})
            head = tx.one(
                "SELECT turn FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND place = ? ORDER BY place, turn, no LIMIT 1",
                (priority.place,),
            )
            current = int(head[0]) if head else 0
            last: dict[str, int] = {}
            for page in pages(parties):
                rows = tx.all(
                    "SELECT party, max(turn) FROM tasks WHERE status = 'QUEUED' AND queue = ? "
                    f"AND party IN ({marks(len(page))}) GROUP BY party",
                    (priority.value, *page),
                )
                last |= {party: int(turn) for party, turn in rows}
            for party in parties:
                self._next[priority, party] = max(current, last.get(party, current - 1) + 1)

    def turn(self, task: NewTask) -> int:
        if task.delay > 0:
            return NO_TURN
        turn = self._next[task.priority, task.party]
        self._next[task.priority, task.party] = turn + 1
        return turn


def _free_slots(tx: Tx, tasks: Sequence[NewTask], per_user: int | None) -> dict[str, int | None]:
    """Return a free user slot for each task id. Tasks without a free slot are left out."""
    if per_user is None:
        return dict.fromkeys((task.id for task in tasks), None)
    users = sorted({task.user_id for task in tasks if task.user_id is not None})
    taken: dict[str, set[int]] = {user: set() for user in users}
    for page in pages(users):
        for user, slot in tx.all(
            f"SELECT user_id, slot FROM tasks WHERE user_id IN ({marks(len(page))}) AND status IN ('QUEUED', 'RUNNING') "
            "AND slot IS NOT NULL",
            page,
        ):
            taken[user].add(slot)
    slots: dict[str, int | None] = {}
    for task in tasks:
        if task.user_id is None:
            slots[task.id] = None
            continue
        # Compare counts, not slot numbers: after the limit was lowered, some tasks hold slots above it.
        if len(taken[task.user_id]) < per_user:
            free = next(slot for slot in range(per_user) if slot not in taken[task.user_id])
            taken[task.user_id].add(free)
            slots[task.id] = free
    return slots


def _insert(
    tx: Tx, tasks: Sequence[NewTask], slots: dict[str, int | None], turns: _Turns, now: float, *, hinted: bool
) -> set[str]:
    inserted: set[str] = set()
    for start in range(0, len(tasks), ROWS_TOGETHER):
        page = tasks[start : start + ROWS_TOGETHER]
        values: list[Value] = []
        for task in page:
            values += (
                task.id, task.kind, task.priority.value, task.priority.place, turns.turn(task), task.party,
                int(task.delay <= 0), task.user_id, slots[task.id], task.role, task.payload, task.fingerprints[0],
                task.retries, task.retry_delay, task.timeout, now + max(0.0, task.delay), now, now,
                now if hinted and task.delay <= 0 else None,
            )  # fmt: skip
        rows = tx.all(f"{_INSERT}{', '.join([_ROW] * len(page))} ON CONFLICT DO NOTHING RETURNING id", values)
        inserted.update(id for (id,) in rows)
    return inserted


def _same(task: NewTask, known: Task, fingerprint: str) -> Task:
    """Return the existing task, or raise `TaskConflict` if it differs. The error reveals nothing about it."""
    if known.user_id != task.user_id or fingerprint not in task.fingerprints:
        raise TaskConflict(f"The id {task.id} belongs to another task: its user, kind or payload differ.")
    return known


def _user_busy(tx: Tx, task: NewTask, per_user: int | None) -> UserBusy:
    row = tx.one(
        "SELECT id, status FROM tasks WHERE user_id = ? AND status IN ('QUEUED', 'RUNNING') ORDER BY no LIMIT 1",
        (task.user_id,),
    )
    id, status = row or ("", "")
    return busy(task.user_id, per_user, id, status)


def busy(user_id: str | None, per_user: int | None, id: str, status: str) -> UserBusy:
    """Return the error for a user whose slots are all taken; ``id`` is one of the user's active tasks."""
    return UserBusy(f"User {user_id} has {_allowed(per_user)} already: {id} is {status}.", task_id=id)


#: Error texts raised by the triggers of `headway.queue.store.legacy_table`, followed by the table name.
LEGACY_BUSY, LEGACY_TAKEN = "headway legacy busy", "headway legacy taken"


def legacy_refusal(error: Exception, what: str, per_user: int | None) -> UserBusy | TaskConflict | None:
    """Return the refusal raised by a trigger of a followed table; None for any other error."""
    text = str(error)
    if LEGACY_BUSY in text:
        table = text.partition(f"{LEGACY_BUSY}: ")[2].split()[0].rstrip(".")
        return UserBusy(f"{what}: the user has {_allowed(per_user)} already, counting the rows of {table}.")
    if LEGACY_TAKEN in text:
        table = text.partition(f"{LEGACY_TAKEN}: ")[2].split()[0].rstrip(".")
        return TaskConflict(
            f"{what}: the row of {table} with this id no longer waits; an old worker has it.",
            hint="Leave it to the old worker, or use another id.",
        )
    return None


def is_duplicate(error: StorageError) -> bool:
    """Return whether a transaction failed because an id or a user slot was taken meanwhile."""
    return type(error.__cause__).__name__ == "UniqueViolation"


def _allowed(per_user: int | None) -> str:
    return "an active task" if per_user == 1 else f"{per_user} active tasks"


def _by_ids(tx: Tx, ids: Sequence[str]) -> dict[str, tuple[Task, str]]:
    found = {}
    for page in pages(ids):
        for row in tx.all(f"SELECT {COLUMNS}, fingerprint FROM tasks WHERE id IN ({marks(len(page))})", page):
            found[row[0]] = (task_of(row[:-1]), str(row[-1]))
    return found


def retry(tx: Tx, id: str, *, per_user: int | None) -> Task:
    """Queue a failed or cancelled task again with no attempts counted. Its user needs a free slot."""
    row = tx.one(f"SELECT no, status, user_id, kind, queue, slot, party FROM tasks WHERE id = ?{tx.for_update}", (id,))
    if row is None:
        return get(tx, id)
    no, status, user_id, kind, queue, slot, party = row
    if status not in (Status.FAILED, Status.CANCELLED):
        raise InvalidInput(f"Task {id} is {status}.", hint="Only a task that is FAILED or CANCELLED can be retried.")
    now = tx.now()
    again = NewTask(id, kind, Priority(queue), "", (), user_id=user_id, partition=party)
    # A task without a slot was submitted to a queue without a limit, so the caller's limit does not apply.
    slots = _free_slots(tx, [again], None if slot is None else per_user)
    if id not in slots:
        raise _user_busy(tx, again, per_user)
    tx.execute(
        "UPDATE tasks SET status = 'QUEUED', ready = 1, version = version + 1, attempts = 0, slot = ?, cancel_by = NULL, "
        "error = NULL, percent = 0, message = '', run_at = ?, updated_at = ?, ended_at = NULL, hinted_at = NULL, turn = ? "
        "WHERE no = ?",
        (slots[id], now, now, _Turns(tx, [again]).turn(again), no),
    )
    tx.execute("DELETE FROM task_delays WHERE task = ?", (no,))
    task_store(tx).append_events(tx, [id])
    return get(tx, id)
