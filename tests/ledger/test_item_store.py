"""The contract of `ItemStore`, on every engine. What is above it is tested through `Job`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import headway.ledger
from headway._sql import Tx
from headway.ledger import Done, Failed, Failure, Job, Ledger
from headway.ledger.store.contract import ItemStore, Prior, TriedBefore, item_store

BOOM = Failure("ValueError", "boom")


@pytest.fixture
def store(ledger: Ledger) -> ItemStore:
    return item_store(ledger.database.engine)


def insert_done(ledger: Ledger, store: ItemStore, job: Job, outcomes: list[Done]) -> bool:
    """Insert successes and commit, unless the store asks for a rollback."""
    try:
        return ledger.database.run(lambda tx: store.insert_done(tx, job.no, tx.now(), outcomes))
    except TriedBefore:
        return False


def done(ledger: Ledger) -> list[int]:
    return [idx for (idx,) in ledger.database.all("SELECT idx FROM progress WHERE status = 'done' ORDER BY idx")]


def test_successes_of_untried_items_are_inserted_with_results_and_output(ledger: Ledger, store: ItemStore, job: Job):
    assert insert_done(ledger, store, job, [Done(1, "m", "[1]", 0.5, "w", printed="out"), Done(2, unkept=True)])
    assert done(ledger) == [1, 2]
    assert ledger.database.all("SELECT idx, result FROM results") == [(1, "[1]")]
    assert ledger.database.all("SELECT idx, text FROM printed") == [(1, "out")]
    assert ledger.database.all("SELECT unkept FROM progress ORDER BY idx") == [(None,), (1,)]


@pytest.mark.parametrize(
    "outcomes", [[Done(1), Done(3)], [Done(1), Done(1)], [Done(1), Done(99)]], ids=["tried", "twice", "unknown"]
)
def test_no_success_is_inserted_if_one_of_the_batch_is_tried_repeated_or_unknown(
    ledger: Ledger, store: ItemStore, job: Job, outcomes: list[Done]
):
    job.record([Failed(3, BOOM)])
    assert not insert_done(ledger, store, job, outcomes)
    assert done(ledger) == []


def test_a_single_success_is_recorded_with_its_counters_or_not_at_all(ledger: Ledger, store: ItemStore, job: Job):
    job.record([Failed(3, BOOM)])  # also begins the current minute
    before = job.info()
    recorded = [store.record_one(ledger.database, job.no, Done(idx), register=False) for idx in (1, 1, 3, 99)]
    assert recorded in ([True, False, False, False], [False] * 4)
    assert job.info().done == before.done + sum(recorded) == len(done(ledger))
    assert job.info().total == before.total


def test_the_prior_states_of_items_are_complete_and_unknown_items_are_missing(
    ledger: Ledger, store: ItemStore, job: Job
):
    job.record([Done(1), Failed(2, BOOM), Failed(3, BOOM, retryable=False)])
    found = ledger.database.run(lambda tx: store.prior_states(tx, job.no, [0, 1, 2, 3, 99]))
    assert found == {
        0: Prior(None, None, 0, None, None, dead=False),
        1: Prior(None, "done", 0, None, None, dead=False),
        2: Prior(None, "failed", 1, None, None, dead=False),
        3: Prior(None, "failed", 1, None, None, dead=True),
    }


def test_progress_rows_are_found_by_index(ledger: Ledger, store: ItemStore, job: Job):
    job.record([Done(1), Done(4)])
    with ledger.database.read() as tx:
        assert sorted(store.progress_at(tx, "idx, status", job.no, [0, 1, 4])) == [(1, "done"), (4, "done")]


def test_the_number_of_a_deleted_job_is_not_used_again(ledger: Ledger, store: ItemStore):
    def retire(tx: Tx) -> None:
        store.retire_number(tx, numbers[-1])
        tx.execute("DELETE FROM jobs WHERE no = ?", (numbers[-1],))

    numbers = [ledger.create("first").no, ledger.create("second").no]
    ledger.database.run(retire)
    assert ledger.create("third").no > numbers[-1]


@pytest.mark.parametrize(
    "pattern", [r"\b(?:SELECT|INSERT INTO|UPDATE \w+ SET|DELETE FROM)\b", r"\bengine\b\s*(?:==|!=|in\b)"]
)
def test_modules_above_the_stores_contain_no_sql_and_no_engine(pattern: str):
    room = Path(headway.ledger.__file__).parent
    above = [path for path in room.rglob("*.py") if "store" not in path.relative_to(room).with_suffix("").parts]
    assert len(above) > 8
    found = [path.name for path in above if re.search(pattern, path.read_text())]
    assert found == []
