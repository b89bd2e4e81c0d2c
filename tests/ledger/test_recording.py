"""Recording batches: any size, any mixture of outcomes, any text."""

from __future__ import annotations

import pytest

from headway.core.retry import RetryPolicy
from headway.errors import NotFound
from headway.ledger import Done, Failed, Failure, Job, Ledger, NewItem

AT_ONCE = RetryPolicy(0, base=0.0)
BOOM = Failure("ValueError", "boom")
ODD = ["", "NULL", "null", '"', "\\", '\\"', "{", "}", ",", "a,b", " lead", "{1,2}", "\n", "\t", "é😀", "'", "%s", "?"]


@pytest.fixture
def job(ledger: Ledger) -> Job:
    made = ledger.create("batches")
    made.register(NewItem(idx) for idx in range(200))
    made.seal()
    return made


@pytest.mark.req("S3-02")
def test_a_batch_may_have_more_items_than_a_statement_has_parameters(ledger: Ledger):
    many = 33_000 if ledger.database.engine == "sqlite" else 5_000  # the limits are 32,766 and 65,535
    job = ledger.create("large")
    recorded = job.record([Done(idx) for idx in range(many)], register=True)
    assert (recorded.done, job.info().total, job.info().done) == (many, many, many)
    assert job.record([Done(idx) for idx in range(many)]).repeated == many


def test_an_item_that_is_in_a_batch_twice_counts_once(job: Job):
    recorded = job.record([Done(7), Done(8), Done(7, "second")])
    assert (recorded.done, recorded.repeated, job.info().done) == (2, 1, 2)


def test_a_batch_of_fresh_items_with_one_that_is_done_already_counts_the_fresh_ones(job: Job):
    job.record([Done(7)])
    recorded = job.record([Done(idx, "again") for idx in range(120)])
    assert (recorded.done, recorded.repeated, job.info().done) == (119, 1, 120)
    assert job.item(7).meta is None


def test_successes_beside_failures_and_a_rescued_dead_letter(job: Job):
    job.record([Failed(3, BOOM, retryable=False), Failed(4, BOOM)], policy=AT_ONCE)
    recorded = job.record([*(Done(idx) for idx in range(100)), Failed(100, BOOM)], policy=AT_ONCE)
    info = job.info()
    assert (recorded.done, recorded.failed) == (100, 1)
    assert (info.done, info.failed, info.dead, info.failures) == (100, 1, 0, 3)


def test_an_unknown_item_in_a_batch_records_nothing_of_it(job: Job):
    with pytest.raises(NotFound, match="200"):
        job.record([Done(199), Done(200)])
    assert job.info().done == 0


def test_odd_texts_come_back_as_they_were(ledger: Ledger) -> None:
    job = ledger.create("odd")
    assert job.register(NewItem(idx, f'"{idx}"', key=text or "empty") for idx, text in enumerate(ODD)) == len(ODD)
    job.seal()
    job.record([Done(idx, text, text, 0.5, text, printed=text) for idx, text in enumerate(ODD)])
    for idx, text in enumerate(ODD):
        found = job.item(idx)
        assert (found.key, found.meta, found.worker, found.seconds) == (text or "empty", text, text, 0.5)
    assert [result for _, _, _, result in job.results()] == ODD


def test_a_column_may_be_empty_here_and_full_there(ledger: Ledger) -> None:
    job = ledger.create("mixed")
    job.register([NewItem(0, "1"), NewItem(1), NewItem(2, "3", "c", 7)])
    job.seal()
    job.record([Done(0, None, None, None, None), Done(1, "m", None, 1.5, "w", unkept=True), Done(2, None, "[]")])
    assert [(job.item(idx).meta, job.item(idx).seconds, job.item(idx).worker) for idx in range(3)] == [
        (None, None, None),
        ("m", 1.5, "w"),
        (None, None, None),
    ]
    assert job.unkept_results() == 1
