"""A job that several slots work on: each item is one slot's, recorded once, and the job finishes once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from headway.core.retry import RetryPolicy
from headway.errors import JobHeld, Refused, StaleClaim
from headway.ledger import Done, Failed, Failure, Item, Job, Ledger, NewItem
from headway.ledger.fleet import fleet
from headway.ledger.fleet.share import Share
from tests.services.waiting import eventually

BOOM = Failure("ValueError", "boom", "ads.py:make_ad")
AT_ONCE = RetryPolicy(1, base=0.0, cap=0.0)
MakeShare = Callable[..., Share]


@pytest.fixture
def ledger(postgres_with_tables: str) -> Iterator[Ledger]:
    with Ledger.open(postgres_with_tables) as opened:
        yield opened


def start(ledger: Ledger, items: int = 10, *, has_pass: bool = True, most: int | None = None) -> Job:
    """A job of the fleet."""
    job = ledger.create("ads", max_retries=1, policy=AT_ONCE)
    job.register(NewItem(idx, f'{{"n":{idx}}}') for idx in range(items))
    job.seal(settle=False)
    hold = ledger.hold(job, {"fleet": True}, policy=AT_ONCE)
    fleet.hand_over(ledger.database, hold, work="{}", queue="normal", slots=2, most=most, has_pass=has_pass)
    return job


@pytest.fixture
def share(ledger: Ledger) -> MakeShare:
    """`share("a")`: what the slot of that name has of the job."""

    def make(slot: str, *, lease: float = 1000.0) -> Share:
        job = ledger.job("ads")
        known = fleet.read(ledger.database, job.no)
        assert known is not None
        return Share(ledger.database, job.id, known, slot, lease=lease)

    return make


def lapse(ledger: Ledger, share: Share) -> None:
    """Let the leases of this slot end, as those of one that is stopped do."""
    share.lease = 1e-6
    share.renew_share()
    over = time.monotonic() + 0.002  # the end of a lease is written in whole milliseconds
    eventually(lambda: time.monotonic() > over)


def events(ledger: Ledger) -> int:
    row = ledger.database.one("SELECT count(*) FROM outbox WHERE type = 'job.completed'")
    assert row is not None
    return int(row[0])


def indices(items: list[Item]) -> list[int]:
    return [item.idx for item in items]


def test_two_slots_never_get_the_same_item_and_the_last_one_finishes_the_job(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 10)
    a, b = share("a"), share("b")
    of_a, of_b = a.claim_some(4), b.claim_some(30)
    assert indices(of_a) == [0, 1, 2, 3]
    assert indices(of_b) == [4, 5]  # never much more than what is left for each, and what a has is not left
    a.record([Done(item.idx, seconds=0.5) for item in of_a])
    assert job.info().done == 4  # what a slot has recorded is seen at once
    assert job.info().status == "processing"
    b.record([Done(item.idx) for item in of_b])
    while rest := a.claim_some(100):
        a.record([Done(item.idx) for item in rest])
    assert not a.is_over  # b has not said yet that its block is through
    assert b.claim_some(1) == []
    assert b.is_over
    assert (job.info().done, job.info().status, events(ledger)) == (10, "completed", 1)
    assert [run.outcome for run in job.runs()] == ["finished"]
    assert a.claim_some(1) == []
    assert a.is_over
    assert events(ledger) == 1


def test_the_rest_of_a_lapsed_block_is_taken_over_and_its_slot_records_nothing_more(
    ledger: Ledger, share: MakeShare
) -> None:
    job = start(ledger, 10)
    a, b = share("a"), share("b")
    taken = a.claim_some(5)
    a.record([Done(0), Done(1)])
    lapse(ledger, a)
    assert indices(b.claim_some(100)) == [2, 3, 4]
    late = a.record([Done(item.idx, "from a") for item in taken[2:]])
    assert (late.done, sorted(late.stale)) == (0, [2, 3, 4])
    assert a.record([Failed(2, BOOM)]).stale == [2]
    assert b.record([Done(2), Done(3), Done(4)]).done == 3
    assert job.info().done == 5
    assert [job.item(idx).meta for idx in range(5)] == [None] * 5
    assert job.info().failures == 0


def test_a_failure_of_an_item_that_another_slot_has_is_refused(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 10)
    a, b = share("a"), share("b")
    a.claim_some(3)
    lapse(ledger, a)
    b.claim_some(100)
    assert a.record([Failed(1, BOOM, seen=0)]).stale == [1]
    assert job.info().failures == 0


def test_a_resumed_slot_learns_of_lost_blocks_when_it_renews(ledger: Ledger, share: MakeShare) -> None:
    start(ledger, 10)
    a, b = share("a"), share("b")
    a.claim_some(3)
    lapse(ledger, a)
    b.claim_some(100)
    a.renew_share()
    assert a.lost == {0, 1, 2}


def test_an_expired_block_that_no_slot_took_stays_with_its_slot(ledger: Ledger, share: MakeShare) -> None:
    start(ledger, 10)
    a = share("a")
    a.claim_some(3)
    lapse(ledger, a)
    assert a.record([Done(0)]).done == 1
    a.renew_share()
    assert a.lost == set()


def test_a_failed_item_is_retried_by_any_slot_and_dies_without_retries(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 2)
    a, b = share("a"), share("b")
    assert indices(a.claim_some(2)) == [0]
    assert indices(b.claim_some(2)) == [1]
    a.record([Failed(0, BOOM, seen=0)])
    b.record([Done(1)])
    (again,) = b.claim_some(5)
    assert (again.idx, again.attempts) == (0, 1)
    assert a.claim_some(5) == []
    recorded = b.record([Failed(0, BOOM, seen=1)])
    assert list(recorded.died) == [0]
    assert fleet.attend(ledger.database, job.no) is True
    assert b.leave() is False
    assert events(ledger) == 0  # it has its last pass before it
    assert indices(a.claim_some(5)) == [0]
    assert b.claim_some(5) == []
    a.record([Done(0, "rescued")])
    assert a.claim_some(5) == []
    assert a.is_over
    info = job.info()
    assert (info.done, info.dead, info.failures, events(ledger)) == (2, 0, 2, 1)


def test_tries_again_and_fresh_items_are_claimed_together(ledger: Ledger, share: MakeShare) -> None:
    start(ledger, 100)
    a = share("a")
    (first, *_) = a.claim_some(2)
    a.record([Failed(first.idx, BOOM, seen=0)])
    assert [(item.idx, item.attempts) for item in share("b").claim_some(4)] == [(0, 1), (2, 0), (3, 0), (4, 0)]


def test_a_last_pass_that_fails_leaves_a_dead_letter_and_the_job_finishes(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 1)
    a = share("a")
    for _ in range(3):  # two tries, and the last pass
        (item,) = a.claim_some(1)
        a.record([Failed(0, BOOM, seen=item.attempts)])
    assert a.claim_some(1) == []
    assert a.is_over
    assert (job.info().dead, job.info().status, events(ledger)) == (1, "completed", 1)
    known = job.runs()[-1]
    assert known.outcome == "finished"


def test_only_the_long_running_items_of_a_dead_slot_are_charged(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 4)
    a, b = share("a"), share("b")
    a.claim_some(2)
    a.note_running(a.hold, [(1, "a worker 1")])
    assert job.item(1).status == "processing"
    lapse(ledger, a)
    assert {item.idx: item.attempts for item in b.claim_some(10)} == {0: 0, 1: 1}
    assert a.record([Done(1)]).stale == [1]
    assert [attempt.outcome for attempt in job.history(1)] == ["lost"]


def test_a_long_running_item_is_recorded_by_its_own_slot(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 4)
    a = share("a")
    a.claim_some(2)
    a.note_running(a.hold, [(1, "a worker 1")])
    assert a.record([Done(0), Done(1)]).done == 2
    assert job.info().done == 2


def test_a_leaving_slot_returns_unfinished_items_without_an_attempt(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 8)
    a, b = share("a"), share("b")
    a.claim_some(4)
    a.note_running(a.hold, [(3, "a worker 1")])
    a.record([Done(0)])
    assert a.leave() is False
    assert job.info().done == 1
    assert {item.idx: item.attempts for item in b.claim_some(100)} == {1: 0, 2: 0, 3: 0}


def test_the_next_attendant_finishes_the_job_of_a_dead_one(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 3)
    a = share("a")
    while items := a.claim_some(3):
        a.record([Done(item.idx) for item in items])
        if job.info().done == 3:
            break  # killed: all is recorded, the job is not finished
    assert events(ledger) == 0
    lapse(ledger, a)
    assert fleet.attend(ledger.database, job.no) is True  # a slot is needed
    assert share("b").claim_some(1) == []
    assert (job.info().status, job.info().done, events(ledger)) == ("completed", 3, 1)
    assert fleet.attend(ledger.database, job.no) is False


def test_any_attendant_finishes_a_complete_job(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 0)
    assert fleet.attend(ledger.database, job.no) is False
    assert (job.info().status, events(ledger)) == ("completed", 1)


def test_a_job_of_a_fleet_cannot_be_held_until_it_is_stopped(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 10)
    a = share("a")
    a.claim_some(3)
    with pytest.raises(JobHeld, match="by a fleet"):
        ledger.hold(job, {})
    job.stop(actor="anna")
    assert a.asked(1).stopping == 1
    assert job.info().held  # it finishes what it works on
    a.record([Done(0)])
    a.leave()
    fleet.attend(ledger.database, job.no)
    assert not job.info().held
    assert [run.outcome for run in job.runs()] == ["interrupted"]
    assert job.info().done == 1
    with pytest.raises(Refused):
        job.stop(actor="anna")
    ledger.hold(job, {})
    assert [item.idx for item in job.untouched(-1, 100)] == list(range(1, 10))


def test_a_fleet_without_working_slots_stops_at_once(ledger: Ledger) -> None:
    job = start(ledger, 10)
    job.stop(actor="anna")
    assert not job.info().held


def test_nothing_of_an_ended_run_is_recorded(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 10)
    a = share("a")
    a.claim_some(3)
    lapse(ledger, a)
    job.stop(actor="anna")
    assert not job.info().held
    assert a.record([Done(0)]).stale == [0]
    ledger.hold(job, {})
    with pytest.raises(StaleClaim):
        a.record([Failed(1, BOOM)])
    assert a.claim_some(3) == []
    assert a.is_over
    assert job.info().done == 0


def test_too_many_deaths_stop_the_run_for_every_slot(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 10, most=2)
    a, b = share("a"), share("b")
    a.claim_some(2)
    b.claim_some(2)
    a.record([Failed(0, BOOM, retryable=False)])
    assert b.asked(1).stopping == 0
    a.record([Failed(1, BOOM, retryable=False)])
    assert b.asked(1).stopping == 1
    a.leave()
    b.leave()
    fleet.attend(ledger.database, job.no)
    assert [run.outcome for run in job.runs()] == ["stopped"]


def test_a_damaged_payload_is_a_dead_letter_and_the_others_go_on(ledger: Ledger, share: MakeShare) -> None:
    job = ledger.create("ads", max_retries=1, policy=AT_ONCE)
    from headway.ledger import fingerprint

    job.register(NewItem(idx, f'{{"n":{idx}}}', None, fingerprint(f'{{"n":{idx}}}')) for idx in range(4))
    job.seal(settle=False)
    hold = ledger.hold(job, {}, policy=AT_ONCE)
    fleet.hand_over(ledger.database, hold, work="{}", queue="normal", slots=2, most=None, has_pass=True)
    ledger.database.write("UPDATE input_products SET payload = '{bad' WHERE idx = 1")
    a = share("a")
    while items := a.claim_some(10):
        a.record([Done(item.idx) for item in items])
    assert (job.info().done, job.info().dead, events(ledger)) == (3, 1, 1)


def test_a_resumed_job_yields_only_the_remaining_items(ledger: Ledger, share: MakeShare) -> None:
    job = ledger.create("ads", policy=AT_ONCE)
    job.register(NewItem(idx, "1") for idx in range(500))
    job.seal(settle=False)
    job.record([Done(idx) for idx in range(490)], settle=False)
    hold = ledger.hold(job, {})
    fleet.hand_over(ledger.database, hold, work="{}", queue="normal", slots=2, most=None, has_pass=True)
    a = share("a")
    seen: list[int] = []
    while items := a.claim_some(8):
        seen += indices(items)
        a.record([Done(item.idx) for item in items])
    assert seen == list(range(490, 500))
    assert (job.info().done, events(ledger)) == (500, 1)


def test_slots_that_come_and_go_and_freeze_lose_nothing_and_count_nothing_twice(
    ledger: Ledger, share: MakeShare
) -> None:
    job = start(ledger, 600)

    def work(number: int) -> int:
        """One slot after the other, each of which may freeze past its lease, fail items, or leave."""
        dice, recorded = random.Random(number), 0
        for life in range(1000):
            mine = share(f"{number}.{life}", lease=1000.0)
            while items := mine.claim_some(dice.randrange(1, 60)):
                kept = items[: dice.randrange(len(items) + 1)]
                recorded += mine.record(
                    [Failed(i.idx, BOOM, seen=i.attempts) if dice.random() < 0.05 else Done(i.idx) for i in kept]
                ).done
                fate = dice.random()
                if fate < 0.2:
                    lapse(ledger, mine)
                    if fate < 0.1:
                        break  # killed
                    recorded += mine.record([Done(item.idx) for item in items[len(kept) :]]).done
                    break
                if len(kept) < len(items):
                    mine.leave()
                    break
            if fleet.read(ledger.database, job.no) is None:
                return recorded
        raise AssertionError("it never ends")

    with ThreadPoolExecutor(3) as pool:
        recorded = sum(pool.map(work, range(3)))
    info = job.info()
    rows = ledger.database.one("SELECT count(*) FROM progress WHERE status = 'done'")
    assert rows is not None
    assert recorded == info.done == rows[0]
    assert info.done + info.dead == info.total == 600
    assert events(ledger) == 1


def fail_all(share: Share) -> None:
    """Every item fails once. What waits for its next try is claimed one by one, many at a time."""
    taken: list[Item] = []
    while items := share.claim_some(100):
        taken += items
    share.record([Failed(item.idx, BOOM, seen=0) for item in taken])
    share.leave()


def test_tries_again_that_a_dead_slot_had_not_begun_are_charged_nothing(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 6)
    fail_all(share("first"))
    a, b = share("a"), share("b")
    assert len(a.claim_some(100)) == 6
    a.note_running(a.hold, [(4, "a worker 1")])
    lapse(ledger, a)
    assert {item.idx: item.attempts for item in b.claim_some(100)} == {0: 1, 1: 1, 2: 1, 3: 1, 5: 1}
    info = job.info()
    assert (info.failed, info.dead, info.failures) == (5, 1, 7)  # the one that ran had its last try
    assert [attempt.outcome for attempt in job.history(4)] == ["failed", "lost"]
    assert a.record([Done(idx) for idx in range(6)]).done == 0


def test_a_last_pass_that_a_dead_slot_had_not_begun_is_still_to_be_had(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 3, most=4)
    a, b = share("a"), share("b")
    while items := a.claim_some(1):
        if items[0].attempts == 2:
            break
        a.record([Failed(items[0].idx, BOOM, seen=items[0].attempts)])
    assert job.info().dead == 3
    lapse(ledger, a)
    passed = b.claim_some(100)
    assert indices(passed) == [0]
    passed += b.claim_some(100)
    assert sorted(item.idx for item in passed) == [0, 1, 2]
    b.record([Failed(item.idx, BOOM, seen=item.attempts) for item in passed])
    assert b.claim_some(100) == []
    # A pass that fails is no further death: three of four died, and the run was not stopped.
    assert [run.outcome for run in job.runs()] == ["finished"]
    assert (job.info().dead, job.info().failures, events(ledger)) == (3, 9, 1)


def test_a_slot_that_was_frozen_past_its_lease_does_not_take_its_own_items_over(
    ledger: Ledger, share: MakeShare
) -> None:
    job = start(ledger, 3)
    fail_all(share("first"))
    a = share("a")
    taken = a.claim_some(100)
    a.note_running(a.hold, [(0, "a worker 1")])
    lapse(ledger, a)
    assert a.claim_some(100) == []
    assert a.record([Done(item.idx) for item in taken]).done == 3
    assert (job.info().failures, job.info().dead) == (3, 0)


def test_two_slots_of_one_name_are_two_slots(ledger: Ledger, share: MakeShare) -> None:
    """A container that starts again has the same host name, and its processes the same numbers."""
    job = start(ledger, 10)
    dead, alive = share("slot pod.7"), share("slot pod.7")
    dead.claim_some(2)
    lapse(ledger, dead)
    alive.renew_share()
    assert indices(alive.claim_some(100)) == [0, 1]
    other = share("slot pod.7")
    mine = other.claim_some(2)
    alive.leave()
    other.renew_share()
    assert other.record([Done(item.idx) for item in mine]).done == len(mine)
    assert job.info().done == len(mine)


def test_a_block_that_gets_the_number_of_a_lost_one_fences_as_its_own(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 10)
    a, b = share("a"), share("b")
    lost = a.claim_some(2)
    lapse(ledger, a)
    assert indices(b.claim_some(2)) == indices(lost)
    b.record([Failed(0, BOOM, seen=0), Failed(1, BOOM, seen=0)])
    b.leave()
    (waiting, *_) = a.claim_some(2)  # the tries again
    assert waiting.attempts == 1
    a.give_back([0, 1])
    c = share("c")
    c.claim_some(2)
    fresh = a.claim_some(4)
    assert min(indices(fresh)) >= 2
    assert a.record([Done(0), Done(1)]).stale == [0, 1]
    assert job.info().done == 0


def test_a_stop_of_a_complete_job_finds_it_finished(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 3)
    a = share("a")
    while job.info().done < 3:
        a.record([Done(item.idx) for item in a.claim_some(3)])
    lapse(ledger, a)  # killed: all is recorded, and nobody has counted the last block
    job.stop(actor="anna")
    assert (job.info().status, job.info().done, events(ledger)) == ("completed", 3, 1)
    assert [run.outcome for run in job.runs()] == ["finished"]


def test_slots_are_put_back_while_dead_letters_wait_for_their_pass(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 3)
    a = share("a")
    while items := a.claim_some(1):
        if items[0].attempts == 2:
            break
        a.record([Failed(items[0].idx, BOOM, seen=items[0].attempts)])
    assert fleet.attend(ledger.database, job.no) is True  # two of the three are nobody's
    a.claim_some(100)
    assert fleet.attend(ledger.database, job.no) is False


def test_items_cut_off_at_shutdown_are_not_charged(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 4)
    a, b = share("a"), share("b")
    a.claim_some(2)
    a.note_running(a.hold, [(0, "a worker 1")])
    a.excuse_running()
    a.note_running(a.hold, [(1, "a worker 2")])
    lapse(ledger, a)
    assert {item.idx: item.attempts for item in b.claim_some(1)} == {0: 0, 1: 0}
    assert job.info().failures == 0


def test_an_item_that_kills_every_slot_at_once_is_found_and_charged(ledger: Ledger, share: MakeShare) -> None:
    """Each slot works off what it may, alone and noted if it is a suspect, and is killed when it comes to item 3."""
    job, deaths, noted_alone = start(ledger, 8), 0, 0
    for number in range(30):
        slot = share(f"{number}")
        while items := slot.claim_some(4):
            for item in items:
                if item.idx in slot.suspects:
                    slot.note_running(slot.hold, [(item.idx, f"{number} worker 1")])
                    noted_alone += 1
                if item.idx == 3:
                    break
                slot.record([Done(item.idx)])
            else:
                continue
            break
        if slot.is_over:
            break
        deaths += 1
        lapse(ledger, slot)
    info = job.info()
    assert (info.done, info.dead, info.failures, events(ledger)) == (7, 1, 3, 1)
    assert [attempt.outcome for attempt in job.history(3)] == ["lost"] * 3  # two tries and the last pass
    (cause,) = job.causes()
    assert (cause.type, cause.dead) == ("ProcessLost", 1)
    assert deaths == 7
    assert noted_alone == 3  # those before it were recorded, and those after it are no suspects of its claim


def test_items_that_dead_slots_had_not_begun_run_alone_without_a_charge(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 8)
    for number, suspects in enumerate([set(), set(), {0, 1}]):
        slot = share(f"{number}")
        assert indices(slot.claim_some(2)) == [0, 1]
        assert slot.suspects == suspects
        lapse(ledger, slot)
    left = share("one that leaves")
    left.claim_some(2)
    left.leave()
    last = share("last")
    items = last.claim_some(2)
    assert last.suspects == {0, 1}
    last.record([Done(item.idx) for item in items])
    assert last.suspects == set()
    assert (job.info().done, job.info().failures) == (2, 0)


def test_a_block_is_bounded_by_memory(ledger: Ledger, share: MakeShare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.ledger.fleet.share.BLOCK_BYTES", 1000)
    job = ledger.create("ads", policy=AT_ONCE)
    long = '"' + "ä" * 400 + '"'
    job.register(NewItem(idx, long if idx >= 50 else "1") for idx in range(100))
    job.seal(settle=False)
    hold = ledger.hold(job, {})
    fleet.hand_over(ledger.database, hold, work="{}", queue="normal", slots=2, most=None, has_pass=True)
    a = share("a")
    sizes = []
    while items := a.claim_some(1000):
        sizes.append(len(items))
        a.record([Done(item.idx) for item in items])
    assert sizes == [50] + [1] * 50
    assert events(ledger) == 1


def test_a_block_that_its_slots_left_has_no_suspects(ledger: Ledger, share: MakeShare) -> None:
    start(ledger, 8)
    for number in range(4):
        slot = share(f"{number}")
        assert indices(slot.claim_some(2)) == [0, 1]
        assert slot.suspects == set()
        slot.leave()


def test_records_of_a_slot_are_deleted_with_their_job(
    ledger: Ledger, share: MakeShare, postgres_with_tables: str
) -> None:
    """A foreign hand freed the job; a slot of its fleet was stopped in the middle of a record, and wakes up."""
    job = start(ledger, 10)
    a = share("a")
    a.claim_some(5)
    ledger.database.run(
        lambda tx: tx.execute("UPDATE jobs SET holder = NULL WHERE no = ?", (job.no,)), operation="test"
    )
    with psycopg.connect(postgres_with_tables) as slot, ThreadPoolExecutor(1) as elsewhere:
        slot.execute("UPDATE headway.blocks SET done = done + 1 WHERE job = %s", (job.no,))
        slot.execute("INSERT INTO headway.progress (job, idx, status, updated_at) VALUES (%s, 0, 'done', 0)", (job.no,))
        forgotten = elsewhere.submit(ledger.forget, "ads")
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        eventually(lambda: ledger.database.one(waiting) is not None)
        slot.commit()
        assert forgotten.result(30) == 10
    assert a.record([Done(1)]).stale == [1]
    assert ledger.database.one("SELECT count(*) FROM progress") == (0,)


# ---- the database's clock, and one that went back ---------------------------------------------------------------------


def turn_clock(ledger: Ledger, seconds: float) -> None:
    """As if the database's clock had been set: what was written by it is so much nearer or further."""
    ledger.database.write("UPDATE blocks SET lease_until = lease_until - ?", (seconds,))
    ledger.database.write(
        "UPDATE progress SET lease_until = lease_until - ?, next_attempt_at = next_attempt_at - ?", (seconds, seconds)
    )


