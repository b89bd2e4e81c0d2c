"""The tables ``fleets`` and ``blocks`` of jobs that many processes work on (PostgreSQL only).

Every function runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from headway._lease import shorten
from headway._sql import Database, Row, Tx, marks

_FLEET = "SELECT job, run, token, work, queue, slots, most, died, pass, stopped, note, noted_at FROM fleets"
_BLOCK = "SELECT no, first, last, token, takeovers, holder, lease_until FROM blocks"

#: The next items and their payload sizes. The subquery hides the limit from the planner: see
#: `headway.ledger.store.items`.
_NEXT = (
    "SELECT idx, coalesce(octet_length(payload), 0) AS size FROM input_products WHERE job = ? AND idx >= ? "
    "ORDER BY idx LIMIT (SELECT ?)"
)


class Fleet(NamedTuple):
    """The state of a job's fleet."""

    job: int
    run: int
    token: int
    work: str
    queue: str
    slots: int | None
    #: The number of dead letters at which the run stops.
    most: int | None
    died: int
    has_pass: bool
    stopped: bool
    note: str | None
    noted_at: float | None


class BlockRow(NamedTuple):
    """A claimed range of items. ``first`` and ``last`` are inclusive."""

    no: int
    first: int
    last: int
    token: int
    takeovers: int


class Claimant(NamedTuple):
    """A slot as it signs its claims."""

    slot: str
    holder: str
    until: float


# ---- fleets ------------------------------------------------------------------------------------------------------------


def read(source: Database | Tx, job: int, run: int | None = None) -> Fleet | None:
    """Return the job's fleet, or None. ``run`` excludes the fleet of another run."""
    row = source.one(f"{_FLEET} WHERE job = ?", (job,))
    return None if row is None or run not in (None, row[1]) else _fleet(row)


def read_all(database: Database) -> list[tuple[str, Fleet]]:
    """Return (job id, fleet) of every job that a fleet works on."""
    rows = database.all(
        "SELECT j.id, f.job, f.run, f.token, f.work, f.queue, f.slots, f.most, f.died, f.pass, f.stopped, f.note, "
        "f.noted_at FROM fleets f JOIN jobs j ON j.no = f.job ORDER BY f.job"
    )
    return [(row[0], _fleet(row[1:])) for row in rows]


def _fleet(row: Row) -> Fleet:
    fleet = Fleet(*row)
    return fleet._replace(has_pass=bool(fleet.has_pass), stopped=bool(fleet.stopped))


def insert(tx: Tx, fleet: Fleet) -> None:
    """Insert a job's fleet, in place of earlier rows."""
    delete(tx, fleet.job)
    tx.execute(
        "INSERT INTO fleets (job, run, token, work, queue, slots, most, pass) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (fleet.job, fleet.run, fleet.token, fleet.work, fleet.queue, fleet.slots, fleet.most, int(fleet.has_pass)),
    )


def delete(tx: Tx, job: int) -> None:
    """Delete a job's fleet and its blocks."""
    delete_blocks(tx, job)
    tx.execute("DELETE FROM fleets WHERE job = ?", (job,))


def note(tx: Tx, job: int, run: int, text: str) -> None:
    """Store why a worker refused to take part."""
    tx.execute("UPDATE fleets SET note = ?, noted_at = ? WHERE job = ? AND run = ?", (text[:500], tx.now(), job, run))


def count_died(tx: Tx, job: int, run: int, died: int) -> None:
    """Count dead letters, and stop the run once it has had too many."""
    tx.execute(
        "UPDATE fleets SET died = died + ?, stopped = CASE WHEN most IS NOT NULL AND died + ? >= most "
        "THEN 1 ELSE stopped END WHERE job = ? AND run = ?",
        (died, died, job, run),
    )


# ---- blocks ------------------------------------------------------------------------------------------------------------


def has_blocks(tx: Tx, job: int) -> bool:
    """Return whether any block of the job is claimed."""
    return tx.one("SELECT 1 FROM blocks WHERE job = ? LIMIT 1", (job,)) is not None


def claimants(tx: Tx, job: int) -> list[Row]:
    """Return (holder, lease_until) of each block."""
    return tx.all("SELECT holder, lease_until FROM blocks WHERE job = ?", (job,))


def expired_blocks(tx: Tx, job: int, now: float) -> list[Row]:
    """Return and lock blocks whose lease has expired: the fields of `BlockRow`, then holder and lease_until."""
    return tx.all(f"{_BLOCK} WHERE job = ? AND lease_until <= ? ORDER BY no LIMIT 20{tx.for_update}", (job, now))


def foreign_blocks(tx: Tx, job: int, slot: str) -> list[Row]:
    """Return and lock the blocks of other slots, with the columns of `expired_blocks`."""
    return tx.all(f"{_BLOCK} WHERE job = ? AND slot <> ? ORDER BY no{tx.for_update}", (job, slot))


def own_counts(tx: Tx, job: int, slot: str) -> list[Row]:
    """Return and lock (number, token, done, seconds) of the slot's blocks."""
    return tx.all(f"SELECT no, token, done, seconds FROM blocks WHERE job = ? AND slot = ?{tx.for_update}", (job, slot))


def own_tokens(tx: Tx, job: int, slot: str, numbers: Collection[int]) -> dict[int, int]:
    """Return number -> token of the slot's blocks among ``numbers``, and lock them as a fence."""
    if not numbers:
        return {}
    rows = tx.all(
        f"SELECT no, token FROM blocks WHERE job = ? AND slot = ? AND no IN ({marks(len(numbers))}) ORDER BY no"
        f"{tx.for_update}",
        (job, slot, *sorted(numbers)),
    )
    return dict(rows)


