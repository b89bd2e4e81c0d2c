"""Move tasks between RQ and the database, and between an application's own table and the queue.

`to_rq` and `to_database` only add or remove RQ hints; the rows stay authoritative. An interrupted move is finished by calling
it again, and tasks may be submitted and run meanwhile.

A table of the queue's own database is migrated with a `LegacyTable`:

    legacy = LegacyTable("captions", id="task_id", status="state", user_id="owner", payload="settings", kind="caption")
    follow(queue, legacy)                 # from now on its rows follow their tasks
    adopt(queue, legacy, dry_run=True)
    adopt(queue, legacy)                  # submit every row that waits
    release(queue, legacy)                # roll back: tasks that did not start become rows again
    unfollow(queue, legacy)               # before the table is dropped

Rows from anywhere else are submitted by `take_over`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from headway._sql import Database, Tx, Value
from headway.errors import InvalidInput
from headway.queue.recovery import Hints
from headway.queue.store import hints as hint_marks
from headway.queue.store import insert, tasks
from headway.queue.store.legacy import rows as legacy_rows
from headway.queue.store.legacy.table import LegacyTable, Table
from headway.queue.store.tasks import pages
from headway.queue.task import Priority, TaskConflict, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.telemetry import Log

log = Log("queue")

__all__ = [
    "LegacyTable",
    "Moved",
    "adopt",
    "follow",
    "release",
    "rows_of",
    "take_over",
    "to_database",
    "to_rq",
    "unfollow",
]

T = TypeVar("T")

_PAGE = 500
#: Rows moved by one transaction.
_BATCH = 100
#: Recorded as the canceller of a task that `release` returned to its table; `adopt` revives such a task.
_RELEASE = "headway.release"


@dataclass(frozen=True, slots=True)
class Moved:
    """The outcome of a move or of its dry run.

    ``left``: tasks that stay where they were. ``refused``: ids of rows or tasks that cannot be moved; the log says why.
    """

    moved: int
    left: int = 0
    refused: tuple[str, ...] = ()


def to_rq(queue: TaskQueue, hints: Hints, *, dry_run: bool = False) -> Moved:
    """Enqueue the hint of every waiting task that has none, in the order of service."""
    moved = 0
    while True:
        waiting = queue.database.run(lambda tx: hint_marks.unhinted(tx, limit=_PAGE), operation="queue.migrate")
        if dry_run:
            return Moved(_count(queue, is_hinted=False))
        done = hints.push(waiting)
        queue.database.run(lambda tx: hint_marks.hinted(tx, done), operation="queue.migrate")  # noqa: B023 - run at once
        moved += len(done)
        if not done:
            return Moved(moved, left=len(waiting) if len(waiting) < _PAGE else _count(queue, is_hinted=False))


def to_database(queue: TaskQueue, *, dry_run: bool = False) -> Moved:
    """Remove every hint from RQ. Workers in database mode find the rows."""
    from headway.queue.rq.hints import RqHints

    hints = queue.hints
    if dry_run or not isinstance(hints, RqHints):
        return Moved(_count(queue, is_hinted=True))
    moved = 0
    # Only the tasks hinted at the start: a supervisor that still uses Redis adds hints again, and this would never end.
    for page in pages(queue.database.run(hint_marks.all_hinted, operation="queue.migrate"), _PAGE):
        # Remove the hints first, then the marks: an interrupted move continues where it was.
        if not hints.withdraw(page):
            break
        ids = [task_id for task_id, _ in page]
        queue.database.run(lambda tx: hint_marks.unhint(tx, ids), operation="queue.migrate")  # noqa: B023 - run at once
        moved += len(page)
    return Moved(moved, left=_count(queue, is_hinted=True))


def _count(queue: TaskQueue, *, is_hinted: bool) -> int:
    with queue.database.read() as tx:
        return hint_marks.count_ready(tx, is_hinted=is_hinted)


def follow(queue: TaskQueue, legacy: LegacyTable) -> None:
    """Install the triggers. Calling it again replaces them, for example after the mapping changed.

    The database role needs the right to create triggers on both tables; workers need UPDATE on the legacy table.
    """
    table = legacy_rows.check_table(queue.database, legacy)
    queue.database.run(
        lambda tx: legacy_rows.install_triggers(tx, legacy, table, per_user=queue.backend.per_user),
        operation="queue.follow",
    )


def unfollow(queue: TaskQueue, legacy: LegacyTable) -> None:
    """Remove the triggers. Refused while a row of the table has an active task."""
    table = legacy_rows.check_table(queue.database, legacy)
    queue.database.run(lambda tx: legacy_rows.remove_triggers(tx, legacy, table), operation="queue.follow")


#: Fields of a task that a row of another table can have.
IMPORTED = ("id", "kind", "payload", "user_id", "role", "priority")
_REFUSALS = (UserBusy, TaskConflict, InvalidInput)


def take_over(
    queue: TaskQueue,
    rows: Iterable[Mapping[str, object]],
    mapping: Mapping[str, str],
    *,
    kind: str | None = None,
    dry_run: bool = False,
) -> Moved:
    """Submit the waiting tasks of another system. ``mapping`` names the column for id, payload, user_id and so on.

    Ids are kept, so taking a row over twice gives one task. Priorities are kept, whatever the role of the user. A row that
    cannot be taken over stays where it is and is named in ``refused``. The rows themselves are not changed: stop the other
    system's workers first, or use `adopt`.
    """
    unknown = mapping.keys() - set(IMPORTED)
    if unknown or "id" not in mapping or ("kind" not in mapping and kind is None):
        raise InvalidInput(
            f"The mapping is incomplete: {', '.join(sorted(unknown)) or 'id or kind is missing'}.",
            hint=f"It maps {', '.join(IMPORTED)} to columns. id is required, and kind as a column or an argument.",
        )

    def submit(tx: Tx, row: Mapping[str, object]) -> bool:
        given = {name: row.get(column) for name, column in mapping.items()}
        task_kind = str(given.pop("kind", None) or kind)
        _submit_row(tx, queue, str(given.pop("id")), task_kind, given.pop("payload", None), given, {})
        return True

    return _move(queue, rows, submit, lambda row: str(row.get(mapping["id"])), dry_run=dry_run)


def adopt(queue: TaskQueue, legacy: LegacyTable, *, dry_run: bool = False) -> Moved:
    """Submit every waiting row of a followed table. The row is claimed in the transaction that submits its task.

    A row that an old worker has locked or claimed is left to that worker. A dry run makes the same decisions in one
    transaction and rolls it back.
    """
    database = queue.database
    table = _followed(queue, legacy)

    def submit(tx: Tx, key: Value) -> bool:
        row = legacy_rows.lock_waiting(tx, legacy, table, key)
        if row is None:
            return False
        given = {name: row[getattr(legacy, name)] for name in ("user_id", "role", "priority") if getattr(legacy, name)}
        kind = legacy.kind if legacy.kind_column is None else str(row[legacy.kind_column])
        columns = legacy.payload_columns
        payload = (
            row[legacy.payload] if isinstance(legacy.payload, str) else {name: row[name] for name in columns} or None
        )
        _submit_row(tx, queue, str(key), str(kind), payload, given, legacy.priorities)
        return True

    moved = _move(queue, legacy_rows.waiting_keys(database, legacy, table), submit, str, dry_run=dry_run)
    if not dry_run and queue.hints is not None:
        to_rq(queue, queue.hints)
    return moved


def release(queue: TaskQueue, legacy: LegacyTable, *, dry_run: bool = False) -> Moved:
    """Roll back: return every task that is not running to the followed table, where old workers claim it.

    A task that was submitted without a row gets one. Running tasks end here (``left``), and their rows follow them. The
    task itself is recorded as CANCELLED; `adopt` revives it under the same id.
    """
    table = _followed(queue, legacy)
    database, hints = queue.database, queue.hints
    waiting = legacy_rows.waiting_tasks(database, legacy, table)

    def give_back(tx: Tx, pair: tuple[str, Value]) -> bool:
        task_id, key = pair
        found = legacy_rows.lock_task(tx, task_id)
        if found is None:
            return False  # a worker claimed it meanwhile: it ends here
        tasks.cancel(tx, task_id, by=_RELEASE)
        if key is not None:
            legacy_rows.return_row(tx, legacy, table, key)
        else:
            _insert_row(tx, legacy, table, task_id, queue.backend.decode(task_id, found[4]), found)
        return True

    moved = _move(queue, waiting, give_back, lambda pair: pair[0], dry_run=dry_run)
    if hints is not None and not dry_run:
        gone = [
            (task.id, task.priority) for page in pages([id for id, _ in waiting]) for task in _final(database, page)
        ]
        hints.withdraw(gone)
    return replace(moved, left=legacy_rows.count_active(database) - (moved.moved if dry_run else 0))


def _final(database: Database, ids: Sequence[str]) -> Sequence[Any]:
    with database.read() as tx:
        return [task for task in tasks.read(tx, ids) if task.is_final]


def _followed(queue: TaskQueue, legacy: LegacyTable) -> Table:
    table = legacy_rows.check_table(queue.database, legacy)
    if not legacy_rows.is_followed(queue.database, legacy):
        raise InvalidInput(
            f"The rows of {legacy.table} do not follow their tasks yet.", hint="Call follow(queue, legacy) first."
        )
    return table


class _Undo(Exception):
    """Roll a dry run back; carries its outcome."""


def _move(
    queue: TaskQueue, items: Iterable[T], move: Callable[[Tx, T], bool], name: Callable[[T], str], *, dry_run: bool
) -> Moved:
    """Move items one by one, each under a savepoint, in transactions of `_BATCH`.

    ``move`` returns False for an item that is no longer there to move, and raises a refusal for one that cannot be moved.
    """
    moved = 0
    refused: dict[str, str] = {}

    def work(tx: Tx, page: Iterable[T]) -> tuple[int, dict[str, str]]:
        count, why = 0, {}
        for item in page:
            legacy_rows.savepoint(tx)
            try:
                count += move(tx, item)
            except Exception as error:
                legacy_rows.roll_back_to_savepoint(tx)
                refusal = (
                    error
                    if isinstance(error, _REFUSALS)
                    else insert.legacy_refusal(error, name(item), queue.backend.per_user)
                )
                if refusal is None:
                    raise
                why[name(item)] = str(refusal)
            legacy_rows.release_savepoint(tx)
        if dry_run:
            raise _Undo(count, why)
        return count, why

    left = iter(items)
    if dry_run:
        everything = list(left)  # a retry of the transaction starts with the first again
        try:
            queue.database.run(lambda tx: work(tx, everything), operation="queue.migrate")
        except _Undo as undone:
            moved, refused = undone.args
        return Moved(moved, refused=tuple(refused))
    while page := list(islice(left, _BATCH)):
        done, why = queue.database.run(lambda tx: work(tx, page), operation="queue.migrate")
        moved += done
        refused |= why
        for task_id, reason in why.items():
            log.warning("a task was not moved", taskID=task_id, error=reason)
    return Moved(moved, refused=tuple(refused))


def _submit_row(
    tx: Tx, queue: TaskQueue, id: str, kind: str, payload: object, given: Mapping[str, object],
    priorities: Mapping[str, Priority | str],
) -> None:  # fmt: skip
    """Submit a row as a task; revive a task that was returned to its table before."""
    try:
        content = json.loads(payload) if isinstance(payload, str) else payload
    except ValueError as error:
        raise InvalidInput(f"The payload of {id} is not JSON: {error}.") from None
    user_id, role, priority = (given.get(name) for name in ("user_id", "role", "priority"))
    options: dict[str, Any] = {"id": id}
    if user_id is not None:
        options["user_id"] = str(user_id)
    if role is not None:
        options["role"] = str(role)
    task = queue.submitter.new_task(kind, content, **options)
    if priority is not None:
        task = replace(task, priority=_priority(id, str(priority), priorities))
    before = legacy_rows.cancelled_by(tx, id, _RELEASE)
    # A table without a column for the user says nothing about it. `submit` refuses a row of another user.
    if before is not None and task.user_id in (None, before[0]):
        insert.retry(tx, id, per_user=queue.backend.per_user)
    else:
        insert.submit(tx, [task], per_user=queue.backend.per_user)


def _priority(id: str, word: str, priorities: Mapping[str, Priority | str]) -> Priority:
    """The priority that a row names. It was granted by the other system, so no role lowers it."""
    try:
        return Priority(priorities.get(word, word.strip().lower()))
    except ValueError:
        log.warning("a row has an unknown priority; its task gets normal", taskID=id, reason=word[:40])
        return Priority.NORMAL


def _insert_row(tx: Tx, legacy: LegacyTable, table: Table, task_id: str, payload: str, found: Sequence[Any]) -> None:
    """Write a row for a task that never had one."""
    kind, priority, user_id, role, _ = found
    if legacy.kind_column is None and kind != legacy.kind:
        raise InvalidInput(f"Task {task_id} is of kind {kind}, which {legacy.table} does not hold.")
    words = {str(Priority(value)): word for word, value in legacy.priorities.items()}
    values: dict[str | None, Value] = {
        legacy.id: task_id, legacy.status: legacy.queued, legacy.user_id: user_id, legacy.role: role,
        legacy.kind_column: kind, legacy.priority: words.get(priority, priority),
    }  # fmt: skip
    if isinstance(legacy.payload, str):
        values[legacy.payload] = payload
    elif legacy.payload:
        content = json.loads(payload)
        if not isinstance(content, dict) or content.keys() - set(legacy.payload):
            raise InvalidInput(f"The payload of {task_id} does not fit the columns {', '.join(legacy.payload)}.")
        values |= {name: content.get(name) for name in legacy.payload}
    try:
        legacy_rows.insert_row(tx, table, {name: value for name, value in values.items() if name is not None})
    except Exception as error:
        # The table's own constraints. If the connection is lost, rolling back fails, and the transaction is retried.
        raise InvalidInput(f"{legacy.table} does not accept a row for task {task_id}: {error}") from error


def rows_of(
    database: Database, table: str, *, key: str, where: Mapping[str, str] | None = None
) -> Iterator[dict[str, object]]:
    """Read the rows of a table page by page in the order of ``key``, for `take_over`. The table may have a schema."""
    return legacy_rows.all_rows(database, table, key, where or {})
