"""Claims: which items a claimant gets, and what becomes of those whose claimant did not come back.

All of it happens in the caller's transaction, while the job's row is its own (`Recorder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from headway._lease import has_ended, shorten, stride
from headway._sql import Row
from headway.failure import Failure
from headway.ledger.content import is_intact
from headway.ledger.recorder import Recorder
from headway.ledger.stretches import OPEN, next_untried
from headway.ledger.values import MAX_INDEX, Failed, Item

LOST = Failure("ProcessLost", "the process that worked on this item was killed or lost its lease")
DAMAGED = Failure("DamagedPayload", "the payload in the database is not what was registered; it was not run")

#: An item whose wait is over: by its time, or because it failed in what is now the future (the clock was set back).
DUE = "(p.next_attempt_at <= ? OR (p.updated_at > ? AND p.lease_until IS NULL AND p.next_attempt_at IS NOT NULL))"
_CLAIMABLE = (
    "SELECT i.idx, i.key, i.payload, i.fingerprint, p.attempts, coalesce(p.token, 0), p.lease_until, p.worker, p.holder "
    "FROM progress p JOIN input_products i ON i.job = p.job AND i.idx = p.idx WHERE p.job = ? "
    f"AND {OPEN}"
)
#: What a claimant has that begins with nothing.
NOTHING: Mapping[int, int] = MappingProxyType({})


def take(recorder: Recorder, limit: int) -> list[Item]:
    """Up to ``limit`` items that nobody has now, each with the token its claim is to have."""
    items = due_or_lapsed(recorder, limit)
    items += _fresh(recorder, limit - len(items))
    return items or abandoned(recorder, limit)


def write(recorder: Recorder, items: Sequence[Item], worker: str, holder: str, lease: float) -> None:
    """Make them ``worker``'s for ``lease`` seconds."""
    until = recorder.now + lease
    recorder.tx.executemany(
        "INSERT INTO progress (job, idx, status, updated_at, worker, next_attempt_at, token, lease_until, holder) "
        "VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO UPDATE SET "
        "worker = excluded.worker, next_attempt_at = excluded.next_attempt_at, token = excluded.token, "
        "lease_until = excluded.lease_until, holder = excluded.holder",
        # The moment the lease lapses is the moment the item may be handed out again.
        [(recorder.no, item.idx, recorder.now, worker, until, item.token, until, holder) for item in items],
    )


def due_or_lapsed(recorder: Recorder, limit: int, own: Mapping[int, int] = NOTHING) -> list[Item]:
    """Items whose wait is over, or whose claim lapsed (that run is written down as lost). Those that the caller has under
    the token in ``own`` stay its own, also when it was stopped past its lease.

    What cannot be handed out (damaged, dead now, or still its claimant's) takes no other item's place.
    """
    items: list[Item] = []
    seen: set[int] = set()
    while (wanted := limit - len(items)) > 0:
        # Twice as many each time: of a clock that was set forward all that is claimed seems to have lapsed.
        most = wanted + 2 * len(seen)
        rows = recorder.tx.all(
            f"{_CLAIMABLE} AND {DUE} ORDER BY p.next_attempt_at, p.idx LIMIT ?",
            (recorder.no, recorder.now, recorder.now, most),
        )
        new = [row for row in rows if row[0] not in seen]
        free = [row for row in new if _is_free(recorder, row, own)]
        taken = free[:wanted]
        seen.update({row[0] for row in new} - {row[0] for row in free[wanted:]})
        items += _take_over(recorder, taken)
        if len(rows) < most and len(taken) == len(free):
            break
    return items


def abandoned(recorder: Recorder, limit: int, own: Mapping[int, int] = NOTHING) -> list[Item]:
    """Items whose claimant can be seen to be dead, or whose lease is over by the clock that nobody can set. Looked
    for when there is nothing else: the end of their lease frees them anyway, and one that ends too late is shortened here."""
    shorten_all(recorder)
    rows = recorder.tx.all(
        f"{_CLAIMABLE} AND p.holder IS NOT NULL AND p.lease_until IS NOT NULL ORDER BY p.next_attempt_at, p.idx",
        (recorder.no,),
    )
    return _take_over(recorder, [row for row in rows if _is_free(recorder, row, own)])[:limit]


def shorten_all(recorder: Recorder) -> None:
    """Claims that were written before the database's clock was set back begin anew (`headway._lease.shorten`)."""
    shorten(recorder.tx, "progress", f"job = ? AND {OPEN}", (recorder.no,), ends=("lease_until", "next_attempt_at"))


def _is_free(recorder: Recorder, row: Row, own: Mapping[int, int]) -> bool:
    """Whether nobody has the item now. A claim that is still good stays its claimant's."""
    idx, _, _, _, _, token, lease_until, _, holder = row
    if own.get(idx) == token:
        return False
    # If not: the wall clock was set forward, and the claimant lives.
    return lease_until is None or has_ended(holder, lease_until, recorder.now)


def _take_over(recorder: Recorder, rows: list[Row]) -> list[Item]:
    """What of ``rows``, which nobody has now, may be claimed. A claim that lapsed costs the item an attempt, unless it names
    no worker: then nobody worked on the item for long."""
    items, lost, damaged = [], [], []
    for idx, key, payload, mark, attempts, token, lease_until, worker, _ in rows:
        charged = lease_until is not None and worker is not None
        if charged:
            lost.append(Failed(idx, LOST, outcome="lost", worker=worker))
        if not is_intact(payload, mark):
            damaged.append(Failed(idx, DAMAGED, retryable=False))
            continue
        items.append(Item(idx, key, payload, attempts + charged, token + stride()))
    died = set(recorder.write(lost).died) if lost else set()
    if damaged:
        recorder.write(damaged)
    return [item for item in items if item.idx not in died]


def _fresh(recorder: Recorder, limit: int) -> list[Item]:
    """What nobody has tried, from the frontier on, which moves behind all that was seen."""
    items: list[Item] = []
    while (wanted := limit - len(items)) > 0:
        rows, seen = next_untried(recorder.tx, recorder.no, recorder.frontier - 1, wanted)
        recorder.frontier = min(seen + 1, MAX_INDEX)
        if not rows:
            break
        intact = [Item(idx, key, payload, 0, stride()) for idx, key, payload, mark in rows if is_intact(payload, mark)]
        if len(intact) < len(rows):
            sound = {item.idx for item in intact}
            recorder.write([Failed(row[0], DAMAGED, retryable=False) for row in rows if row[0] not in sound])
        items += intact
    return items