def far_away(share: Share) -> Share:
    """The slot of a process on another machine, which nobody here can see."""
    share.hold = replace(share.hold, owner=replace(share.hold.owner, host="far", machine="far", space="far"))
    return share


def test_a_clock_that_was_set_back_keeps_no_block_of_a_dead_machine(ledger: Ledger, share: MakeShare) -> None:
    job = start(ledger, 10)
    dead, other = far_away(share("dead", lease=12.0)), share("other")
    lost = dead.claim_some(3)
    dead.note_running(dead.hold, [(lost[0].idx, "dead worker 1")])
    ours: list[Item] = []
    while more := other.claim_some(10):
        ours += more
    other.record([Done(item.idx) for item in ours])
    other.leave()
    turn_clock(ledger, -3600)
    assert not fleet.attend(ledger.database, job.no)  # it may live, and renew what it has
    turn_clock(ledger, 9)
    assert not fleet.attend(ledger.database, job.no)
    turn_clock(ledger, 4)
    assert fleet.attend(ledger.database, job.no)
    next_slot, found = share("next"), []
    while more := next_slot.claim_some(10):
        found += more
    assert sorted(indices(found)) == indices(lost)
    assert {idx: len(job.history(idx)) for idx in indices(lost)} == {0: 1, 1: 0, 2: 0}


