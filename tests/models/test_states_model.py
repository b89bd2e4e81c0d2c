"""What each idea of a subscription is for: without it the explorer finds a way to go wrong, with all of them none."""

from __future__ import annotations

import pytest

from tests.models.explorer import explore
from tests.models.states import LifeVariant, Variant, lives, model

WRONG = [
    (Variant(subscribe_first=False), 0, "the last version was missed"),
    (Variant(dedupe=False), 0, "a version was told twice"),
    (Variant(relist=False), 1, "the last version was missed"),
]


@pytest.mark.req("S1-23", "S1-46", "S1-51")
@pytest.mark.parametrize(("variant", "drops", "problem"), WRONG)
def test_without_one_of_the_ideas_a_version_is_missed_or_told_twice(variant: Variant, drops: int, problem: str):
    verdict = explore(model(variant, drops=drops))
    assert verdict.problem == problem
    assert len(verdict.trace) <= 7


@pytest.mark.req("S1-23", "S1-46", "S1-51")
@pytest.mark.parametrize("drops", [0, 1, 2, 3])
def test_subscribing_first_listing_at_every_connect_and_deduping_by_version_always_ends_at_the_last(drops: int):
    verdict = explore(model(Variant(), drops=drops))
    assert verdict.problem is None, " -> ".join(verdict.trace)
    assert verdict.states > 10


@pytest.mark.req("S1-46", "S1-50")
@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        (LifeVariant(fence=False), "a state was written into another life"),
        (LifeVariant(compare_incarnation=False), "the reader believes what is no longer so"),
        (LifeVariant(compare_past=False), "the reader believes what is no longer so"),
    ],
)
def test_without_one_of_the_comparisons_a_deleted_or_restored_job_is_taken_for_what_it_was(
    variant: LifeVariant, problem: str
):
    verdict = explore(lives(variant))
    assert verdict.problem == problem


@pytest.mark.req("S1-46", "S1-50")
@pytest.mark.parametrize("faults", [0, 1, 2])
def test_with_all_of_them_no_past_touches_the_present_and_every_reader_is_right_or_told(faults: int):
    verdict = explore(lives(LifeVariant(), writes=4, faults=faults))
    assert verdict.problem is None, " -> ".join(verdict.trace)
    assert verdict.states > 5
