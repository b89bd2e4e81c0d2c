"""A standby of PostgreSQL, which can be read and tells nobody anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.errors import StoreReadOnly
from headway.states import State, open_store
from tests.services.postgres import PostgresServer
from tests.states.conftest import replayed


def test_the_states_of_a_job_are_read_and_followed_on_a_standby(
    postgres_factory: Callable[..., PostgresServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.states.store.sql.HEARTBEAT", 0.1)
    server = postgres_factory()
    store, _ = open_store(server.url(), "job", 2)
    store.set_state(State("job", 0, "a", 7))
    store.close()
    server.stop()
    signal = server.directory / "data" / "standby.signal"
    signal.touch()
    server.start()
    monitor, tasks = open_store(server.url(), "job")
    try:
        assert tasks == 2
        assert monitor.get_state(0, "a").status == 7
        subscription = monitor.subscribe()
        assert [state.status for state in replayed(subscription)] == [7]
        with pytest.raises(TimeoutError):
            subscription.get(1)  # it looks again and again, and there is nothing new
        assert monitor.fresh
        with pytest.raises(StoreReadOnly):
            monitor.set_state(State("job", 0, "a", 8))
    finally:
        monitor.close()
