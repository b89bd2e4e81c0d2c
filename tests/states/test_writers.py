"""Event ids of several writers of one key: each is recognised by itself, and by nothing that stands beside it."""

from __future__ import annotations

import pytest

from headway.states import State
from tests.states.conftest import ISOLATING, Place


@pytest.mark.req("S1-54")
@pytest.mark.timeout(60)
@pytest.mark.stores(ISOLATING)
def test_an_event_id_that_is_a_number_is_not_taken_for_a_version_that_another_writer_had(place: Place):
    first, second = place.open(), place.open()
    for status in (1, 2, 3):
        first.set_state(State("job", 0, "a", status, event_id=f"e{status}"))
    second.set_state(State("job", 0, "a", 4, event_id="e4"))  # beside it stands what the first one wrote: version 3
    stored = second.set_state(State("job", 0, "a", 5, event_id="3"))
    assert (stored.version, stored.status) == (5, 5)
    assert place.open().get_state(0, "a").status == 5
    assert first.set_state(State("job", 0, "a", 3, event_id="e3")).version == 3, "this one is a repetition"


@pytest.mark.req("S1-54")
@pytest.mark.timeout(60)
@pytest.mark.stores(("sqlite", "postgresql", "redis"))
def test_the_record_of_writers_is_cut_between_entries(place: Place):
    store = place.open()
    versions = set()
    for length in range(20, 70):  # somewhere among these the limit falls on each character of the oldest one
        events = ["x" * length, *(f"{'z' * 100}{number:02d}" for number in range(8))]
        for number, event in enumerate(events):
            store._writer = f"writer{number:06d}"  # as if it were another process
            store.set_state(State("job", 0, f"tag-{length}", number, event_id=event))
        again = store.set_state(State("job", 0, f"tag-{length}", 0, event_id=events[0]))
        versions.add(again.version)
    assert versions == {1, len(events) + 1}, "the first try's answer, or a write of its own"