def test_a_clock_that_was_set_back_does_not_keep_a_fleet_from_its_end_that_is_asked_to_stop(
    ledger: Ledger, share: MakeShare
) -> None:
    job = start(ledger, 10)
    far_away(share("dead", lease=12.0)).claim_some(3)
    turn_clock(ledger, -3600)
    job.stop()
    assert fleet.read(ledger.database, job.no) is not None
    turn_clock(ledger, 13)
    fleet.attend(ledger.database, job.no)
    assert fleet.read(ledger.database, job.no) is None


@pytest.mark.parametrize("what", [Done(0), Failed(0, BOOM)])
def test_a_slot_whose_block_was_lost_by_a_failover_records_nothing_in_the_next_one(
    ledger: Ledger, share: MakeShare, what: Done | Failed
) -> None:
    start(ledger, 10)
    before = ledger.database.one("SELECT version FROM jobs")
    assert before is not None
    a, b = share("a"), share("b")
    a.claim_some(3)
    ledger.database.write("DELETE FROM blocks")
    ledger.database.write("UPDATE jobs SET frontier = 0, version = ?", before)
    assert indices(b.claim_some(3)) == [0, 1, 2]
    assert ledger.database.all("SELECT no, token FROM blocks") == [(1, next(iter(a._blocks)).row.token)]
    a.note_running(a.hold, [(1, "a worker 1")])
    assert ledger.database.all("SELECT 1 FROM progress") == []
    assert a.record([what]).stale == [0]
    assert b.record([Done(0), Done(1), Done(2)]).done == 3


def test_a_slot_whose_claim_of_an_item_was_lost_by_a_failover_records_nothing_over_the_next_one(
    ledger: Ledger, share: MakeShare
) -> None:
    job = start(ledger, 1)
    a, b = share("a"), share("b")
    a.claim_some(1)
    a.note_running(a.hold, [(0, "a worker 1")])
    ledger.database.write("DELETE FROM progress")
    ledger.database.write("UPDATE blocks SET holder = '', lease_until = 0")
    b.claim_some(1)
    b.note_running(b.hold, [(0, "b worker 1")])
    assert a.record([Failed(0, BOOM)]).stale == [0]
    assert b.record([Done(0)]).done == 1
    assert b.leave()
    assert job.info().done == 1
