"""A slot's share of a fleet's job: the items it has claimed, and recording under those claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from headway._lease import Owner, has_ended, stride, write_owner
from headway._sql import Database, Row, Tx
from headway.core.retry import RetryPolicy
from headway.errors import NotFound, StaleClaim
from headway.ledger.content import is_intact
from headway.ledger.fleet import claims, store
from headway.ledger.fleet.claims import DAMAGED
from headway.ledger.fleet.fleet import settle
from headway.ledger.fleet.store import BlockRow, Claimant, Fleet
from headway.ledger.job import Job, OnDamaged, ignore
from headway.ledger.job_lease import Hold
from headway.ledger.store import items as stored
from headway.ledger.store import jobs
from headway.ledger.store.contract import TriedBefore, item_store
from headway.ledger.store.items import untried
from headway.ledger.store.recorder import Recorder
from headway.ledger.values import MAX_INDEX, NOTHING_RECORDED, Control, Done, Failed, Item, Outcome, Recorded
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


@dataclass(slots=True)
class Block:
    """A block claimed by this slot. ``open`` has its items that are not recorded yet."""

    row: BlockRow
    open: set[int] = field(default_factory=set)
    is_read: bool = False

    @property
    def ended(self) -> bool:
        """Whether the block was read and every item of it is recorded."""
        return self.is_read and not self.open


class Blocks:
    """The blocks that a slot has claimed, by number and by item."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._of: dict[int, int] = {}  # item -> its block

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._blocks.values()))

    def __contains__(self, idx: int) -> bool:
        return idx in self._of

    def get(self, no: int) -> Block | None:
        """Return the block with this number, or None."""
        return self._blocks.get(no)

    def of(self, idx: int) -> Block:
        """Return the block of an item."""
        return self._blocks[self._of[idx]]

    def add(self, row: BlockRow) -> Block:
        """Add a claimed block."""
        block = self._blocks[row.no] = Block(row)
        return block

    def set_open(self, block: Block, indices: Sequence[int]) -> None:
        """Set the items of a block that are not recorded yet."""
        block.open.update(indices)
        block.is_read = True
        self._of.update((idx, block.row.no) for idx in indices)

    def close(self, idx: int) -> None:
        """Remove an item that was recorded, or that has a claim of its own now."""
        block = self._blocks.get(self._of.pop(idx, -1))
        if block is not None:
            block.open.discard(idx)

    def drop(self, block: Block) -> None:
        """Remove a block with its items."""
        del self._blocks[block.row.no]
        for idx in block.open:
            self._of.pop(idx, None)

    def drop_ended(self) -> None:
        """Remove the blocks without open items."""
        self._blocks = {no: block for no, block in self._blocks.items() if not block.ended}

    def held(self, tx: Tx, job: int, slot: str, indices: Iterable[int]) -> set[int]:
        """Return those of ``indices`` whose block the slot still has. Locks the blocks, as a fence."""
        ours = [idx for idx in indices if idx in self._of]
        tokens = store.own_tokens(tx, job, slot, {self._of[idx] for idx in ours})
        return {idx for idx in ours if tokens.get(self._of[idx]) == self.of(idx).row.token}


class _Claimed(NamedTuple):
    block: BlockRow | None
    items: list[Item]
    is_over: bool = False
    dead: frozenset[int] = frozenset()  # the dead letters among the items, which get their last pass
    suspects: frozenset[int] = frozenset()


