"""What each idea of the queue is for: without it the explorer finds a way to go wrong, with all of them none."""

from __future__ import annotations

import pytest

from tests.models.explorer import explore
from tests.models.queue import Variant, model

WRONG = [
    (Variant(row_first=False, sweeper=False), 0, "an accepted task never ends"),
    (Variant(compare_and_set=False, fencing=False), 1, "recorded twice"),
    (Variant(fencing=False), 1, "recorded twice"),
    (Variant(sweeper=False), 1, "an accepted task never ends"),
    (Variant(slot_in_row=False), 1, "two active tasks of one user"),
]


@pytest.mark.req("S2-14", "S2-20", "S2-23", "S2-33")
@pytest.mark.parametrize(("variant", "faults", "problem"), WRONG)
def test_without_one_of_the_ideas_something_goes_wrong(variant: Variant, faults: int, problem: str):
    verdict = explore(model(variant, faults, cancels=False))
    assert verdict.problem == problem, verdict.trace
    assert len(verdict.trace) <= 12


@pytest.mark.req("S2-14", "S2-20", "S2-23", "S2-33")
@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("faults", range(4))
def test_with_all_of_them_every_order_of_steps_ends_well(faults: int, cancels: bool):
    verdict = explore(model(Variant(), faults, cancels=cancels))
    assert verdict.problem is None, (verdict.problem, verdict.trace)
    assert verdict.states > 20
