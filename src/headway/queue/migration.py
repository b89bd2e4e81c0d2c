"""Moving between RQ and the database, and taking over tasks from a table somebody already has.

Both directions only change who is told: the rows are the truth before and after, so a move that is interrupted is
finished by asking again, and tasks may be submitted and run meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headway._sql import Database
from headway.errors import InvalidInput
from headway.queue import hinting
from headway.queue.records import pages
from headway.queue.sweeper import Hints
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import TaskConflict, UserBusy
from headway.telemetry import Log

log = Log("queue")

_PAGE = 500


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move did, or would do; ``left``: tasks that are still told of where they were."""

    moved: int
    left: int = 0
    refused: tuple[str, ...] = ()


def to_rq(queue: TaskQueue, hints: Hints, *, dry_run: bool = False) -> Moved:
    """Tell RQ of every task that waits and that it does not know, in the order of service."""
    moved = 0
    while True:
        waiting = queue.database.run(lambda tx: hinting.unhinted(tx, limit=_PAGE), operation="queue.migrate")
        if dry_run:
            return Moved(_count(queue, "hinted_at IS NULL"))
        done = hints.push(waiting)
        queue.database.run(lambda tx: hinting.hinted(tx, done), operation="queue.migrate")  # noqa: B023 - run at once
        moved += len(done)
        if not done:
            return Moved(moved, left=len(waiting) if len(waiting) < _PAGE else _count(queue, "hinted_at IS NULL"))


def to_database(queue: TaskQueue, *, dry_run: bool = False) -> Moved:
    """Take every hint back. Workers that listen to RQ find nothing there; those of the database find the rows."""
    from headway.queue.rq import RqHints

    hints = queue.hints
    if dry_run or not isinstance(hints, RqHints):
        return Moved(_count(queue, "hinted_at IS NOT NULL"))
    moved = 0
    # What is hinted now, once: a supervisor that still runs with its Redis tells RQ again, and we would never be through.
    for page in pages(queue.database.run(hinting.all_hinted, operation="queue.migrate"), _PAGE):
        # Each page is taken back before it is forgotten, so an interrupted move goes on when it is asked again.
        if not hints.withdraw(page):
            break
        ids = [task_id for task_id, _ in page]
        queue.database.run(lambda tx: hinting.unhint(tx, ids), operation="queue.migrate")  # noqa: B023 - run at once
        moved += len(page)
    return Moved(moved, left=_count(queue, "hinted_at IS NOT NULL"))


def _count(queue: TaskQueue, condition: str) -> int:
    row = queue.database.one(f"SELECT count(*) FROM tasks WHERE status = 'QUEUED' AND ready = 1 AND {condition}")
    return int(row[0]) if row else 0


#: What can be taken over from a row of another table.
IMPORTED = ("id", "kind", "payload", "user_id", "role", "priority")


def take_over(
    queue: TaskQueue,
    rows: Iterable[Mapping[str, object]],
    mapping: Mapping[str, str],
    *,
    kind: str | None = None,
    dry_run: bool = False,
) -> Moved:
    """Submit what another system had waiting: ``mapping`` says which column holds the id, payload, user_id and so on.

    The id is kept, so that taking a row over twice gives one task. A row that cannot be taken (its user has an active task
    already) stays where it is and is named.
    """
    unknown = mapping.keys() - set(IMPORTED)
    if unknown or "id" not in mapping or ("kind" not in mapping and kind is None):
        raise InvalidInput(
            f"The mapping does not say what is what: {', '.join(sorted(unknown)) or 'id or kind is missing'}.",
            hint=f"It maps {', '.join(IMPORTED)} to columns; id is needed, and a column or one word for kind.",
        )
    moved, refused = 0, []
    for row in rows:
        given = {name: row.get(column) for name, column in mapping.items()}
        task_id, payload = str(given.pop("id")), given.pop("payload", None)
        task_kind = str(given.pop("kind", None) or kind)
        if dry_run:
            moved += 1
            continue
        try:
            content = json.loads(payload) if isinstance(payload, str) else payload
            queue.submit(task_kind, content, id=task_id, **{k: str(v) for k, v in given.items() if v is not None})  # type: ignore[arg-type]  # texts, by the names above
            moved += 1
        except (UserBusy, TaskConflict, InvalidInput, ValueError) as error:
            refused.append(task_id)
            log.warning("a task was not taken over", taskID=task_id, error=str(error))
    return Moved(moved, refused=tuple(refused))


def rows_of(
    database: Database, table: str, *, key: str, where: Mapping[str, str] | None = None
) -> Iterator[dict[str, object]]:
    """The rows of a table beside ours, page by page in the order of ``key``, as `take_over` wants them."""
    conditions = where or {}
    for name in (table, key, *conditions):
        if not name.isidentifier():
            raise InvalidInput(f"{name!r} is not a name of a table or column.")
    names = [name for (name,) in database.all(_COLUMNS_OF[database.engine], (table,))]
    if not names:
        raise InvalidInput(f"There is no table {table!r} in {database.name}.")
    condition = "".join(f" AND {column} = ?" for column in conditions)
    last: list[Any] = []
    while True:
        after = f" AND {key} > ?" if last else ""
        rows = database.all(
            f"SELECT {', '.join(names)} FROM {table} WHERE true{condition}{after} ORDER BY {key} LIMIT ?",
            (*conditions.values(), *last, _PAGE),
        )
        yield from (dict(zip(names, row, strict=True)) for row in rows)
        if len(rows) < _PAGE:
            return
        last = [rows[-1][names.index(key)]]


_COLUMNS_OF = {
    "sqlite": "SELECT name FROM pragma_table_info(?)",
    "postgresql": "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped "
    "ORDER BY attnum",
}
