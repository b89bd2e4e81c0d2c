"""Many rows by one statement: whatever the texts are, and whatever is among the outcomes."""

from __future__ import annotations

from enum import IntEnum

import pytest

from headway._sql import array
from headway.ledger import Done, Job, Ledger, NewItem

ODD = ["", "NULL", "null", '"', "\\", '\\"', "{", "}", ",", "a,b", " lead", "{1,2}", "\n", "\t", "é😀", "'", "%s", "?"]


def test_odd_texts_come_back_as_they_were(ledger: Ledger) -> None:
    job = ledger.create("odd")
    assert job.register(NewItem(idx, f'"{idx}"', key=text or "empty") for idx, text in enumerate(ODD)) == len(ODD)
    job.seal()
    job.record([Done(idx, text, text, 0.5, text, printed=text) for idx, text in enumerate(ODD)])
    for idx, text in enumerate(ODD):
        found = job.item(idx)
        assert (found.key, found.meta, found.worker, found.seconds) == (text or "empty", text, text, 0.5)
    assert [result for _, _, _, result in job.results()] == ODD


class Number(IntEnum):
    TWO = 2


class Share(float):
    def __repr__(self) -> str:
        return "much"


class Name(str):
    __slots__ = ()

    def replace(self, *_: object) -> str:
        return "another"


def test_subclasses_of_numbers_and_texts_are_written_by_value() -> None:
    assert array([Number.TWO, True, Share(0.5), Name('a"b'), None]) == '{2,1,0.5,"a\\"b",NULL}'
    assert [array([value, value]) for value in (Number.TWO, True, Share(0.5))] == ["{2,2}", "{1,1}", "{0.5,0.5}"]


def test_a_column_of_one_kind_is_written_as_one_of_several_is() -> None:
    for value in (7, -(2**63), 1e-6, float("inf"), None, "a"):
        assert array([value, value]) == array([value, value, "x"]).replace(',"x"}', "}")
    assert array([]) == "{}"


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


def test_a_batch_with_an_item_that_is_done_already_counts_the_others(job: Job) -> None:
    job.record([Done(3)])
    recorded = job.record([Done(2), Done(3, "again"), Done(4)])
    assert (recorded.done, recorded.repeated) == (2, 1)
    assert job.item(3).meta is None
    assert job.progress().done == 3


def test_a_batch_that_names_an_item_twice_counts_it_once(job: Job) -> None:
    recorded = job.record([Done(1, "first"), Done(1, "second")])
    assert (recorded.done, recorded.repeated) == (1, 1)
    assert job.progress().done == 1


def test_a_batch_with_an_unknown_item_changes_nothing(job: Job) -> None:
    from headway.errors import NotFound

    with pytest.raises(NotFound, match="99"):
        job.record([Done(1), Done(99)])
    assert job.progress().done == 0
