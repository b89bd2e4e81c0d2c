"""Items that are postponed: no attempt is counted, and the wait is in the database."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from headway._sql import Value
from headway.core.retry import LaterLimit, RetryPolicy
from headway.errors import JobHeld
from headway.ledger import Done, Failed, Failure, Job, Later, Ledger, Recorded
from headway.ledger.store.items import TABLES

NOW = RetryPolicy(2, base=0.0)
BOOM = Failure("ValueError", "boom")
_reports = count(1)


def postpone(
    job: Job, idx: int, delay: float = 60.0, reason: str = "quota", *, limit: LaterLimit | None = None
) -> Recorded:
    return job.record([Later(idx, delay, reason, next(_reports), limit=limit or LaterLimit())], policy=NOW)


def waiting_rows(job: Job) -> list[tuple[Value, ...]]:
    return job.database.all("SELECT idx, times FROM item_delays WHERE job = ? ORDER BY idx", (job.no,))


def test_a_postponed_item_waits_without_an_attempt(job: Job):
    recorded = postpone(job, 3)
    assert (recorded.postponed, recorded.failed, recorded.dead, recorded.waiting) == (1, 0, 0, 1)
    item, info = job.item(3), job.info()
    assert (item.status, item.attempts, item.error) == ("retrying", 0, "RetryLater: quota")
    assert item.next_attempt_at is not None
    assert timedelta(seconds=50) < item.next_attempt_at - datetime.now(UTC) < timedelta(seconds=61)
    assert (info.failures, info.failed, info.done, info.remaining) == (0, 1, 0, 10)
    assert job.history(3) == []
    assert 3 not in [each.idx for each in job.untouched(-1, 100)]
    assert [(each.idx, left > 50) for each, left in job.due(10, within=100)] == [(3, True)]
    assert job.due(10) == []


def test_it_is_due_when_its_time_has_come(job: Job):
    postpone(job, 3, 0.0)
    assert [each.idx for each, _ in job.due(10)] == [3]
    assert [item.idx for item in job.claim("w", limit=1)] == [3]


def test_an_item_that_failed_before_keeps_its_attempts(job: Job):
    job.record([Failed(3, BOOM)], policy=NOW)
    postpone(job, 3)
    assert (job.item(3).attempts, job.info().failed) == (1, 1)
    job.record([Failed(3, BOOM, seen=1)], policy=NOW)
    assert (job.item(3).attempts, job.item(3).error) == (2, "ValueError: boom")


def test_a_repeated_report_postpones_once(job: Job):
    outcome = Later(3, 60.0, "quota", 7)
    assert job.record([outcome]).postponed == 1
    again = job.record([outcome, outcome])
    assert (again.postponed, again.repeated) == (0, 2)
    assert waiting_rows(job) == [(3, 1)]
    assert job.info().failed == 1


def test_a_success_afterwards_forgets_the_delay(job: Job):
    postpone(job, 3, 0.0)
    recorded = job.record([Done(3), Done(4)])
    assert (recorded.done, job.info().done, job.info().failed) == (2, 2, 0)
    assert waiting_rows(job) == []
    assert postpone(job, 3).repeated == 1, "done is final"


def test_more_postponements_than_the_limit_are_a_dead_letter_with_the_reason(job: Job):
    limit = LaterLimit(2, 100)
    assert [postpone(job, 3, 0.0, limit=limit).postponed for _ in range(2)] == [1, 1]
    recorded = postpone(job, 3, 0.0, "quota", limit=limit)
    assert (recorded.postponed, recorded.died) == (0, [3])
    item = job.item(3)
    assert (item.status, item.attempts) == ("dead", 1)
    assert item.error is not None
    assert item.error.startswith("RetryLater: quota (postponed 2 times in ")
    assert item.error.endswith(" s, the limit is 2/100s)")
    assert job.last_pass(10) == [], "another pass would be one more call"
    assert (job.info().failed, job.info().dead) == (0, 1)


def test_an_item_may_be_postponed_for_so_long_only(job: Job):
    postpone(job, 3, 0.0)
    job.database.run(lambda tx: tx.execute("UPDATE item_delays SET since = since - 90"), operation="test")
    assert postpone(job, 3, 0.0, limit=LaterLimit(100, 100)).postponed == 1
    assert postpone(job, 3, 0.0, limit=LaterLimit(100, 80)).died == [3]


def test_a_retried_dead_letter_may_be_postponed_as_often_again(job: Job):
    limit = LaterLimit(1, 100)
    for _ in range(2):
        postpone(job, 3, 0.0, limit=limit)
    assert job.item(3).status == "dead"
    job.retry_dead()
    assert postpone(job, 3, 0.0, limit=limit).postponed == 1


def test_a_dead_letter_postponed_in_its_last_pass_gets_no_other(job: Job):
    job.record([Failed(3, BOOM)], policy=RetryPolicy(0))
    for _ in range(2):
        job.record([Failed(3, BOOM)], policy=NOW)
    assert [item.idx for item in job.last_pass(10)] == [3]
    postpone(job, 3, 0.0)
    info = job.info()
    assert (info.dead, info.failed, job.item(3).status) == (0, 1, "retrying")
    assert job.record([Failed(3, BOOM)], policy=NOW).died == [3]
    assert (job.info().dead, job.info().failed, job.last_pass(10)) == (1, 0, [])


def test_a_batch_of_all_kinds_counts_each_once(job: Job):
    recorded = job.record([Done(0), Later(1, 9.0, "", 1), Failed(2, BOOM), Later(3, 0.0, "x", 2)], policy=NOW)
    assert (recorded.done, recorded.failed, recorded.postponed, recorded.waiting) == (1, 1, 2, 3)
    assert set(recorded.due) == {1, 2, 3}
    info = job.info()
    assert (info.done, info.failed, info.failures) == (1, 3, 1)


def test_the_job_knows_how_many_wait_and_why(job: Job):
    assert job.postponed() is None
    postpone(job, 1, 300.0, "slow")
    postpone(job, 2, 60.0, "quota")
    postpone(job, 3, 0.0, "past")
    found = job.postponed()
    assert found is not None
    assert (found.items, found.reason) == (2, "quota")


# ---- the wait of a job ------------------------------------------------------------------------------------------------


def test_a_job_waits_until_the_latest_time_with_its_reason(job: Job):
    assert (job.info().wait_until, job.asked(1).wait) == (None, 0.0)
    job.record([Later(1, 600.0, "quota is used up", 1, whole_job=True)])
    job.record([Later(2, 60.0, "shorter", 2, whole_job=True)])
    info, asked = job.info(), job.asked(1)
    assert info.wait_until is not None
    assert info.wait_until - datetime.now(UTC) > timedelta(seconds=550)
    assert (info.wait_reason, asked.wait_reason) == ("quota is used up", "quota is used up")
    assert 550 < asked.wait <= 600


def test_the_wait_of_a_job_is_over_by_itself(job: Job):
    job.record([Later(1, 0.0, "short", 1, whole_job=True)])
    assert (job.info().wait_until, job.info().wait_reason, job.asked(1).wait) == (None, "", 0.0)


def test_a_wait_from_before_the_clock_was_set_back_does_not_hold(job: Job):
    job.record([Later(1, 600.0, "quota", 1, whole_job=True)])
    job.database.run(
        lambda tx: tx.execute("UPDATE jobs SET wait_since = wait_since + 3600, wait_until = wait_until + 3600")
    )
    assert (job.info().wait_until, job.asked(1).wait) == (None, 0.0)
    job.record([Later(2, 60.0, "again", 2, whole_job=True)])
    assert 50 < job.asked(1).wait <= 60


def test_the_next_holder_of_a_job_finds_its_wait_and_its_delays(ledger: Ledger, job: Job):
    hold = ledger.hold(job, {})
    job.record([Later(1, 600.0, "quota", 1, whole_job=True)], hold=hold)
    with pytest.raises(JobHeld):
        ledger.hold(job, {})
    ledger.release(hold, "interrupted")
    again = ledger.hold(job, {})
    assert job.asked(again.run).wait > 550
    assert [each.idx for each, _ in job.due(10, within=10**6)] == [1]
    ledger.release(again, "interrupted")


# ---- everything about an item goes with it ----------------------------------------------------------------------------


def test_dropped_and_replaced_items_leave_no_delay(job: Job):
    assert "item_delays" in TABLES
    postpone(job, 1)
    postpone(job, 2)
    job.drop([1])
    assert waiting_rows(job) == [(2, 1)]


@pytest.mark.parametrize("text", ["", 'it\'s "odd" é😀 %s ?'])
def test_any_reason_comes_back_as_it_was(job: Job, text: str):
    postpone(job, 3, 60.0, text)
    assert job.item(3).error == f"RetryLater: {text}"


def test_two_thousand_postponements_are_recorded_in_one_batch(ledger: Ledger):
    many = 2_000
    job = ledger.create("many")
    began = time.monotonic()
    recorded = job.record([Later(idx, 60.0, "quota", idx) for idx in range(many)], register=True)
    assert (recorded.postponed, job.info().failed) == (many, many)
    assert time.monotonic() - began < 10
