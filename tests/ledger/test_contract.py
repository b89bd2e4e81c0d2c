"""The behaviour of the ledger, the same on every engine."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from headway.core.retry import RetryPolicy
from headway.errors import InvalidInput, JobHeld, NotFound, StaleClaim
from headway.events import SqlOutbox
from headway.ledger import Done, Failed, Failure, Hold, Item, Job, Ledger, NewItem, Recorded
from headway.ledger.content import fingerprint
from headway.ledger.store.items import TABLES
from tests.services.waiting import eventually

BOOM = Failure("ValueError", "no price for product 17", "ads.py:make_ad", "Traceback ...")
NOW = RetryPolicy(2, base=0.0)
LATER = RetryPolicy(2, base=1000.0, cap=1000.0)


def fail(job: Job, idx: int, *, times: int = 1, failure: Failure = BOOM) -> None:
    for _ in range(times):
        job.record([Failed(idx, failure)], policy=NOW)


def events(ledger: Ledger) -> list[tuple[str, dict[str, object]]]:
    outbox = SqlOutbox(ledger.database)
    ledger.database.run(
        lambda tx: tx.execute("INSERT INTO sinks (name, since) VALUES ('test', 0) ON CONFLICT DO NOTHING")
    )
    return [(event.id, dict(event.data)) for _, event in outbox.waiting("test", 100)]


# ---- registering ----------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-01")
def test_a_registered_item_is_pending_then_failed_then_done(job: Job):
    assert job.item(3).status == "pending"
    fail(job, 3)
    assert job.item(3).status == "retrying"
    job.record([Done(3)])
    assert job.item(3).status == "done"


@pytest.mark.req("S3-32")
def test_registering_again_adds_nothing_and_changes_nothing(job: Job):
    job.record([Done(1)])
    assert job.register(NewItem(idx, '"other"') for idx in range(12)) == 2
    info = job.info()
    assert (info.total, info.done) == (12, 1)
    assert job.item(1).payload == '{"n":1}'


def test_two_items_cannot_have_the_same_key(ledger: Ledger):
    job = ledger.create("keyed")
    with pytest.raises(Exception, match=r"(?i)unique"):
        job.register([NewItem(0, "1", "a"), NewItem(1, "2", "a")])
    assert job.info().total == 0


def test_an_item_is_found_by_its_key_or_its_index(ledger: Ledger):
    job = ledger.create("keyed")
    job.register([NewItem(0, "1", "inv-1"), NewItem(1, "2", "7")])
    assert job.item("inv-1").idx == 0
    assert job.item("7").idx == 1, "a key that looks like a number is still a key"
    assert job.item(0).key == "inv-1"
    with pytest.raises(NotFound):
        job.item("inv-2")


@pytest.mark.req("S3-04")
def test_items_with_new_content_are_pending_again_and_their_history_stays(job: Job):
    fail(job, 1)
    job.record([Done(1, worker="w", seconds=2.0), Done(2)])
    fail(job, 3, times=3)
    job.replace_items([NewItem(idx, f'"new {idx}"') for idx in (1, 2, 3)])
    assert [(run.no, run.outcome, run.worker, run.seconds, run.error) for run in job.history(1)] == [
        (1, "failed", None, None, BOOM.text),
        (2, "done", "w", 2.0, None),
    ]
    info = job.info()
    assert (info.total, info.done, info.failed, info.dead) == (10, 0, 0, 0)
    assert [(job.item(idx).status, job.item(idx).payload) for idx in (1, 2, 3)] == [
        ("pending", '"new 1"'), ("pending", '"new 2"'), ("pending", '"new 3"'),
    ]  # fmt: skip
    job.record([Done(1)])
    assert [run.outcome for run in job.history(1)] == ["failed", "done", "done"]
    assert [run.no for run in job.history(1)] == [1, 2, 3]
    assert [(idx, outcome, error) for idx, _, outcome, _, _, _, error in job.log()] == [
        (1, "failed", BOOM.text), (1, "done", None), (1, "done", None), (2, "done", None),
        (3, "failed", BOOM.text), (3, "failed", BOOM.text), (3, "failed", BOOM.text),
    ]  # fmt: skip


def test_one_recorded_item_adds_its_seconds_to_the_minute(ledger: Ledger):
    job = ledger.create("seconds")
    job.register([NewItem(0), NewItem(1), NewItem(2)])
    for idx in range(2):
        job.record([Done(idx, seconds=1.5)])
    assert sum(row[4] for row in job.minutes(0)) == 3.0


# ---- recording ------------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-13", "S3-23")
def test_every_outcome_is_counted_once_however_often_it_is_reported(job: Job):
    assert job.record([Done(0), Done(1)]).done == 2
    again = job.record([Done(0), Done(2), Done(2)])
    assert (again.done, again.repeated) == (1, 2)
    assert job.info().done == 3


@pytest.mark.req("S3-23")
def test_a_failure_that_names_its_run_counts_once_when_it_is_reported_again(job: Job):
    first = job.record([Failed(4, BOOM, seen=0)], policy=NOW)
    second = job.record([Failed(4, BOOM, seen=0)], policy=NOW)
    assert (first.failed, second.failed, second.repeated) == (1, 0, 1)
    assert job.item(4).attempts == 1
    assert len(job.history(4)) == 1


@pytest.mark.req("S3-11", "S3-12", "S3-49")
def test_the_third_failure_is_the_last_and_a_dead_item_is_not_offered_again(job: Job):
    fail(job, 5, times=2)
    assert [item.idx for item, _ in job.due(10)] == [5]
    fail(job, 5)
    info = job.info()
    assert (info.failed, info.dead, info.failures) == (0, 1, 3)
    assert job.due(10) == []
    assert 5 not in [item.idx for item in job.untouched(-1, 100)]
    assert 5 not in [item.idx for item in job.claim("w", limit=100)]
    assert job.item(5).status == "dead"


def test_a_failure_that_cannot_be_retried_is_dead_at_once(job: Job):
    recorded = job.record([Failed(5, BOOM, retryable=False)])
    assert recorded.died == [5]
    assert job.info().dead == 1


def test_a_late_failure_does_not_demote_a_done_item(job: Job):
    job.record([Done(6)])
    assert job.record([Failed(6, BOOM)]).repeated == 1
    assert (job.item(6).status, job.info().failures) == ("done", 0)


def test_success_of_a_dead_item_removes_its_dead_letter_and_is_audited(ledger: Ledger, job: Job):
    fail(job, 7, times=3)
    job.record([Done(7)])
    info = job.info()
    assert (info.done, info.dead, job.dead_letters()) == (1, 0, [])
    assert [action for _, _, action, _, _ in ledger.audit_trail("ads")] == ["rescued"]


@pytest.mark.req("S3-04")
def test_history_has_every_run_fail_fail_done(job: Job):
    job.record([Failed(2, BOOM, seconds=0.5, worker="w1")], policy=NOW)
    fail(job, 2, failure=Failure("KeyError", "'price'"))
    job.record([Done(2, seconds=0.25, worker="w2")])
    past = job.history(2)
    assert [(run.no, run.outcome) for run in past] == [(1, "failed"), (2, "failed"), (3, "done")]
    assert [run.error for run in past] == ["ValueError: no price for product 17", "KeyError: 'price'", None]
    assert (past[0].seconds, past[0].worker, past[0].detail) == (0.5, "w1", "Traceback ...")
    assert (past[2].seconds, past[2].worker) == (0.25, "w2")


def test_a_failed_item_waits_for_its_moment_and_the_wait_is_persisted(ledger: Ledger, job: Job):
    recorded = job.record([Failed(1, BOOM)], policy=LATER)
    left = recorded.due[1] - ledger.database.now()
    assert 900 < left <= 1000
    assert job.due(10) == []
    ((item, seconds),) = job.due(10, within=2000)
    assert item.idx == 1
    assert item.attempts == 1
    assert 900 < seconds <= 1000


@pytest.mark.req("S3-14")
def test_minutes_and_counters_add_up(job: Job):
    job.record([Done(0, seconds=1.0), Done(1, seconds=2.0), Failed(2, BOOM, seconds=0.5)], policy=NOW)
    fail(job, 2, times=2)
    rows = job.minutes(0)
    totals = [sum(row[column] for row in rows) for column in range(1, 5)]
    assert totals == [2, 3, 1, 3.5]
    assert (job.info().failures, job.info().done) == (3, 2)


@pytest.mark.req("S3-23")
def test_four_threads_times_a_hundred_failures_are_four_hundred(ledger: Ledger):
    job = ledger.create("many", max_retries=1_000_000)
    job.register([NewItem(0), NewItem(1)])
    job.seal()

    def hammer(_: int) -> None:
        for _ in range(100):
            job.record([Failed(0, BOOM)], policy=NOW)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hammer, range(4)))
    assert job.item(0).attempts == 400
    assert job.info().failures == 400
    assert len(job.history(0)) == 400


# ---- finishing ------------------------------------------------------------------------------------------------------


def test_the_last_item_finishes_the_job_once_and_the_event_is_in_the_outbox(ledger: Ledger, job: Job):
    assert not job.record([Done(idx) for idx in range(9)]).completed
    assert events(ledger) == []
    assert job.record([Done(9)]).completed
    assert not job.record([Done(9)]).completed
    assert not job.finish()
    ((_, data),) = events(ledger)
    assert data == {"total": 10, "succeeded": 10, "failed": 0}
    assert job.info().status == "completed"


def test_dead_items_count_as_through(ledger: Ledger, job: Job):
    job.record([Done(idx) for idx in range(9)])
    fail(job, 9, times=2)
    assert job.info().finished_at is None
    fail(job, 9)
    ((_, data),) = events(ledger)
    assert data == {"total": 10, "succeeded": 9, "failed": 1}


def test_a_job_that_is_not_sealed_does_not_finish_until_it_is(ledger: Ledger):
    job = ledger.create("open")
    job.register([NewItem(0)])
    assert not job.record([Done(0)]).completed
    assert job.seal()
    assert len(events(ledger)) == 1


def test_of_many_racing_threads_exactly_one_completes_the_job(ledger: Ledger):
    job = ledger.create("race")
    job.register(NewItem(idx) for idx in range(64))
    job.seal()
    barrier = threading.Barrier(8)

    def finish(worker: int) -> int:
        barrier.wait()
        return sum(job.record([Done(idx)]).completed for idx in range(worker, 64, 4))  # every item twice

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(finish, range(8))) == 1
    assert job.info().done == 64
    assert len(events(ledger)) == 1


def test_retrying_dead_letters_opens_the_job_again_and_its_next_completion_is_another_event(ledger: Ledger, job: Job):
    job.record([Done(idx) for idx in range(9)])
    fail(job, 9, times=3)
    assert job.retry_dead() == 1
    assert job.info().finished_at is None
    assert job.record([Done(9)]).completed
    ids = [id for id, _ in events(ledger)]
    assert len(set(ids)) == len(ids) == 2


# ---- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-03")
def test_no_item_is_claimed_by_two_while_the_lease_holds(job: Job):
    def take(worker: int) -> list[int]:
        mine = []
        while items := job.claim(f"w{worker}", limit=2):
            mine += [item.idx for item in items]
        return mine

    with ThreadPoolExecutor(4) as pool:
        taken = Counter(idx for mine in pool.map(take, range(4)) for idx in mine)
    assert taken == Counter(range(10))


def test_an_expired_claim_moves_on_and_its_first_owner_cannot_record(job: Job):
    (slow,) = job.claim("slow", lease=0.05)
    quick = eventually(lambda: [item for item in job.claim("quick", limit=20) if item.idx == slow.idx], timeout=5)[0]
    assert quick.token != slow.token
    assert job.record([Done(slow.idx, token=slow.token)]).stale == [slow.idx]
    assert job.item(slow.idx).status == "processing"
    assert job.record([Done(quick.idx, token=quick.token)]).done == 1
    past = job.history(slow.idx)
    assert [(run.outcome, run.worker) for run in past] == [("lost", "slow"), ("done", None)]


def test_a_claim_that_keeps_lapsing_ends_as_a_dead_letter(job: Job):
    def lapse() -> bool:
        job.claim("w", limit=20, lease=0.001)
        return job.item(0).status == "dead"

    eventually(lapse, timeout=10)
    assert [run.outcome for run in job.history(0)] == ["lost"] * 3
    assert "ProcessLost" in job.dead_letters()[0].error


def test_a_renewed_claim_does_not_lapse(job: Job):
    items = job.claim("w", limit=2, lease=0.05)
    assert job.renew(items, lease=1000) == 2
    assert job.renew([Item(items[0].idx, None, None, 0, token=99)]) == 0
    others = eventually(lambda: job.claim("v", limit=20), timeout=5)
    assert not {item.idx for item in others} & {item.idx for item in items}


@pytest.mark.parametrize("text", ["", "a\0b", "\ud800", "x" * 513])
def test_a_key_or_a_workers_name_that_an_engine_could_not_keep_is_refused_by_all(job: Job, text: str):
    with pytest.raises(InvalidInput, match="cannot be a worker's name"):
        job.claim(text)
    with pytest.raises(InvalidInput, match="cannot be an item's key"):
        job.register([NewItem(100, "1", text)])
    assert job.info().total == 10


@pytest.mark.parametrize(("limit", "lease"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -5.0)])
def test_a_senseless_claim_is_refused(job: Job, limit: int, lease: float):
    with pytest.raises(InvalidInput):
        job.claim("w", limit=limit, lease=lease)


# ---- holding a job --------------------------------------------------------------------------------------------------


def test_a_held_job_is_refused_to_a_second_process_and_free_after_release(ledger: Ledger, job: Job):
    hold = ledger.hold(job, {"workers": 2})
    with pytest.raises(JobHeld, match=r"process \d+ on"):
        ledger.hold(job, {})
    ledger.release(hold, "interrupted")
    second = ledger.hold(job, {})
    assert (second.run, second.token) == (2, hold.token + 1)
    assert [run.outcome for run in job.runs()] == ["interrupted", None]


def test_a_former_holder_cannot_record(ledger: Ledger, job: Job):
    paused = ledger.hold(job, {}, lease=0.01)
    other = eventually(lambda: _hold_or_none(ledger, job), timeout=5)
    with pytest.raises(StaleClaim, match="taken over"):
        job.record([Done(0)], hold=paused)
    with pytest.raises(StaleClaim):
        ledger.renew(paused)
    assert job.record([Done(0)], hold=other).done == 1
    assert [run.outcome for run in job.runs()] == ["lost", None]


def _hold_or_none(ledger: Ledger, job: Job) -> Hold | None:
    try:
        return ledger.hold(job, {})
    except JobHeld:
        return None


def test_a_long_item_of_a_killed_run_costs_one_attempt_and_is_retried(ledger: Ledger, job: Job):
    dead_run = ledger.hold(job, {}, lease=0.01)
    job.note_running(dead_run, [(3, f"{dead_run.mark} worker 1")])
    eventually(lambda: _hold_or_none(ledger, job), timeout=5)
    assert [(run.outcome, run.worker) for run in job.history(3)] == [("lost", "run 1 worker 1")]
    assert job.item(3).attempts == 1


def test_items_given_back_cost_no_attempt(ledger: Ledger, job: Job):
    hold = ledger.hold(job, {})
    job.note_running(hold, [(3, f"{hold.mark} worker 1")])
    assert job.progress().running == 1
    job.give_back([3], hold)
    assert job.progress().running == 0
    assert job.history(3) == []
    assert [item.idx for item, _ in job.due(5)] == [3]


def test_a_dead_letter_given_back_during_its_last_pass_is_one_as_before_and_not_offered_again(ledger: Ledger, job: Job):
    fail(job, 3, times=3)
    hold = ledger.hold(job, {})
    job.note_running(hold, [(3, f"{hold.mark} worker 1")])
    job.give_back([3], hold)
    assert job.due(5) == []
    assert 3 not in {item.idx for item in job.claim("worker 2", limit=20)}
    assert [item.idx for item in job.last_pass(5)] == [3]


# ---- corrections ----------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-31")
def test_rows_made_inconsistent_by_a_foreign_hand_are_corrected_logged_and_audited(ledger: Ledger, job: Job, caplog):
    fail(job, 1, times=3)
    job.record([Done(0)])
    database = ledger.database

    def meddle(tx):
        tx.execute("UPDATE progress SET status = 'done' WHERE idx = 1")
        tx.execute("UPDATE jobs SET done = 7, failed = 5 WHERE no = ?", (job.no,))
        if tx.engine == "sqlite":
            tx.execute("PRAGMA ignore_check_constraints = ON")
            tx.execute("INSERT INTO progress (job, idx, status, updated_at) VALUES (?, 8, 'weird', 0)", (job.no,))
            tx.execute("PRAGMA ignore_check_constraints = OFF")

    database.run(meddle)
    with caplog.at_level("WARNING", "headway"):
        ledger.hold(job, {})
    info = job.info()
    assert (info.done, info.failed, info.dead) == (2, 0, 0)
    assert job.item(1).status == "done"
    assert job.item(8).status == "pending"
    corrected = [
        json.loads(detail)["what"] for _, _, action, _, detail in ledger.audit_trail() if action == "corrected"
    ]
    assert any("done and dead" in what for what in corrected)
    assert any("counters" in what for what in corrected)
    if database.engine == "sqlite":
        assert any("'weird'" in what for what in corrected)
    assert len([record for record in caplog.records if "corrected" in record.message]) == len(corrected)


@pytest.mark.req("S3-31")
def test_an_unknown_inconsistency_is_reported_and_not_changed(ledger: Ledger, job: Job, caplog):
    """A dead letter of which no failure is recorded: whether the item was tried cannot be known."""
    ledger.database.write("INSERT INTO dead_letters (job, idx, error, created_at) VALUES (?, 4, 'x', 0)", (job.no,))
    with caplog.at_level("ERROR", "headway"):
        ledger.hold(job, {})
    assert "inconsistent" in caplog.text
    ((what,),) = [
        [json.loads(detail)["what"]] for _, _, action, _, detail in ledger.audit_trail() if action == "inconsistent"
    ]
    assert "item 4" in what
    assert ledger.database.one("SELECT idx FROM dead_letters") == (4,)
    assert job.item(4).status == "dead"


# ---- damaged payloads -----------------------------------------------------------------------------------------------


@pytest.fixture
def marked(ledger: Ledger) -> Job:
    """Six items whose fingerprints are known; the payloads of 1, 2 and 4 were changed by a foreign hand."""
    made = ledger.create("marked", policy=NOW)
    made.register(NewItem(idx, f'{{"n":{idx}}}', None, fingerprint(f'{{"n":{idx}}}')) for idx in range(6))
    made.seal()
    for idx, payload in ((1, "{bad"), (2, '{"n":9}'), (4, None)):
        ledger.database.write("UPDATE input_products SET payload = ? WHERE idx = ?", (payload, idx))
    return made


def damaged(job: Job) -> list[int]:
    assert all("DamagedPayload" in letter.error for letter in job.dead_letters())
    return [letter.idx for letter in job.dead_letters()]


def test_an_untouched_item_whose_payload_is_damaged_is_a_dead_letter_and_the_others_go_on(marked: Job):
    assert [item.idx for item in marked.untouched(-1, 3)] == [0, 3, 5], "a page is filled, or the caller would stop"
    assert damaged(marked) == [1, 2, 4]
    assert marked.untouched(-1, 10) == [Item(idx, None, f'{{"n":{idx}}}') for idx in (0, 3, 5)]
    assert (marked.info().dead, marked.item(1).attempts, len(marked.history(1))) == (3, 1, 1)


def test_a_claim_hands_out_nothing_damaged_and_is_filled_with_others(marked: Job):
    assert [item.idx for item in marked.claim("w", limit=3)] == [0, 3, 5]
    assert damaged(marked) == [1, 2, 4]
    assert marked.claim("w") == []


def test_an_item_whose_payload_is_damaged_while_it_waits_is_not_tried_again(ledger: Ledger, job: Job, marked: Job):
    fail(marked, 0)
    fail(marked, 3)
    ledger.database.write("UPDATE input_products SET payload = '7' WHERE idx = 0 AND job = ?", (marked.no,))
    assert [item.idx for item, _ in marked.due(10)] == [3]
    assert damaged(marked) == [0]
    ledger.database.write("UPDATE input_products SET payload = '7' WHERE idx = 3 AND job = ?", (marked.no,))
    assert [item.idx for item in marked.claim("w")] == [5]
    assert damaged(marked) == [0, 1, 2, 3, 4]


def test_a_dead_letter_whose_payload_is_damaged_gets_no_last_pass(ledger: Ledger, marked: Job):
    fail(marked, 0, times=3)
    fail(marked, 3, times=3)
    ledger.database.write("UPDATE input_products SET payload = '7' WHERE idx = 0")
    assert [item.idx for item in marked.last_pass(1)] == [3]
    assert [letter.error.partition(":")[0] for letter in marked.dead_letters()] == ["DamagedPayload", "ValueError"]
    assert marked.info().dead == 2


def test_damaged_items_do_not_displace_waiting_ones(ledger: Ledger, marked: Job):
    for idx in (0, 3, 5):
        fail(marked, idx)
    ledger.database.write("UPDATE input_products SET payload = '7' WHERE idx IN (0, 3)")
    told: list[Recorded] = []
    assert [item.idx for item, _ in marked.due(1, on_damaged=told.append)] == [5], (
        "fewer than asked for are all there are"
    )
    assert [recorded.died for recorded in told] == [[0], [3]]
    assert (told[-1].dead, told[-1].waiting) == (1, 1)


def test_unclaimable_items_do_not_count_against_the_limit(ledger: Ledger, job: Job, marked: Job):
    for idx in (0, 3, 5):
        fail(marked, idx)
    ledger.database.write("UPDATE input_products SET payload = '7' WHERE idx IN (0, 3) AND job = ?", (marked.no,))
    assert [item.idx for item in marked.claim("w", limit=1)] == [5]
    assert damaged(marked) == [0, 3]


def test_a_ledger_full_of_damaged_dead_letters_is_gone_through_page_by_page():
    with Ledger.open("sqlite:///:memory:") as ledger:
        job = ledger.create("marked", max_retries=0)
        job.register(NewItem(idx, "1", None, 5) for idx in range(1200))
        job.record([Failed(idx, BOOM) for idx in range(1200)])
        told: list[Recorded] = []
        assert job.last_pass(1, on_damaged=told.append) == []
        assert len(told) == 1200
        assert job.info().dead == 1200


@pytest.mark.parametrize("mark", [None, fingerprint("1")])
def test_a_payload_that_became_bytes_is_damaged(mark: int | None):
    with Ledger.open("sqlite:///:memory:") as ledger:  # keeps them in a column of texts
        job = ledger.create("marked")
        job.register(NewItem(idx, "1", None, mark) for idx in range(3))
        ledger.database.write("UPDATE input_products SET payload = ? WHERE idx = 1", (b"1",))
        assert [item.idx for item in job.untouched(-1, 5)] == [0, 2]
        assert damaged(job) == [1]


def test_a_payload_without_a_fingerprint_must_at_least_be_json(ledger: Ledger, job: Job):
    ledger.database.write("UPDATE input_products SET payload = '{bad' WHERE idx = 0")
    assert [item.idx for item in job.untouched(-1, 2)] == [1, 2]
    assert damaged(job) == [0]


# ---- causes and dead letters ----------------------------------------------------------------------------------------


@pytest.mark.req("S3-09", "S3-10")
def test_like_failures_are_one_cause_with_counts_and_an_example(job: Job):
    for idx in range(3):
        fail(
            job,
            idx,
            times=3,
            failure=Failure("HTTPError", f"GET /docs/inv-0{idx}.pdf gave 503 after {idx} s", "ads.py:fetch"),
        )
    fail(job, 5, times=1, failure=Failure("KeyError", "'price'", "ads.py:make"))
    first, second = job.causes()
    assert (first.type, first.message, first.count, first.dead, first.example) == (
        "HTTPError", "GET /docs/{id}.pdf gave 503 after {n} s", 9, 3, 0,
    )  # fmt: skip
    assert (second.type, second.message, second.count, second.dead) == ("KeyError", "'price'", 1, 0)
    assert [letter.idx for letter in job.dead_letters(cause=first.no)] == [0, 1, 2]
    assert [item.idx for item in job.items(cause=second.no)] == [5]


@pytest.mark.req("S3-43")
def test_retrying_one_cause_moves_exactly_those_items_and_is_audited(ledger: Ledger, job: Job):
    for idx in range(4):
        fail(job, idx, times=3, failure=Failure("A" if idx < 3 else "B", "x"))
    (cause,) = [cause.no for cause in job.causes() if cause.type == "A"]
    assert job.retry_dead(cause=cause, actor="ada", reason="fixed upstream") == 3
    assert [letter.idx for letter in job.dead_letters()] == [3]
    assert sorted(item.idx for item, _ in job.due(10)) == [0, 1, 2]
    assert job.item(0).attempts == 0
    ((_, actor, action, _, detail),) = list(ledger.audit_trail("ads"))
    assert (actor, action) == ("ada", "retry")
    assert json.loads(detail) == {"count": 3, "cause": cause, "reason": "fixed upstream"}
    assert len(job.history(0)) == 3, "the earlier runs are not forgotten"


def test_retrying_one_item_leaves_the_others_dead(job: Job):
    fail(job, 0, times=3)
    fail(job, 1, times=3)
    assert job.retry_dead(indices=[1]) == 1
    assert [letter.idx for letter in job.dead_letters()] == [0]
    assert job.retry_dead(indices=[9]) == 0


def test_as_many_dead_letters_as_anybody_names_are_tried_again_at_once(job: Job):
    """A statement of PostgreSQL takes 65,535 parameters."""
    fail(job, 3, times=3)
    assert job.retry_dead(indices=range(70_000)) == 1
    assert job.item(3).status == "pending"


def test_a_failure_that_says_trying_again_is_useless_gets_no_last_pass(job: Job):
    job.record([Failed(0, BOOM, retryable=False)])
    fail(job, 1, times=3)
    assert [item.idx for item in job.last_pass(10)] == [1]
    assert job.retry_dead(indices=[0]) == 1, "a person may still give it another life"
    fail(job, 0, times=3)
    assert [item.idx for item in job.last_pass(10)] == [0, 1]


def test_a_dead_letter_tells_when_it_died_last(ledger: Ledger, job: Job):
    fail(job, 0, times=3)
    ledger.database.write("UPDATE dead_letters SET created_at = 0")
    fail(job, 0)
    assert job.dead_letters()[0].created_at.year > 2000


def test_each_dead_letter_has_one_pass_at_the_end(job: Job):
    fail(job, 0, times=3)
    assert [item.idx for item in job.last_pass(10)] == [0]
    fail(job, 0)
    assert job.last_pass(10) == []
    assert (job.info().dead, job.item(0).attempts) == (1, 4)


# ---- lists ----------------------------------------------------------------------------------------------------------


def test_items_are_listed_page_by_page_and_by_state(job: Job):
    job.record([Done(0), Done(1)])
    fail(job, 2, times=3)
    fail(job, 3)
    job.claim("w")  # takes 3, whose wait is over
    states = {word: [item.idx for item in job.items(status=word)] for word in ("done", "dead", "processing", "pending")}
    assert states == {"done": [0, 1], "dead": [2], "processing": [3], "pending": [4, 5, 6, 7, 8, 9]}
    assert [item.idx for item in job.items(after=3, limit=2)] == [4, 5]
    with pytest.raises(InvalidInput, match="'finished'"):
        job.items(status="finished")


@pytest.mark.parametrize("limit", [2, 999, 5000])
def test_the_few_items_of_a_state_are_found_however_far_they_are_apart(ledger: Ledger, limit: int):
    """And each once, whatever the size of a page; the indices have holes, so nothing can be told from their number."""
    job = ledger.create("few")
    job.register(NewItem(2 * idx) for idx in range(3000))
    rare = list(range(0, 6000, 1400))
    job.record([Done(2 * idx) for idx in range(3000) if 2 * idx not in rare])
    assert _paged(job, "pending", limit) == rare
    job.record([Done(idx) for idx in rare[1:]])
    assert _paged(job, "pending", limit) == rare[:1]
    if limit > 2:
        assert _paged(job, "done", limit) == list(range(2, 6000, 2))
        assert _paged(job, None, limit) == list(range(0, 6000, 2))


def _paged(job: Job, status: str | None, limit: int) -> list[int]:
    found: list[int] = []
    while page := job.items(status=status, after=found[-1] if found else -1, limit=limit):
        found += [item.idx for item in page]
    return found


def test_the_joblog_has_every_ended_run_in_the_order_of_items(job: Job):
    fail(job, 4)
    job.record([Done(4, worker="w"), Done(0)])
    assert [(idx, outcome) for idx, _, outcome, *_ in job.log()] == [(0, "done"), (4, "failed"), (4, "done")]


# ---- ending ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-43")
def test_a_fresh_start_archives_the_old_job_instead_of_wiping_it(ledger: Ledger, job: Job):
    job.record([Done(0)])
    aside = ledger.archive("ads", actor="ada")
    assert aside is not None
    assert ledger.job(aside).info().done == 1
    assert [info.id for info in ledger.jobs()] == []
    assert ledger.create("ads").info().done == 0
    assert [(actor, action) for _, actor, action, _, _ in ledger.audit_trail("ads")] == [("ada", "reset")]
    assert ledger.archive("nothing") is None


@pytest.mark.req("S3-43")
def test_forgetting_removes_every_trace_but_the_audit(ledger: Ledger, job: Job):
    fail(job, 0, times=3)
    job.record([Done(1, result='"x"', printed="y")])
    assert ledger.forget("ads", actor="ada") == 10
    for table in ("jobs", *TABLES, "causes", "minutes"):
        assert ledger.database.one(f"SELECT count(*) FROM {table}") == (0,), table
    assert [action for _, _, action, _, _ in ledger.audit_trail("ads")][-1] == "forget"
    with pytest.raises(NotFound):
        ledger.job("ads")


def test_an_item_that_is_taken_out_of_a_job_leaves_nothing_behind_and_the_others_stay(ledger: Ledger, job: Job):
    fail(job, 0, times=3)
    job.record([Done(idx, result='"x"', printed="y") for idx in (1, 2)])
    job.drop([0, 1])
    assert (job.info().total, job.info().done, job.info().dead) == (8, 1, 0)
    for table in TABLES:
        left = [row[0] for row in ledger.database.all(f"SELECT idx FROM {table} ORDER BY idx")]
        kept = {"input_products": [*range(2, 10)], "dead_letters": [], "attempts": [], "item_delays": []}
        assert left == kept.get(table, [2]), table


def test_a_job_that_runs_can_be_neither_forgotten_nor_archived(ledger: Ledger, job: Job):
    ledger.hold(job, {})
    for verb in (ledger.forget, ledger.archive):
        with pytest.raises(JobHeld):
            verb("ads")
    assert job.info().total == 10


@pytest.mark.req("S3-43")
def test_purging_takes_old_finished_jobs_and_leaves_the_rest(ledger: Ledger, job: Job):
    job.record([Done(idx) for idx in range(10)])
    running = ledger.create("running")
    running.register([NewItem(0)])
    assert ledger.purge(older_than=3600) == []
    assert ledger.purge(older_than=-1) == ["ads"]
    assert [info.id for info in ledger.jobs()] == ["running"]
    assert ("purge", "ads") in [(action, name) for _, _, action, name, _ in ledger.audit_trail()]


@contextmanager
def _meanwhile(ledger: Ledger, statement: str) -> Iterator[None]:
    """A trigger stands for another process that changes something while the first job is being deleted."""
    made = [f"CREATE TRIGGER meanwhile AFTER DELETE ON jobs BEGIN {statement}; END"]
    gone = ["DROP TRIGGER meanwhile"]
    if ledger.database.engine == "postgresql":
        body = f"$$BEGIN {statement}; RETURN NULL; END$$"
        made = [
            f"CREATE FUNCTION meanwhile() RETURNS trigger LANGUAGE plpgsql AS {body}",
            "CREATE TRIGGER meanwhile AFTER DELETE ON jobs EXECUTE FUNCTION meanwhile()",
        ]
        gone = ["DROP TRIGGER meanwhile ON jobs", "DROP FUNCTION meanwhile"]
    ledger.database.run(lambda tx: [tx.execute(one) for one in made], operation="test")
    yield
    ledger.database.run(lambda tx: [tx.execute(one) for one in gone], operation="test")


def _finished(ledger: Ledger, name: str) -> Job:
    made = ledger.create(name)
    made.register([NewItem(0)])
    made.seal()
    made.record([Done(0)])
    return made


@pytest.mark.parametrize("change", ["finished_at = NULL", "updated_at = updated_at + 3600"])
def test_purging_leaves_a_job_that_changed_while_the_others_were_deleted(ledger: Ledger, change: str):
    _finished(ledger, "a")
    changed = _finished(ledger, "b")
    with _meanwhile(ledger, f"UPDATE jobs SET {change} WHERE id = 'b'"):
        assert ledger.purge(older_than=-1) == ["a"]
    assert [item.idx for item in changed.items()] == [0]


def test_purging_keeps_a_job_recreated_under_an_old_id(ledger: Ledger):
    _finished(ledger, "a")
    _finished(ledger, "b")
    fresh = ledger.create("fresh")
    fresh.register([NewItem(0)])
    put_aside = "UPDATE jobs SET id = 'aside' WHERE id = 'b' AND finished_at IS NOT NULL"
    with _meanwhile(ledger, f"{put_aside}; UPDATE jobs SET id = 'b' WHERE id = 'fresh'"):
        ledger.purge(older_than=-1)
    assert fresh.info().id == "b"
    assert [item.idx for item in fresh.items()] == [0]


def test_purging_skips_a_running_job(ledger: Ledger):
    held = _finished(ledger, "a")
    _finished(ledger, "b")
    hold = ledger.hold(held, {})
    assert ledger.purge(older_than=-1) == ["b"]
    ledger.release(hold, "finished")
    assert ledger.purge(older_than=-1) == ["a"]


@pytest.mark.parametrize("id", ["", "a b", "../x", ".", "..", "__x__", "a/b", "x" * 129, "ä", "a\0"])
def test_a_bad_job_id_is_refused_before_anything_happens(ledger: Ledger, id: str):
    with pytest.raises(InvalidInput, match="cannot be a job id"):
        ledger.create(id)
    assert ledger.jobs() == []
