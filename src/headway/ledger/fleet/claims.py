"""Claims: select items for a claimant, and recover those whose claim expired.

Everything runs in the caller's transaction, while it has the job's row locked (`Recorder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway._lease import has_ended, stride
from headway._sql import Row
from headway.core.failure import Failure
from headway.ledger.content import is_intact
from headway.ledger.store import items as stored
from headway.ledger.store.items import next_untried
from headway.ledger.store.recorder import Recorder
from headway.ledger.values import MAX_INDEX, Failed, Item

LOST = Failure("ProcessLost", "the process that worked on this item was killed or lost its lease")
DAMAGED = Failure("DamagedPayload", "the payload in the database is not what was registered; it was not run")

#: The claims of a claimant that has none yet.
NOTHING: Mapping[int, int] = MappingProxyType({})


def take(recorder: Recorder, limit: int) -> list[Item]:
    """Return up to ``limit`` unclaimed items, each with the token for its claim."""
    items = due_or_lapsed(recorder, limit)
    items += _fresh(recorder, limit - len(items))
    return items or abandoned(recorder, limit)


def due_or_lapsed(recorder: Recorder, limit: int, own: Mapping[int, int] = NOTHING) -> list[Item]:
    """Return items whose wait is over or whose claim expired (that run is recorded as lost).

    Items that the caller holds under the token in ``own`` stay its own, even if it was suspended past its lease. Items
    that cannot be claimed (damaged, dead now, or still held) do not count against ``limit``.
    """
    items: list[Item] = []
    seen: set[int] = set()
    while (wanted := limit - len(items)) > 0:
        # Double the page: after the clock was set forward, every claim seems to have expired.
        most = wanted + 2 * len(seen)
        rows = stored.claimable(recorder.tx, recorder.no, recorder.now, most)
        new = [row for row in rows if row[0] not in seen]
        free = [row for row in new if _is_free(recorder, row, own)]
        taken = free[:wanted]
        seen.update({row[0] for row in new} - {row[0] for row in free[wanted:]})
        items += _take_over(recorder, taken)
        if len(rows) < most and len(taken) == len(free):
            break
    return items


def abandoned(recorder: Recorder, limit: int, own: Mapping[int, int] = NOTHING) -> list[Item]:
    """Return items whose claimant is known to be dead, or whose lease is over by the monotonic clock.

    Only tried when nothing else is left, because the end of their lease frees them anyway. Leases that end too late are
    shortened first.
    """
    stored.shorten_claims(recorder.tx, recorder.no)
    rows = stored.claimed(recorder.tx, recorder.no)
    return _take_over(recorder, [row for row in rows if _is_free(recorder, row, own)])[:limit]


def _is_free(recorder: Recorder, row: Row, own: Mapping[int, int]) -> bool:
    """Return whether the item has no valid claim."""
    idx, _, _, _, _, token, lease_until, _, holder = row
    if own.get(idx) == token:
        return False
    # A lease that has not ended here: the wall clock was set forward and the claimant is alive.
    return lease_until is None or has_ended(holder, lease_until, recorder.now)


def _take_over(recorder: Recorder, rows: list[Row]) -> list[Item]:
    """Return those of the unclaimed ``rows`` that may be claimed.

    An expired claim costs the item an attempt. A claim without a worker does not: the item had not run for long.
    """
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
    """Return untried items from the frontier on, and move the frontier past everything seen."""
    items: list[Item] = []
    while (wanted := limit - len(items)) > 0:
        rows, seen = next_untried(recorder.tx, recorder.no, recorder.row.frontier - 1, wanted)
        recorder.row.frontier = min(seen + 1, MAX_INDEX)
        if not rows:
            break
        intact = [Item(idx, key, payload, 0, stride()) for idx, key, payload, mark in rows if is_intact(payload, mark)]
        if len(intact) < len(rows):
            sound = {item.idx for item in intact}
            recorder.write([Failed(row[0], DAMAGED, retryable=False) for row in rows if row[0] not in sound])
        items += intact
    return items
