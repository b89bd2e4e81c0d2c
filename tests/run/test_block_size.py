"""How large the blocks are that a slot claims."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from headway.core.lifecycle import Shutdown
from headway.ledger import Done, Ledger, NewItem
from headway.ledger.fleet import fleet
from headway.queue.worker.execution import RunningTask
from headway.run.display.display import open_display
from headway.run.fleet.slot import SharedBacklog, SlotShare
from headway.run.output.results import Keep
from headway.run.pool.local import LocalRunner
from headway.run.pool.loop import RunLoop
from headway.run.pool.runner import HeldJob, RunContext, Settings


@pytest.fixture
def items() -> int:
    """How many there are in all."""
    return 10_000


@pytest.fixture
def share(postgres_with_tables: str, items: int) -> Iterator[SlotShare]:
    with Ledger.open(postgres_with_tables) as ledger:
        job = ledger.create("ads")
        job.register(NewItem(idx, str(idx)) for idx in range(items))
        job.seal(settle=False)
        hold = ledger.hold(job, {"fleet": True})
        fleet.hand_over(ledger.database, hold, work="{}", queue="normal", slots=2, most=None, has_pass=True)
        known = fleet.read(ledger.database, job.no)
        assert known is not None
        claim: Any = SimpleNamespace(id="t", kind="headway.slot", user_id="", role="admin", attempts=0)
        yield SlotShare(ledger, "ads", known, RunningTask(claim, lambda *_: None, lambda: False), Shutdown())


class Slot:
    """Claims, and works for as long as it is told, whatever it got."""

    def __init__(self, share: SlotShare) -> None:
        self._share, self._backlog = share, SharedBacklog(share, 1, lambda _: None)
        self.blocks: list[int] = []

    def claim(self) -> None:
        self._backlog.refill(time.monotonic())
        self.blocks.append(len(self._backlog.ready))

    def work(self, seconds: float) -> None:
        time.sleep(seconds)
        items = list(self._backlog.ready)
        self._backlog.ready.clear()
        self._share.record([Done(item.idx) for item in items])
        self._backlog.held.difference_update(item.idx for item in items)


@contextmanager
def others_have_the_row(url: str, seconds: float) -> Iterator[None]:
    with psycopg.connect(url) as other:
        other.execute("SELECT 1 FROM headway.jobs FOR UPDATE")
        release = threading.Timer(seconds, other.rollback)
        release.start()
        yield
        release.join()


def test_a_slot_that_waits_for_the_jobs_row_claims_larger_blocks_and_does_not_take_the_wait_for_work(
    share: SlotShare, postgres_with_tables: str
):
    slot = Slot(share)
    slot.claim()
    slot.work(1.0)
    with others_have_the_row(postgres_with_tables, 0.6):
        slot.claim()  # twenty times 0.6 s are more than the second that the block lasted: eight times as large, at most
    slot.work(0.2)
    began = time.monotonic()
    slot.claim()  # and after an item that took 0.2 s, which the wait before is no part of, about as many as fill two seconds
    slot.work(0.0)
    slot.claim()
    took = time.monotonic() - began  # on a busy machine these wait too, and that counts twenty times as well
    assert slot.blocks[:3] == [1, 1, 8]
    assert 4 <= slot.blocks[3] <= max(2.0, 20 * took) / 0.2


def test_a_block_of_items_that_take_a_second_is_more_than_one(share: SlotShare):
    slot = Slot(share)
    slot.claim()
    slot.work(1.02)
    slot.claim()
    slot.work(0.0)
    slot.claim()
    assert slot.blocks[2] >= 2


@pytest.mark.parametrize("items", [200])
def test_a_slot_that_gets_less_than_it_asks_for_does_not_ask_for_more(share: SlotShare, items: int):
    slot = Slot(share)
    while sum(slot.blocks) < items:
        slot.claim()
        slot.work(0.01 * slot.blocks[-1])
    assert max(slot.blocks) > 30
    assert slot.blocks[-1] <= 20  # so that slots end together; it was all that was left


def test_a_slot_that_has_nothing_else_to_do_records_at_once_and_so_comes_to_large_blocks_soon(share: SlotShare):
    loop = RunLoop(
        HeldJob(share, share.hold, lambda _: share.renew_share()),
        Settings(workers=1, last_pass=False, commit_seconds=60.0),
        RunContext(open_display("none", stream=None), Shutdown()), Keep(),
        lambda parts: LocalRunner(parts, str),
        lambda _, on_damaged: SharedBacklog(share, 1, on_damaged),
    )  # fmt: skip
    began = time.monotonic()
    assert loop.run().done == 10_000
    assert time.monotonic() - began < 60  # it would wait so long for company after its first item, and after its eighth