def counts(tx: Tx, job: int) -> list[Row]:
    """Return (first, done, seconds) of every block."""
    return tx.all("SELECT first, done, seconds FROM blocks WHERE job = ?", (job,))


def count_other_slots(tx: Tx, job: int, slot: str) -> int:
    """Return how many other slots have a block."""
    row = tx.one("SELECT count(DISTINCT slot) FROM blocks WHERE job = ? AND slot <> ?", (job, slot))
    return row[0] if row else 0


def count_done(tx: Tx, block: BlockRow, job: int, slot: str, done: int, seconds: float) -> float | None:
    """Add to a block's count of done items.

    Returns the database's time, or None if the slot no longer has the block. One statement checks the fence and counts.
    The slot is checked too: a restored database can issue a block's number and token a second time.
    """
    row = tx.one(
        "UPDATE blocks SET done = done + ?, seconds = seconds + ? WHERE job = ? AND no = ? AND token = ? AND slot = ? "
        f"RETURNING {tx.clock}",
        (done, seconds, job, block.no, block.token, slot),
    )
    return None if row is None else float(row[0])


def clear_count(tx: Tx, job: int, block: int) -> None:
    """Reset the count of a block after it was added to the job's row."""
    tx.execute("UPDATE blocks SET done = 0, seconds = 0 WHERE job = ? AND no = ?", (job, block))


def take_over(tx: Tx, job: int, block: BlockRow, me: Claimant) -> None:
    """Give a block to another slot under the token in ``block``."""
    tx.execute(
        "UPDATE blocks SET slot = ?, holder = ?, token = ?, lease_until = ?, takeovers = ? WHERE job = ? AND no = ?",
        (me.slot, me.holder, block.token, me.until, block.takeovers, job, block.no),
    )


def insert_block(tx: Tx, job: int, first: int, last: int, token: int, me: Claimant) -> BlockRow:
    """Insert a block under the next free number."""
    number = tx.one("SELECT coalesce(max(no), 0) + 1 FROM blocks WHERE job = ?", (job,))
    assert number is not None
    tx.execute(
        "INSERT INTO blocks (job, no, first, last, slot, holder, token, lease_until) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (job, number[0], first, last, me.slot, me.holder, token, me.until),
    )
    return BlockRow(number[0], first, last, token, 0)


def renew_blocks(tx: Tx, job: int, me: Claimant) -> dict[int, int]:
    """Renew the blocks of a slot. Return number -> token of each."""
    rows = tx.returned(
        "UPDATE blocks SET lease_until = ?, holder = ? WHERE job = ? AND slot = ? RETURNING no, token",
        (me.until, me.holder, job, me.slot),
    )
    return dict(rows)


def leave_blocks(tx: Tx, job: int, slot: str) -> None:
    """Let other slots claim the rest of this slot's blocks at once."""
    tx.execute("UPDATE blocks SET lease_until = 0, holder = '' WHERE job = ? AND slot = ?", (job, slot))


def shorten_blocks(tx: Tx, job: int) -> None:
    """Shorten the leases of blocks that end too late (`headway._lease.shorten`)."""
    shorten(tx, "blocks", "job = ?", (job,))


def delete_block(tx: Tx, job: int, block: int) -> None:
    """Delete one block."""
    tx.execute("DELETE FROM blocks WHERE job = ? AND no = ?", (job, block))


def delete_blocks(tx: Tx, job: int) -> None:
    """Delete every block of a job."""
    tx.execute("DELETE FROM blocks WHERE job = ?", (job,))


# ---- items -------------------------------------------------------------------------------------------------------------


def has_items_from(tx: Tx, job: int, index: int) -> bool:
    """Return whether the job has an item at ``index`` or after it."""
    return tx.one("SELECT 1 FROM input_products WHERE job = ? AND idx >= ? LIMIT 1", (job, index)) is not None


def next_range(tx: Tx, job: int, first: int, size: int, most_bytes: int) -> tuple[int, int] | None:
    """Return the first and last index of the next range to claim.

    It has at most ``size`` items and about ``most_bytes`` of payload. The first item is included whatever its size.
    """
    row = tx.one(f"SELECT min(idx), max(idx), sum(size) FROM ({_NEXT}) AS found", (job, first, size))
    if row is None or row[0] is None:
        return None
    first, last, bytes_in_all = row
    if bytes_in_all > most_bytes:
        row = tx.one(
            f"SELECT max(idx) FROM (SELECT idx, sum(size) OVER (ORDER BY idx) AS upto FROM ({_NEXT}) AS near) AS found "
            "WHERE upto <= ? OR idx = ?",
            (job, first, size, most_bytes, first),
        )
        assert row is not None
        (last,) = row
    return first, last


def claimed_states(tx: Tx, job: int, indices: Iterable[int]) -> list[Row]:
    """Return (idx, whether it is a dead letter, whether it has a claim) of items."""
    wanted = list(indices)
    return tx.all(
        "SELECT p.idx, d.idx IS NOT NULL, p.lease_until IS NOT NULL FROM progress p LEFT JOIN dead_letters d "
        f"ON d.job = p.job AND d.idx = p.idx WHERE p.job = ? AND p.idx IN ({marks(len(wanted))})",
        (job, *wanted),
    )
