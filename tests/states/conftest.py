"""The stores under test, each as an address that nobody else uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from headway.core.retry import RetryPolicy
from headway.states import LiveStore, Manager, State, StateEvent, Subscription, open_store
from tests.services.postgres import PostgresServer
from tests.services.waiting import eventually

#: Every kind of store. The one in memory belongs to one process and one store.
EVERY = ("memory", "sqlite", "postgresql", "redis", "firestore")
#: Those that several stores, or processes, can open.
SHARED = EVERY[1:]
#: Those that keep the writers of different processes apart. The Firestore emulator from npm does not isolate
#: transactions (tests/services/firestore.py): with it a test marked with these is skipped for Firestore, and says so.
ISOLATING = ("sqlite", "postgresql", "redis", "firestore")
#: Those whose listener follows a numbered log.
LOGGED = ("sqlite", "postgresql", "redis")
#: Those reached over TCP, with a listener that can be cut off.
NETWORKED = ("postgresql", "redis", "firestore")

#: Like `headway.core.retry.LISTENER`, for tests that cannot wait for it.
QUICK = RetryPolicy(retries=5, base=0.01, cap=0.05)


@dataclass(frozen=True)
class Place:
    """A store's address and how to open it."""

    kind: str
    url: str
    opened: list[LiveStore]

    def open(self, job_id: str = "job", num_tasks: int | None = 3, **options: object) -> LiveStore:
        store, _ = open_store(self.url, job_id, num_tasks, **({"retry": QUICK} | options))  # type: ignore[arg-type]
        self.opened.append(store)
        return store

    def manager(self, task_index: int = 0, num_tasks: int = 3, job_id: str = "job") -> Manager:
        """A manager with a store of its own, as another process would have."""
        return Manager(job_id, task_index, num_tasks, self.open(job_id, num_tasks))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stores(kinds): the kinds of store this test is about, if not all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`place` is every store, unless the test is marked `stores(...)` with those it is about."""
    if "place" in metafunc.fixturenames and not _given(metafunc):
        mark = metafunc.definition.get_closest_marker("stores")
        metafunc.parametrize("place", mark.args[0] if mark else EVERY, indirect=True)


def _given(metafunc: pytest.Metafunc) -> bool:
    """Whether the test says the stores itself, with something else of each."""
    return any("place" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))


@pytest.fixture(autouse=True)
def no_listener_is_left_over() -> Iterator[None]:
    """Fail a test that leaves a listener running: it would log and count in the tests that follow.

    A `close` that is called from within a call ends in a thread of its own, some moments later.
    """
    yield

    def all_ended() -> bool:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("headway-states-")]
        assert left == [], "close every store that was opened"
        return True

    eventually(all_ended, 20, "no listener is left over: close every store that was opened")


@pytest.fixture(scope="session")
def _database_of_states() -> list[str]:
    """The name of the PostgreSQL database that the tests of this process use one after another."""
    return []


def emptied(server: PostgresServer, kept: list[str]) -> str:
    """A database without jobs. Making one, and our tables in it, takes a hundred times as long as emptying them."""
    if kept:
        with psycopg.connect(server.url(kept[0]), autocommit=True) as connection, suppress(psycopg.Error):
            connection.execute("SET lock_timeout = '5s'")
            connection.execute("DELETE FROM headway.state_jobs")  # their states, logs and history go with them
            return server.url(kept[0])
    kept[:] = [server.create_database()]  # the first, or the last test dropped the schema
    return server.url(kept[0])


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    mark = request.node.get_closest_marker("stores")
    if kind == "firestore" and mark is not None and mark.args[0] is ISOLATING:
        emulator = request.getfixturevalue("firestore_emulator")
        if not emulator.isolates_transactions:
            pytest.skip(
                "this Firestore emulator does not isolate transactions; Google's does: gcloud components install"
            )
    url = {
        "memory": lambda: "sqlite:///:memory:",
        "sqlite": lambda: f"sqlite:///{tmp_path / 'states.db'}",
        "postgresql": lambda: emptied(
            request.getfixturevalue("postgres_server"), request.getfixturevalue("_database_of_states")
        ),
        "redis": lambda: request.getfixturevalue("redis_server").url(1),
        "firestore": lambda: "firestore://" + request.getfixturevalue("firestore_emulator").new_project(),
    }[kind]()
    place = Place(kind, url, [])
    yield place
    for store in place.opened:
        store.close()


@pytest.fixture
def store(place: Place) -> LiveStore:
    return place.open()


@pytest.fixture
def managers(store: LiveStore) -> list[Manager]:
    """One manager per task, on one store."""
    return [Manager("job", task, 3, store) for task in range(3)]


def take(subscription: Subscription, count: int, timeout: float = 60) -> list[StateEvent]:
    return [subscription.get(timeout) for _ in range(count)]


def replayed(subscription: Subscription) -> list[State]:
    """What stands, up to and without the sentinel."""
    states = []
    while (event := subscription.get(60)).state is not None:
        assert event.replay
        states.append(event.state)
    return states


def live(subscription: Subscription, count: int = 1) -> list[State]:
    """The next changes."""
    events = take(subscription, count)
    assert not any(event.replay for event in events)
    return [event.state for event in events if event.state is not None]


def sees(store: LiveStore, task_id: int, tag: str, version: int) -> State:
    """The state of a key, once another store's write has arrived here."""

    def arrived() -> State | None:
        state = store.get_state(task_id, tag)
        return state if state.version >= version else None

    return eventually(arrived, 60)
