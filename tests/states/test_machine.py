"""One state machine over every store: whatever is done in whatever order, all of them behave as one dictionary."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headway import states
from headway.states import LiveStore, State, Subscription
from tests.services.waiting import eventually
from tests.states.conftest import Place

Key = tuple[int, str]
keys = st.tuples(st.integers(0, 1), st.sampled_from("ab"))


class Stores(RuleBasedStateMachine):
    """Two stores of one job, as two processes would have; the model is a dictionary of versions and statuses."""

    place: Place
    alone: bool  # the store in memory has no second one

    @initialize()
    def begin(self) -> None:
        self.job = uuid4().hex
        self.model: dict[Key, tuple[int, int]] = {}
        self.events: dict[Key, str] = {}
        self.stores = [self.opened()] * 2 if self.alone else [self.opened(), self.opened()]
        self.readers: list[tuple[Subscription, dict[Key, int]]] = []

    def opened(self) -> LiveStore:
        return self.place.open(self.job, 2)

    @rule(who=st.integers(0, 1), key=keys, status=st.integers(-3, 9))
    def put(self, who: int, key: Key, status: int) -> None:
        stored = self.stores[who].set_state(State(self.job, *key, status))
        version = self.model.get(key, (0, 0))[0] + 1
        assert (stored.version, stored.status) == (version, status)
        self.model[key] = (version, status)
        self.events[key] = stored.event_id

    @precondition(lambda self: self.events)
    @rule(who=st.integers(0, 1), data=st.data())
    def put_again(self, who: int, data: Any) -> None:
        key: Key = data.draw(st.sampled_from(sorted(self.events)))
        stored = self.stores[who].set_state(State(self.job, key[0], key[1], 77, event_id=self.events[key]))
        assert (stored.version, stored.status) == self.model[key]

    @precondition(lambda self: len(self.readers) < 3)
    @rule(who=st.integers(0, 1))
    def subscribe(self, who: int) -> None:
        self.readers.append((self.stores[who].subscribe(depth=4), {}))

    @precondition(lambda self: self.readers)
    @rule()
    def unsubscribe(self) -> None:
        self.readers.pop(0)[0].close()

    @rule(who=st.integers(0, 1))
    def disconnect(self, who: int) -> None:
        """The store comes back as a new one; its subscribers are told that it ended."""
        if self.alone:
            return
        gone = self.stores[who]
        self.readers = [
            (reader, seen) for reader, seen in self.readers if reader in self.stores[1 - who]._cache.subscriptions
        ]
        gone.close()
        self.stores[who] = self.opened()

    @precondition(lambda self: self.readers and self.model)
    @rule()
    def readers_catch_up(self) -> None:
        for reader, seen in self.readers:
            while any(seen.get(key, 0) < version for key, (version, _) in self.model.items()):
                state = reader.get(60).state
                if state is not None:
                    assert state.version > seen.get(state.key, 0), "versions grow"
                    assert state.version <= self.model[state.key][0]
                    seen[state.key] = state.version

    @invariant()
    def every_store_comes_to_show_the_same(self) -> None:
        for store in {id(store): store for store in self.stores}.values():
            eventually(lambda store=store: self.shown(store) == self.model, 60)  # type: ignore[misc]

    def shown(self, store: LiveStore) -> dict[Key, tuple[int, int]]:
        return {state.key: (state.version, state.status) for state in store.list_all_states()}

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        if not self.alone:
            states.delete_job(self.place.url, self.job)


@pytest.mark.req("S1-10", "S1-50", "S1-51", "S1-54", "S1-65")
def test_every_store_behaves_as_one_dictionary_of_versions_whatever_is_done(place: Place):
    examine(place, {"firestore": 1, "postgresql": 2}.get(place.kind, 4))


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_store_behaves_as_one_dictionary_of_versions_in_many_more_orders(place: Place):
    examine(place, {"firestore": 5, "postgresql": 10}.get(place.kind, 50))


def examine(place: Place, examples: int) -> None:
    machine = type("Machine", (Stores,), {"place": place, "alone": place.kind == "memory"})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
