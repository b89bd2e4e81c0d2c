"""What each idea of the finish line is for: without it the explorer finds a way to go wrong, with all of them none."""

from __future__ import annotations

import pytest

from tests.models.explorer import Model, explore
from tests.models.finishline import Variant, model

WRONG = [
    (Variant(one_script=False, identity=False, outbox=False, crawl_end_checks=False), 0, "never told"),
    (Variant(one_script=False, identity=False, outbox=False), 0, "decided twice"),
    (Variant(crawl_end_checks=False), 0, "never told"),
    (Variant(identity=False, outbox=False), 1, "complete too early"),
    (Variant(identity=False), 1, "complete too early"),
    (Variant(outbox=False), 1, "never told"),
    (Variant(wipes=True), 1, "never told"),
]

RIGHT = [
    (Variant(), 3),
    (Variant(outbox=False), 0),
    (Variant(identity=False), 0),
    (Variant(journal=True), 3),
    (Variant(journal=True, wipes=True), 3),
]


@pytest.mark.req("S0-16", "S0-17")
@pytest.mark.parametrize(("variant", "faults", "problem"), WRONG)
def test_without_one_of_the_ideas_something_goes_wrong(variant: Variant, faults: int, problem: str):
    verdict = explore(model(variant, faults))
    assert verdict.problem == problem
    assert len(verdict.trace) <= 14


@pytest.mark.req("S0-16", "S0-17")
@pytest.mark.parametrize(("variant", "faults"), RIGHT)
def test_with_all_of_them_every_order_of_steps_ends_well(variant: Variant, faults: int):
    verdict = explore(model(variant, faults))
    assert verdict.problem is None, " -> ".join(verdict.trace)
    assert verdict.states > 15


def test_the_explorer_finds_a_shortest_way():
    counter: Model[int] = Model(
        0,
        lambda number: [("one", number + 1), ("two", number + 2)],
        lambda number: "four" if number == 4 else None,
        lambda number: None,
    )
    assert explore(counter).trace == ("two", "two")


def test_the_explorer_notices_an_end_that_is_no_good():
    stuck: Model[int] = Model(0, lambda n: [("go", 1)] if n == 0 else [], lambda n: None, lambda n: "stuck")
    assert explore(stuck).problem == "stuck"
