"""A slot's share of a fleet's job: the items it has claimed, and recording under those claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from headway._lease import Owner, has_ended, stride, write_owner
from headway._sql import NOW, Database, Row, Tx, marks
from headway.core.retry import RetryPolicy
from headway.errors import NotFound, StaleClaim
from headway.ledger import control
from headway.ledger.content import is_intact
from headway.ledger.control import Control
from headway.ledger.fleet import claims
from headway.ledger.fleet.claims import DAMAGED
from headway.ledger.fleet.fleet import SELECT_FLEET, Fleet, fleet_of, is_busy, settle
from headway.ledger.job import GIVE_BACK, Job, OnDamaged, ignore
from headway.ledger.job_lease import Hold
from headway.ledger.store.bulk import put_new_done
from headway.ledger.store.index_range import untried
from headway.ledger.store.recorder import Recorder
from headway.ledger.values import MAX_INDEX, Done, Failed, Item, Outcome, Recorded
from headway.telemetry import Log

log = Log("ledger")

#: Seconds a slot's claims last unless renewed. Renewals come every third of it, and the queue has its own lease for the
#: slot. With both, a dead machine's items run elsewhere within 20 s.
LEASE = 12.0
#: Maximum number of items claimed one by one (retries, last pass) at a time, because each writes a row.
SINGLES = 200
#: Maximum items and approximate payload bytes of a block. The slot that claims a block reads it into memory.
BLOCK_MOST = 20_000
BLOCK_BYTES = 16 * 2**20
#: A machine may die through no fault of any item. After this many takeovers of a block, each of its items is a suspect.
DEATHS = 2


#: The next items and their payload sizes. The subquery hides the limit from the planner: see
#: `headway.ledger.store.index_range`.
_NEAR = (
    "SELECT idx, coalesce(octet_length(payload), 0) AS size FROM input_products WHERE job = ? AND idx >= ? "
    "ORDER BY idx LIMIT (SELECT ?)"
)
#: Checks the fence and adds to the count in one statement. The slot is checked too: a restored database can issue a
#: block's number and token a second time.
_COUNT_BLOCK = (
    "UPDATE blocks SET done = done + ?, seconds = seconds + ? WHERE job = ? AND no = ? AND token = ? AND slot = ? "
    f"RETURNING {NOW['postgresql']}"
)
#: Matches an item's claim while the claimant still holds it.
_CLAIM = "WHERE job = ? AND idx = ? AND token = ? AND status <> 'done' AND lease_until IS NOT NULL"


def _new_token(recorder: Recorder) -> int:
    """Return a token that no block of this job has had. Block numbers are reused; the job's version grows with every
    claim."""
    return int(recorder.version) + 1


_BlockRow = tuple[int, int, int, int, int]  # the first fields of a `Block`


@dataclass(slots=True)
class Block:
    """A block claimed by this slot. ``open`` has its items that are not recorded yet."""

    no: int
    first: int
    last: int
    token: int
    takeovers: int
    open: set[int] = field(default_factory=set)
    is_read: bool = False

    @property
    def ended(self) -> bool:
        """Return whether every item of the block is recorded. A block that was not read yet has not ended."""
        return self.is_read and not self.open


class _Claimed(NamedTuple):
    block: _BlockRow | None
    items: list[Item]
    is_over: bool = False
    dead: frozenset[int] = frozenset()  # the dead letters among the items, which get their last pass
    suspects: frozenset[int] = frozenset()


class _NotThatSimple(Exception):
    """Rolls back the fast path of recording."""


class Share(Job):
    """A slot's share of a job: a `Job` that yields only items this slot has claimed and records under those claims.

    One thread uses it. That thread must call `renew_share` before the lease expires and `leave` at the end. If the
    process is killed instead, its claims expire and other slots take over the remaining items.
    """

    def __init__(self, database: Database, id: str, fleet: Fleet, slot: str, *, lease: float = LEASE) -> None:
        super().__init__(database, fleet.job, id)
        self.fleet, self.slot, self.lease = fleet, slot, lease
        self.hold = SlotHold(fleet.job, fleet.token, fleet.run, lease, Owner.current(), slot)
        # Identifies this slot's blocks. Host and process id are not enough: a restarted container has the same ones.
        self._me = self.hold.owner.claim
        self._blocks: dict[int, Block] = {}
        self._of: dict[int, int] = {}  # item -> its block
        self._tokens: dict[int, int] = {}  # items claimed one by one
        self._last_pass: set[int] = set()
        self._excused = False
        #: Items found to belong to another slot by now. The scheduler removes them from here.
        self.lost: set[int] = set()
        #: Items one of which may have killed the previous slot. The scheduler runs each of them alone and calls
        #: `note_running` first. If such an item kills this slot too, only that item is charged an attempt.
        self.suspects: set[int] = set()
        #: The run has finished, was stopped, or no longer belongs to the fleet.
        self.is_over = False

    # ---- claiming --------------------------------------------------------------------------------------------------

    def claim_some(self, size: int, *, on_damaged: OnDamaged = ignore) -> list[Item]:
        """Claim about ``size`` items. Returns an empty list if none can be claimed now."""
        while True:
            claimed = self._database.run(partial(self._claim, size=size), operation="fleet.claim")
            self.is_over |= claimed.is_over
            # Blocks without open items were counted and deleted by `_fold`.
            self._blocks = {no: block for no, block in self._blocks.items() if not block.ended}
            items = self._take_singles(claimed)
            if claimed.block is None:
                return items
            block = Block(*claimed.block)
            if (before := self._blocks.get(block.no)) is not None:
                self._lose(before)  # another slot finished the block, so its number was reused
            self._blocks[block.no] = block
            items += self._read(block, on_damaged)
            if items:
                return items
            size = min(4 * size, BLOCK_MOST)  # an earlier run did all of it: skip ahead faster

    def _take_singles(self, claimed: _Claimed) -> list[Item]:
        for item in claimed.items:
            assert item.token is not None
            self._tokens[item.idx] = item.token
        self._last_pass |= claimed.dead
        self.suspects |= claimed.suspects
        return [item._replace(token=None) for item in claimed.items]  # the share presents the token, not the worker

    def _claim(self, tx: Tx, size: int) -> _Claimed:
        row = tx.one(f"{SELECT_FLEET} WHERE job = ? AND run = ?", (self.no, self.fleet.run))
        if row is None:
            return _Claimed(None, [], is_over=True)
        fleet = fleet_of(row)
        recorder = Recorder(tx, self.no, token=fleet.token)
        self._fold(recorder)
        block = self._lapsed(recorder)
        items = claims.due_or_lapsed(recorder, min(size, SINGLES), self._tokens)
        if not block and len(items) < size:
            # Claim a block along with the retries, of which there may be just one: every claim locks the job's row
            # anyway.
            block = self._next_block(recorder, size - len(items))
        if not block and not items:
            block = self._abandoned_block(recorder)
            items = [] if block else claims.abandoned(recorder, min(size, SINGLES), self._tokens)
        if not block and not items and fleet.has_pass and self._only_dead_left(recorder):
            items = self._dead_ones(recorder, min(size, SINGLES))
        none = frozenset[int]()
        dead, suspects = self._write_claims(recorder, items) if items else (none, none)
        is_over = not block and not items and settle(recorder, fleet)
        if not is_over:
            if not block and not items:
                self._look_everywhere(recorder)
            recorder.close(settle=False)
        return _Claimed(block, items, is_over, dead, suspects)

    def _fold(self, recorder: Recorder) -> None:
        """Add the counts of this slot's blocks to the job's row, and delete blocks without open items."""
        rows = recorder.tx.all(
            "SELECT no, token, done, seconds FROM blocks WHERE job = ? AND slot = ? FOR UPDATE", (self.no, self._me)
        )
        for no, token, done, seconds in rows:
            block = self._blocks.get(no)
            recorder.count_done(done, seconds)
            if block is not None and block.token == token and block.ended:
                recorder.tx.execute("DELETE FROM blocks WHERE job = ? AND no = ?", (self.no, no))
            elif done:
                recorder.tx.execute("UPDATE blocks SET done = 0, seconds = 0 WHERE job = ? AND no = ?", (self.no, no))

    def _lapsed(self, recorder: Recorder) -> _BlockRow | None:
        rows = recorder.tx.all(
            "SELECT no, first, last, token, takeovers, holder, lease_until FROM blocks WHERE job = ? AND lease_until <= ? "
            "ORDER BY no LIMIT 20 FOR UPDATE",
            (self.no, recorder.now),
        )
        return self._take_block(recorder, rows)

    def _abandoned_block(self, recorder: Recorder) -> _BlockRow | None:
        """Claim a block whose slot is known to be dead, although its lease has not expired.

        Only tried when nothing else is left, because the lease expires anyway. `fleet.attend` shortens leases that end
        too late.
        """
        rows = recorder.tx.all(
            "SELECT no, first, last, token, takeovers, holder, lease_until FROM blocks WHERE job = ? AND slot <> ? "
            "ORDER BY no FOR UPDATE",
            (self.no, self._me),
        )
        return self._take_block(recorder, rows)

    def _take_block(self, recorder: Recorder, rows: list[Row]) -> _BlockRow | None:
        for no, first, last, token, before, holder, until in rows:
            mine = self._blocks.get(no)
            if (mine is not None and mine.token == token) or not has_ended(holder, until, recorder.now):
                continue
            takeovers = before + (holder != "")  # an empty holder means that its slot has left the block
            recorder.tx.execute(
                "UPDATE blocks SET slot = ?, holder = ?, token = ?, lease_until = ?, takeovers = ? WHERE job = ? AND no = ?",
                (self._me, write_owner(self.hold.owner, self.lease), _new_token(recorder), recorder.now + self.lease,
                 takeovers, self.no, no),
            )  # fmt: skip
            log.warning("a block is taken over", job=self.id, count=last - first + 1, worker=self.slot)
            return no, first, last, _new_token(recorder), takeovers
        return None

    def _next_block(self, recorder: Recorder, size: int) -> _BlockRow | None:
        tx, first = recorder.tx, recorder.frontier
        # Take at most half of a fair share of the rest, so that the last blocks are small and all slots end together.
        # Take at least a twentieth of the requested size, or the end of a job would be nothing but claims.
        left = recorder.total - recorder.done - recorder.dead - recorder.failed
        if first < recorder.total:
            left = min(left, recorder.total - first)  # exclude items that other slots hold and have not recorded
        slots = tx.one("SELECT count(DISTINCT slot) FROM blocks WHERE job = ? AND slot <> ?", (self.no, self._me))
        fair = math.ceil(max(0, left) / (2 * ((slots[0] if slots else 0) + 1)))
        size = max(1, min(size, BLOCK_MOST, max(fair, size // 20)))
        row = tx.one(f"SELECT min(idx), max(idx), sum(size) FROM ({_NEAR}) AS found", (self.no, first, size))
        if row is None or row[0] is None:
            return None
        first, last, bytes_in_all = row
        if bytes_in_all > BLOCK_BYTES:
            # Take as many items as fit. The first one is taken whatever its size.
            row = tx.one(
                f"SELECT max(idx) FROM (SELECT idx, sum(size) OVER (ORDER BY idx) AS upto FROM ({_NEAR}) AS near) AS found "
                "WHERE upto <= ? OR idx = ?",
                (self.no, first, size, BLOCK_BYTES, first),
            )
            assert row is not None
            (last,) = row
        recorder.frontier = min(last + 1, MAX_INDEX)
        number = tx.one("SELECT coalesce(max(no), 0) + 1 FROM blocks WHERE job = ?", (self.no,))
        assert number is not None
        token = _new_token(recorder)
        tx.execute(
            "INSERT INTO blocks (job, no, first, last, slot, holder, token, lease_until) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (self.no, number[0], first, last, self._me, write_owner(self.hold.owner, self.lease), token,
             recorder.now + self.lease),
        )  # fmt: skip
        return number[0], first, last, token, 0

    def _look_everywhere(self, recorder: Recorder) -> None:
        """Recount the job if items are missing although no slot works on any.

        This means that the counters or the frontier are wrong, which happens only if the database was edited from
        outside. The search then restarts at the first item.
        """
        if recorder.done + recorder.dead >= recorder.total or recorder.failed:
            return
        if is_busy(recorder.tx, self.no):
            return
        log.error("items are missing; they are looked for from the first one on", job=self.id)
        recorder.recount()
        if recorder.done + recorder.dead < recorder.total:
            recorder.frontier = 0

    def _only_dead_left(self, recorder: Recorder) -> bool:
        return (
            recorder.done + recorder.dead >= recorder.total
            and recorder.tx.one("SELECT 1 FROM blocks WHERE job = ? LIMIT 1", (self.no,)) is None
        )

    def _dead_ones(self, recorder: Recorder, limit: int) -> list[Item]:
        rows = recorder.tx.all(
            "SELECT i.idx, i.key, i.payload, i.fingerprint, p.attempts, coalesce(p.token, 0) FROM dead_letters d "
            "JOIN input_products i ON i.job = d.job AND i.idx = d.idx "
            "JOIN progress p ON p.job = d.job AND p.idx = d.idx "
            "WHERE d.job = ? AND d.last_pass = 0 AND p.lease_until IS NULL ORDER BY d.idx LIMIT ?",
            (self.no, limit),
        )
        sound = [row for row in rows if is_intact(row[2], row[3])]
        damaged = [Failed(row[0], DAMAGED, retryable=False) for row in rows if not is_intact(row[2], row[3])]
        if damaged:
            recorder.write(damaged)
        return [Item(idx, key, payload, attempts, token + stride()) for idx, key, payload, _, attempts, token in sound]

    def _write_claims(self, recorder: Recorder, items: Sequence[Item]) -> tuple[frozenset[int], frozenset[int]]:
        """Claim items one by one. Return which of them are dead letters and which are suspects.

        The claim names no worker until `note_running` does. If this slot is killed before that, the item is not charged
        an attempt and becomes a suspect.
        """
        rows = recorder.tx.all(
            "SELECT p.idx, d.idx IS NOT NULL, p.lease_until IS NOT NULL FROM progress p LEFT JOIN dead_letters d "
            f"ON d.job = p.job AND d.idx = p.idx WHERE p.job = ? AND p.idx IN ({marks(len(items))})",
            (self.no, *(item.idx for item in items)),
        )
        until, holder = recorder.now + self.lease, write_owner(self.hold.owner, self.lease)
        recorder.tx.executemany(
            "UPDATE progress SET worker = NULL, next_attempt_at = ?, token = ?, lease_until = ?, holder = ? "
            "WHERE job = ? AND idx = ?",
            [(until, item.token, until, holder, self.no, item.idx) for item in items],
        )
        # A charged item has no lease. An item that still has one was claimed by a dead slot, but not noted as running.
        dead = frozenset(idx for idx, is_dead, _ in rows if is_dead)
        return dead, frozenset(idx for idx, _, has_lease in rows if has_lease)

    def _read(self, block: Block, on_damaged: OnDamaged) -> list[Item]:
        """Return the untried items of a block: the remaining ones, if it was taken over."""
        rows = untried(self._database, self.no, (block.first - 1, block.last))
        block.open.update(row[0] for row in rows)
        block.is_read = True
        if block.takeovers >= DEATHS:
            self.suspects |= block.open
        self._of.update((row[0], block.no) for row in rows)
        sound = [Item(idx, key, payload, 0) for idx, key, payload, mark in rows if is_intact(payload, mark)]
        if len(sound) < len(rows):
            whole = {item.idx for item in sound}
            damaged = [row[0] for row in rows if row[0] not in whole]
            log.error("payloads in the database are damaged", job=self.id, count=len(damaged), idx=damaged[0])
            on_damaged(self.record([Failed(idx, DAMAGED, retryable=False) for idx in damaged]))
        return sound

    # ---- renewing --------------------------------------------------------------------------------------------------

    def renew_share(self) -> None:
        """Renew every claim of this slot and detect the blocks it has lost."""

        def work(tx: Tx) -> list[Row]:
            now, holder = tx.now(), write_owner(self.hold.owner, self.lease)
            return tx.returned(
                "UPDATE blocks SET lease_until = ?, holder = ? WHERE job = ? AND slot = ? RETURNING no, token",
                (now + self.lease, holder, self.no, self._me),
            )

        kept: dict[int, int] = dict(self._database.run(work, operation="fleet.renew"))
        claims = [Item(idx, None, None, 0, token) for idx, token in self._tokens.items()]
        if claims:
            self.renew(claims, lease=self.lease)
        for block in list(self._blocks.values()):
            if kept.get(block.no) != block.token:
                self._lose(block)

    def _lose(self, block: Block) -> None:
        log.warning("a block was given to another slot", job=self.id, worker=self.slot, count=len(block.open))
        del self._blocks[block.no]
        for idx in block.open:
            self._of.pop(idx, None)
        self.lost |= block.open
        self.suspects -= block.open

    def note_running(self, hold: Hold, items: Sequence[tuple[int, str]]) -> None:
        """Give long-running items individual claims that name their worker.

        If this slot is killed, only these items are charged an attempt.
        """
        if self._excused:
            return
        ours = [(idx, worker) for idx, worker in items if idx in self._of]
        claimed = [(worker, self.no, idx, self._tokens[idx]) for idx, worker in items if idx in self._tokens]

        def work(tx: Tx) -> dict[int, int]:
            known = self._still_ours(tx, {self._of[idx] for idx, _ in ours})
            until, holder = tx.now() + self.lease, write_owner(self.hold.owner, self.lease)
            noted = [(idx, worker, stride()) for idx, worker in ours if self._of[idx] in known]
            tx.executemany(
                "INSERT INTO progress (job, idx, status, updated_at, worker, next_attempt_at, token, lease_until, holder) "
                "VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?) ON CONFLICT (job, idx) DO NOTHING",
                [
                    (self.no, idx, until - self.lease, worker, until, token, until, holder)
                    for idx, worker, token in noted
                ],
            )
            tx.executemany(f"UPDATE progress SET worker = ? {_CLAIM}", claimed)
            return {idx: token for idx, _, token in noted}

        if ours or claimed:
            for idx, token in self._database.run(work, operation="note_running").items():
                self._blocks[self._of.pop(idx)].open.discard(idx)
                self._tokens[idx] = token

    def excuse_running(self) -> None:
        """Remove the workers from this slot's claims, because it may soon be killed.

        The kill is not the fault of any item, so none is charged an attempt.
        """
        self._excused = True
        claims = [(self.no, idx, token) for idx, token in self._tokens.items()]
        if claims:
            self._database.run(
                lambda tx: tx.executemany(f"UPDATE progress SET worker = NULL {_CLAIM}", claims), operation="excuse"
            )

    def _still_ours(self, tx: Tx, numbers: Iterable[int]) -> set[int]:
        """Return which of these blocks this slot still holds. Locks them until the transaction ends, as a fence."""
        wanted = sorted(numbers)
        if not wanted:
            return set()
        rows = tx.all(
            f"SELECT no, token FROM blocks WHERE job = ? AND slot = ? AND no IN ({marks(len(wanted))}) ORDER BY no FOR UPDATE",
            (self.no, self._me, *wanted),
        )
        return {no for no, token in rows if self._blocks[no].token == token}

    def give_back(self, indices: Sequence[int], hold: Hold | None = None) -> None:
        """Release items that were claimed one by one and not finished. No attempt is counted."""
        claims = [(idx, self._tokens.pop(idx)) for idx in indices if idx in self._tokens]

        def work(tx: Tx) -> None:
            now = tx.now()
            tx.executemany(f"{GIVE_BACK} {_CLAIM}", [(now, self.no, idx, token) for idx, token in claims])

        if claims:
            self._database.run(work, operation="give_back")

    def leave(self) -> bool:
        """Release everything not recorded, and end the run if nothing is left. Return whether this call ended it."""
        self.give_back(list(self._tokens))

        def work(tx: Tx) -> bool:
            row = tx.one(f"{SELECT_FLEET} WHERE job = ? AND run = ?", (self.no, self.fleet.run))
            if row is None:
                return False
            recorder = Recorder(tx, self.no, token=self.fleet.token)
            self._fold(recorder)
            # Other slots may claim the rest of our blocks at once.
            tx.execute("UPDATE blocks SET lease_until = 0, holder = '' WHERE job = ? AND slot = ?", (self.no, self._me))
            ended = settle(recorder, fleet_of(row))
            if not ended:
                recorder.close(settle=False)
            return ended

        try:
            return self._database.run(work, operation="fleet.leave")
        except (StaleClaim, NotFound):
            return False  # the job no longer belongs to the fleet, or was deleted

    # ---- recording -------------------------------------------------------------------------------------------------

    def record(
        self,
        outcomes: Sequence[Outcome],
        *,
        hold: Hold | None = None,
        policy: RetryPolicy | None = None,
        settle: bool = True,
        register: bool = False,
    ) -> Recorded:
        """Record outcomes as `Job.record` does, but successes and the rest in separate transactions.

        Items that this slot no longer holds are returned as ``stale``. The job is finished by the slot that finds
        nothing left, not here.
        """
        plain = [each for each in outcomes if isinstance(each, Done) and each.idx in self._of]
        fast = self._record_done(plain) if plain else _NOTHING
        if fast is None:
            plain, fast = [], _NOTHING
        quick = {each.idx for each in plain}
        rest = [each for each in outcomes if each.idx not in quick]
        slow = self._record_rest(rest, policy) if rest else _NOTHING
        for outcome in outcomes:
            self._forget(outcome.idx)
        return Recorded(
            fast.done + slow.done, slow.failed, slow.dead, slow.repeated, False, slow.due, slow.died, slow.waiting,
            slow.given_up, [*fast.stale, *slow.stale],
        )  # fmt: skip

    def _forget(self, idx: int) -> None:
        self._tokens.pop(idx, None)
        self._last_pass.discard(idx)
        self.suspects.discard(idx)
        block = self._blocks.get(self._of.pop(idx, -1))
        if block is not None:
            block.open.discard(idx)

    def _record_done(self, outcomes: list[Done]) -> Recorded | None:
        """Record successes of untried items. Returns None, with nothing recorded, if one was tried before."""

        def work(tx: Tx) -> Recorded:
            by_block: dict[int, list[Done]] = {}
            for outcome in outcomes:
                by_block.setdefault(self._of[outcome.idx], []).append(outcome)
            kept: list[Done] = []
            stale: list[int] = []
            now = 0.0
            for no in sorted(by_block):
                part = by_block[no]
                seconds = sum(outcome.seconds or 0.0 for outcome in part)
                row = tx.one(_COUNT_BLOCK, (len(part), seconds, self.no, no, self._blocks[no].token, self._me))
                if row is not None:
                    kept += part
                    now = row[0]
                else:
                    stale += [outcome.idx for outcome in part]
            if kept and not put_new_done(tx, self.no, now, kept):
                raise _NotThatSimple
            return replace(_NOTHING, done=len(kept), stale=stale)

        try:
            return self._database.run(work, operation="record")
        except _NotThatSimple:
            return None

    def _record_rest(self, outcomes: list[Outcome], policy: RetryPolicy | None) -> Recorded:
        def work(tx: Tx) -> Recorded:
            recorder = Recorder(tx, self.no, token=self.fleet.token)
            ours = self._still_ours(tx, {self._of[each.idx] for each in outcomes if each.idx in self._of})
            stale: list[int] = []
            guarded: list[Outcome] = []
            for outcome in outcomes:
                if outcome.idx in self._tokens:
                    guarded.append(outcome._replace(token=self._tokens[outcome.idx]))
                elif self._of.get(outcome.idx) in ours:
                    guarded.append(outcome)
                else:
                    stale.append(outcome.idx)
            recorded = recorder.write(guarded, policy)
            died = len([idx for idx in recorded.died if idx not in self._last_pass])
            if died:
                tx.execute(
                    "UPDATE fleets SET died = died + ?, stopped = CASE WHEN most IS NOT NULL AND died + ? >= most "
                    "THEN 1 ELSE stopped END WHERE job = ? AND run = ?",
                    (died, died, self.no, self.fleet.run),
                )
            recorder.close(settle=False)
            return replace(recorded, stale=[*recorded.stale, *stale])

        return self._database.run(work, operation="record")

    # ---- finishing and control -------------------------------------------------------------------------------------

    def finish(self, hold: Hold | None = None) -> bool:
        return self.leave()

    def asked(self, run: int) -> Control:
        """Return the control requests for this slot. It must also stop if the run is over or too many items died."""
        asked = control.read(self._database, self.no, run)
        row = self._database.one("SELECT stopped FROM fleets WHERE job = ? AND run = ?", (self.no, run))
        stopping = max(asked.stopping, 1 if row is None or row[0] else 0)
        # Scaling changes the number of slots, not the number of items that one slot runs at once.
        return asked._replace(stopping=stopping, workers=None, version=asked.version + (stopping != asked.stopping))


@dataclass(frozen=True, slots=True)
class SlotHold(Hold):
    """A slot's right to record for a job that the fleet holds."""

    slot: str = ""

    @property
    def mark(self) -> str:
        return self.slot


_NOTHING = Recorded(
    done=0, failed=0, dead=0, repeated=0, completed=False, due={}, died=(), waiting=0, given_up=0, stale=()
)