class Share(Job):
    """A `Job` that is limited to the items which one slot has claimed.

    It yields only these items, and records them under their claims. One thread uses it. That thread must call
    `renew_share` before the lease expires and `leave` at the end. If the process is killed instead, its claims expire
    and other slots take over the remaining items.
    """

    def __init__(self, database: Database, id: str, fleet: Fleet, slot: str, *, lease: float = LEASE) -> None:
        super().__init__(database, fleet.job, id)
        self.fleet, self.slot, self.lease = fleet, slot, lease
        self.hold = SlotHold(fleet.job, fleet.token, fleet.run, lease, Owner.current(), slot)
        # Identifies this slot's blocks. Host and process id are not enough: a restarted container has the same ones.
        self._me = self.hold.owner.claim
        self._blocks = Blocks()
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

    def _claimant(self, now: float) -> Claimant:
        return Claimant(self._me, write_owner(self.hold.owner, self.lease), now + self.lease)

    # ---- claiming --------------------------------------------------------------------------------------------------

    def claim_some(self, size: int, *, on_damaged: OnDamaged = ignore) -> list[Item]:
        """Claim about ``size`` items. Returns an empty list if none can be claimed now."""
        while True:
            claimed = self._database.run(partial(self._claim, size=size), operation="fleet.claim")
            self.is_over |= claimed.is_over
            self._blocks.drop_ended()  # `_fold` has counted and deleted them
            items = self._add_singles(claimed)
            if claimed.block is None:
                return items
            if (before := self._blocks.get(claimed.block.no)) is not None:
                self._lose(before)  # another slot finished the block, so its number was reused
            items += self._read(self._blocks.add(claimed.block), on_damaged)
            if items:
                return items
            size = min(4 * size, BLOCK_MOST)  # an earlier run did all of it: skip ahead faster

    def _add_singles(self, claimed: _Claimed) -> list[Item]:
        for item in claimed.items:
            assert item.token is not None
            self._tokens[item.idx] = item.token
        self._last_pass |= claimed.dead
        self.suspects |= claimed.suspects
        return [item._replace(token=None) for item in claimed.items]  # the share presents the token, not the worker

    def _claim(self, tx: Tx, size: int) -> _Claimed:
        fleet = store.read(tx, self.no, self.fleet.run)
        if fleet is None:
            return _Claimed(None, [], is_over=True)
        recorder = Recorder(tx, self.no, token=fleet.token)
        self._fold(recorder)
        block = self._take_block(recorder, store.expired_blocks(tx, self.no, recorder.now))
        items = claims.due_or_lapsed(recorder, min(size, SINGLES), self._tokens)
        if not block and len(items) < size:
            # Claim a block along with the retries, of which there may be just one: every claim locks the job's row
            # anyway.
            block = self._next_block(recorder, size - len(items))
        if not block and not items:
            # Blocks of slots that are known to be dead. Only tried when nothing else is left, because their leases
            # expire anyway. `fleet.attend` shortens leases that end too late.
            block = self._take_block(recorder, store.foreign_blocks(tx, self.no, self._me))
            items = [] if block else claims.abandoned(recorder, min(size, SINGLES), self._tokens)
        if not block and not items and fleet.has_pass and self._only_dead_left(recorder):
            items = self._last_passes(recorder, min(size, SINGLES))
        none = frozenset[int]()
        dead, suspects = self._write_claims(recorder, items) if items else (none, none)
        is_over = not block and not items and settle(recorder, fleet)
        if not is_over:
            if not block and not items:
                self._search_from_start(recorder)
            recorder.close(settle=False)
        return _Claimed(block, items, is_over, dead, suspects)

    def _fold(self, recorder: Recorder) -> None:
        """Add the counts of this slot's blocks to the job's row, and delete blocks without open items."""
        for no, token, done, seconds in store.own_counts(recorder.tx, self.no, self._me):
            block = self._blocks.get(no)
            recorder.row.count_done(done, seconds)
            if block is not None and block.row.token == token and block.ended:
                store.delete_block(recorder.tx, self.no, no)
            elif done:
                store.clear_count(recorder.tx, self.no, no)

    def _take_block(self, recorder: Recorder, rows: list[Row]) -> BlockRow | None:
        """Take over the first block whose slot is known to be dead or has left it."""
        for no, first, last, token, before, holder, until in rows:
            mine = self._blocks.get(no)
            if (mine is not None and mine.row.token == token) or not has_ended(holder, until, recorder.now):
                continue
            takeovers = before + (holder != "")  # an empty holder means that its slot has left the block
            block = BlockRow(no, first, last, _new_token(recorder), takeovers)
            store.take_over(recorder.tx, self.no, block, self._claimant(recorder.now))
            log.warning("a block is taken over", job=self.id, count=last - first + 1, worker=self.slot)
            return block
        return None

    def _next_block(self, recorder: Recorder, size: int) -> BlockRow | None:
        tx, row = recorder.tx, recorder.row
        # Take at most half of a fair share of the rest, so that the last blocks are small and all slots end together.
        # Take at least a twentieth of the requested size, or the end of a job would be nothing but claims.
        left = row.total - row.done - row.dead - row.failed
        if row.frontier < row.total:
            left = min(left, row.total - row.frontier)  # exclude items that other slots hold and have not recorded
        fair = math.ceil(max(0, left) / (2 * (store.count_other_slots(tx, self.no, self._me) + 1)))
        size = max(1, min(size, BLOCK_MOST, max(fair, size // 20)))
        found = store.next_range(tx, self.no, row.frontier, size, BLOCK_BYTES)
        if found is None:
            return None
        row.frontier = min(found[1] + 1, MAX_INDEX)
        return store.insert_block(tx, self.no, *found, _new_token(recorder), self._claimant(recorder.now))

    def _search_from_start(self, recorder: Recorder) -> None:
        """Recount the job if items are missing although no slot works on any.

        This means that the counters or the frontier are wrong, which happens only if the database was edited from
        outside. The search then restarts at the first item.
        """
        tx, row = recorder.tx, recorder.row
        if row.done + row.dead >= row.total or row.failed:
            return
        if store.has_blocks(tx, self.no) or stored.is_any_claimed(tx, self.no):
            return
        log.error("items are missing; the search for them restarts at the first one", job=self.id)
        row.recount()
        if row.done + row.dead < row.total:
            row.frontier = 0

    def _only_dead_left(self, recorder: Recorder) -> bool:
        row = recorder.row
        return row.done + row.dead >= row.total and not store.has_blocks(recorder.tx, self.no)

    def _last_passes(self, recorder: Recorder, limit: int) -> list[Item]:
        """Return dead letters for their last pass. Damaged ones are recorded as such."""
        rows = stored.last_pass(recorder.tx, self.no, limit, unclaimed=True)
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
        tx, me = recorder.tx, self._claimant(recorder.now)
        rows = store.claimed_states(tx, self.no, [item.idx for item in items])
        stored.claim(tx, self.no, items, None, me.holder, recorder.now, me.until)
        # A charged item has no lease. An item that still has one was claimed by a dead slot, but not noted as running.
        dead = frozenset(idx for idx, is_dead, _ in rows if is_dead)
        return dead, frozenset(idx for idx, _, has_lease in rows if has_lease)

    def _read(self, block: Block, on_damaged: OnDamaged) -> list[Item]:
        """Return the untried items of a block: the remaining ones, if it was taken over."""
        rows = untried(self._database, self.no, (block.row.first - 1, block.row.last))
        self._blocks.set_open(block, [row[0] for row in rows])
        if block.row.takeovers >= DEATHS:
            self.suspects |= block.open
        sound = [Item(idx, key, payload, 0) for idx, key, payload, mark in rows if is_intact(payload, mark)]
        self._give_up_damaged(rows, sound, on_damaged)
        return sound

    # ---- renewing --------------------------------------------------------------------------------------------------

    def renew_share(self) -> None:
        """Renew every claim of this slot and detect the blocks it has lost."""

        def work(tx: Tx) -> dict[int, int]:
            return store.renew_blocks(tx, self.no, self._claimant(tx.now()))

        kept = self._database.run(work, operation="fleet.renew")
        if self._tokens:
            self.renew([Item(idx, None, None, 0, token) for idx, token in self._tokens.items()], lease=self.lease)
        for block in self._blocks:
            if kept.get(block.row.no) != block.row.token:
                self._lose(block)

    def _lose(self, block: Block) -> None:
        log.warning("a block was given to another slot", job=self.id, worker=self.slot, count=len(block.open))
        self._blocks.drop(block)
        self.lost |= block.open
        self.suspects -= block.open

    def note_running(self, hold: Hold, items: Sequence[tuple[int, str]]) -> None:
        """Give long-running items individual claims that name their worker.

        If this slot is killed, only these items are charged an attempt.
        """
        if self._excused:
            return
        ours = [(idx, worker) for idx, worker in items if idx in self._blocks]
        claimed = [(idx, self._tokens[idx], worker) for idx, worker in items if idx in self._tokens]

        def work(tx: Tx) -> dict[int, int]:
            held = self._blocks.held(tx, self.no, self._me, [idx for idx, _ in ours])
            now = tx.now()
            me = self._claimant(now)
            noted = [(idx, worker, stride()) for idx, worker in ours if idx in held]
            stored.claim_untried(tx, self.no, noted, me.holder, now, me.until)
            stored.name_workers(tx, self.no, claimed)
            return {idx: token for idx, _, token in noted}

        if ours or claimed:
            for idx, token in self._database.run(work, operation="note_running").items():
                self._blocks.close(idx)
                self._tokens[idx] = token

    def excuse_running(self) -> None:
        """Remove the workers from this slot's claims, because it may soon be killed.

        The kill is not the fault of any item, so none is charged an attempt.
        """
        self._excused = True
        unnamed = [(idx, token, None) for idx, token in self._tokens.items()]
        if unnamed:
            self._database.run(lambda tx: stored.name_workers(tx, self.no, unnamed), operation="excuse")

    def give_back(self, indices: Sequence[int], hold: Hold | None = None) -> None:
        """Release items that were claimed one by one and not finished. No attempt is counted."""
        released = [(idx, self._tokens.pop(idx)) for idx in indices if idx in self._tokens]
        if released:
            self._database.run(lambda tx: stored.release_claims(tx, self.no, released, tx.now()), operation="give_back")

    def leave(self) -> bool:
        """Release everything not recorded, and end the run if nothing is left.

        Returns whether this call ended the run.
        """
        self.give_back(list(self._tokens))

        def work(tx: Tx) -> bool:
            fleet = store.read(tx, self.no, self.fleet.run)
            if fleet is None:
                return False
            recorder = Recorder(tx, self.no, token=self.fleet.token)
            self._fold(recorder)
            store.leave_blocks(tx, self.no, self._me)
            ended = settle(recorder, fleet)
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
        plain = [each for each in outcomes if isinstance(each, Done) and each.idx in self._blocks]
        fast = self._record_done(plain) if plain else NOTHING_RECORDED
        if fast is None:
            plain, fast = [], NOTHING_RECORDED
        quick = {each.idx for each in plain}
        rest = [each for each in outcomes if each.idx not in quick]
        slow = self._record_rest(rest, policy) if rest else NOTHING_RECORDED
        for outcome in outcomes:
            self._tokens.pop(outcome.idx, None)
            self._last_pass.discard(outcome.idx)
            self.suspects.discard(outcome.idx)
            self._blocks.close(outcome.idx)
        return replace(slow, done=fast.done + slow.done, completed=False, stale=[*fast.stale, *slow.stale])

    def _record_done(self, outcomes: list[Done]) -> Recorded | None:
        """Record successes of untried items. Returns None, with nothing recorded, if one was tried before."""

        def work(tx: Tx) -> Recorded:
            by_block: dict[int, list[Done]] = {}
            for outcome in outcomes:
                by_block.setdefault(self._blocks.of(outcome.idx).row.no, []).append(outcome)
            kept: list[Done] = []
            stale: list[int] = []
            now = 0.0
            for _, part in sorted(by_block.items()):
                block = self._blocks.of(part[0].idx).row
                seconds = sum(outcome.seconds or 0.0 for outcome in part)
                counted = store.count_done(tx, block, self.no, self._me, len(part), seconds)
                if counted is not None:
                    kept += part
                    now = counted
                else:
                    stale += [outcome.idx for outcome in part]
            if kept:
                item_store(tx.engine).insert_done(tx, self.no, now, kept)
            return replace(NOTHING_RECORDED, done=len(kept), stale=stale)

        try:
            return self._database.run(work, operation="record")
        except TriedBefore:
            return None

    def _record_rest(self, outcomes: list[Outcome], policy: RetryPolicy | None) -> Recorded:
        def work(tx: Tx) -> Recorded:
            recorder = Recorder(tx, self.no, token=self.fleet.token)
            ours = self._blocks.held(tx, self.no, self._me, [each.idx for each in outcomes])
            stale: list[int] = []
            guarded: list[Outcome] = []
            for outcome in outcomes:
                if outcome.idx in self._tokens:
                    guarded.append(outcome._replace(token=self._tokens[outcome.idx]))
                elif outcome.idx in ours:
                    guarded.append(outcome)
                else:
                    stale.append(outcome.idx)
            recorded = recorder.write(guarded, policy, compare=True)
            died = len([idx for idx in recorded.died if idx not in self._last_pass])
            if died:
                store.count_died(tx, self.no, self.fleet.run, died)
            recorder.close(settle=False)
            return replace(recorded, stale=[*recorded.stale, *stale])

        return self._database.run(work, operation="record")

    # ---- finishing and control -------------------------------------------------------------------------------------

    def finish(self, hold: Hold | None = None) -> bool:
        """Leave the job: see `leave`."""
        return self.leave()

    def asked(self, run: int) -> Control:
        """Return the control requests for this slot.

        They include a stop if the run is over or too many items died.
        """
        requests = jobs.control(self._database, self.no, run)
        fleet = store.read(self._database, self.no, run)
        stopping = max(requests.stopping, 1 if fleet is None or fleet.stopped else 0)
        # Scaling changes the number of slots, not the number of items that one slot runs at once.
        return requests._replace(
            stopping=stopping, workers=None, version=requests.version + (stopping != requests.stopping)
        )


def _new_token(recorder: Recorder) -> int:
    """Return a token that no block of this job has had.

    Block numbers are reused, but the job's version grows with every claim.
    """
    return recorder.row.version + 1


@dataclass(frozen=True, slots=True)
class SlotHold(Hold):
    """A slot's right to record for a job that the fleet holds."""

    slot: str = ""

    @property
    def mark(self) -> str:
        """Return the name that this slot's workers begin with."""
        return self.slot
