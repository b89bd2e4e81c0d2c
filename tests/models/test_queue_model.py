"""What each idea of the queue is for: without it the explorer finds a way to go wrong, with all of them none."""

from __future__ import annotations

import pytest

from tests.models.explorer import explore
from tests.models.queue import Variant, World, model

ALONE = World()
WRONG = [
    (Variant(row_first=False, sweeper=False), 0, ALONE, "an accepted task never ends"),
    (Variant(compare_and_set=False, fencing=False), 1, ALONE, "recorded twice"),
    (Variant(fencing=False), 1, ALONE, "recorded twice"),
    (Variant(sweeper=False), 1, ALONE, "an accepted task never ends"),
    (Variant(slot_in_row=False), 1, ALONE, "two active tasks of one user"),
    (Variant(looks_for_hints=False), 1, ALONE, "an accepted task never ends"),
    (Variant(promotes=False), 0, ALONE, "an accepted task never ends"),
    (Variant(pause_in_claim=False), 0, World(pauses=True), "begun although the queue is paused"),
    (Variant(limit_in_claim=False), 0, World(other=True), "more run than the limit allows"),
    (Variant(retry_takes_place=False), 0, World(by_hand=True), "two active tasks of one user"),
]
WORLDS = [
    (ALONE, 2),
    (World(restores=True), 1),
    (World(cancels=True), 1),
    (World(pauses=True), 1),
    (World(other=True), 1),
    (World(by_hand=True), 1),
]
LARGE = [
    (World(restores=True), 3),
    (World(restores=True, cancels=True), 3),
    (World(pauses=True), 2),
    (World(other=True), 2),
    (World(by_hand=True), 2),
    (World(cancels=True, by_hand=True), 1),
    (World(cancels=True, pauses=True, other=True), 1),
]


@pytest.mark.req("S2-14", "S2-20", "S2-23", "S2-33", "S2-41", "S2-46")
@pytest.mark.parametrize(("variant", "faults", "world", "problem"), WRONG)
def test_without_one_of_the_ideas_something_goes_wrong(variant: Variant, faults: int, world: World, problem: str):
    verdict = explore(model(variant, faults, world))
    assert verdict.problem == problem, verdict.trace
    assert len(verdict.trace) <= 14


@pytest.mark.req("S2-14", "S2-20", "S2-23", "S2-33", "S2-41", "S2-46")
@pytest.mark.parametrize(
    ("world", "faults"), [*WORLDS, *(pytest.param(*large, marks=pytest.mark.slow) for large in LARGE)]
)
def test_with_all_of_them_every_order_of_steps_ends_well(world: World, faults: int):
    verdict = explore(model(Variant(), faults, world))
    assert verdict.problem is None, (verdict.problem, verdict.trace)
    assert verdict.states > 100
