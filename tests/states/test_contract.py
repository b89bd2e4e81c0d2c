"""What every store does alike. Each test runs on each kind of store."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headway import _redis, states
from headway.errors import HeadwayError, InvalidInput, NotFound, Refused, StoreReadOnly, Unavailable
from headway.events import Json
from headway.states import ERROR, FINISHED, STARTED, LiveStore, Manager, State, Store
from headway.states.subscription import DEPTH
from headway.telemetry import metrics
from tests.services.waiting import eventually
from tests.states.conftest import ISOLATING, LOGGED, SHARED, Place, live, replayed, sees, take

# ---- one state --------------------------------------------------------------------------------------------------


@pytest.mark.req("S1-08", "S1-10", "S1-19")
def test_a_state_comes_back_as_it_was_written(store: LiveStore):
    payload: dict[str, Json] = {
        "rows": 12,
        "ratio": 0.25,
        "none": None,
        "yes": True,
        "nested": {"list": [1, "zwölf", {"a": -0.5}]},
    }
    sent = State("job", 1, "ingest.part-2", 17, "on it ✓", payload=payload, event_id="e-1", schema_version=3)

    stored = store.set_state(sent)

    assert replace(stored, timestamp=None, version=0) == sent
    assert stored.version == 1
    assert store.get_state(1, "ingest.part-2") == stored
    assert isinstance(store, Store)


@pytest.mark.req("S1-08", "S1-42")
@pytest.mark.stores(SHARED)
def test_a_state_comes_back_the_same_in_another_store(place: Place):
    payload: dict[str, Json] = {"n": 2**60, "f": 1e-7, "t": "é\n"}
    written = place.open().set_state(State("job", 0, "a", 5, "m", payload=payload, schema_version=3))
    assert place.open().get_state(0, "a") == written


@pytest.mark.req("S1-09")
def test_the_timestamp_comes_from_the_store_and_is_utc(store: LiveStore):
    lie = datetime(2000, 1, 1, tzinfo=UTC)
    before = datetime.now(UTC)
    stored = store.set_state(State("job", 0, "a", timestamp=lie))
    assert stored.timestamp is not None
    assert stored.timestamp.utcoffset() == timedelta(0)
    assert abs(stored.timestamp - before) < timedelta(minutes=1)
    assert store.get_state(0, "a").timestamp == stored.timestamp


@pytest.mark.req("S1-50")
def test_versions_grow_by_one_per_key_and_a_clients_version_is_ignored(store: LiveStore):
    versions = [store.set_state(State("job", 0, "a", version=77)).version for _ in range(3)]
    assert versions == [1, 2, 3]
    assert store.set_state(State("job", 0, "b")).version == 1
    assert store.set_state(State("job", 1, "a")).version == 1


@pytest.mark.req("S1-54")
def test_writing_again_with_the_stored_event_id_changes_nothing(store: LiveStore):
    first = store.set_state(State("job", 0, "a", 5, "once", event_id="e-1"))
    assert store.set_state(State("job", 0, "a", 6, "twice", event_id="e-1")) == first
    assert store.get_state(0, "a") == first
    assert store.set_state(State("job", 0, "a", 6, event_id="e-2")).version == 2


@pytest.mark.req("S1-54")
def test_a_write_without_an_event_id_gets_a_new_one(store: LiveStore):
    ids = {store.set_state(State("job", 0, "a")).event_id for _ in range(3)}
    assert len(ids) == 3
    assert "" not in ids


@pytest.mark.req("S1-08")
def test_a_payload_that_is_changed_after_the_write_does_not_change_the_state(store: LiveStore):
    payload: dict[str, object] = {"n": 1, "inner": {"x": 1}}
    store.set_state(State("job", 0, "a", payload=payload))  # type: ignore[arg-type]
    payload["n"], payload["inner"]["x"] = 2, 2  # type: ignore[index]
    assert store.get_state(0, "a").payload == {"n": 1, "inner": {"x": 1}}


@pytest.mark.req("S1-19", "S1-24")
def test_an_unreported_state_has_status_0_and_is_in_no_list(store: LiveStore):
    assert store.get_state(2, "never") == State("job", 2, "never", 0)
    assert store.list_all_states() == []
    assert store.list_states_for_tag("never") == []


@pytest.mark.req("S1-10")
def test_lists_contain_the_existing_states(store: LiveStore):
    for task, tag in [(0, "a"), (1, "a"), (1, "b")]:
        store.set_state(State("job", task, tag))
    assert {state.key for state in store.list_all_states()} == {(0, "a"), (1, "a"), (1, "b")}
    assert {state.key for state in store.list_states_for_tag("a")} == {(0, "a"), (1, "a")}


@pytest.mark.req("S1-14", "S1-15", "S1-16", "S1-17")
def test_the_convenience_calls_store_exactly_these_statuses_and_code_points(managers: list[Manager], store: LiveStore):
    manager = managers[0]
    error = manager.set_error(RuntimeError("connection timeout"), "a")
    assert (error.status, error.message) == (-1, "\U0001f534 connection timeout")
    started = manager.set_started("a")
    assert (started.status, started.message) == (1, "\U0001f7e2 Started")
    warning = manager.set_warning("retrying", "a")
    assert (warning.status, warning.message) == (-2, "\U0001f7e1 retrying")
    finished = manager.set_finished("a")
    assert (finished.status, finished.message) == (2147483647, "⚫ Finished")
    assert store.get_state(0, "a") == finished
    assert finished.version == 4


@pytest.mark.req("S1-15", "S1-16")
def test_a_message_of_ones_own_is_left_alone(managers: list[Manager]):
    assert managers[0].set_started("a", message="Beginning").message == "Beginning"
    assert managers[0].set_finished(State("job", 0, "a", message="Done")).message == "Done"


# ---- jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.req("S1-35", "S1-01")
@pytest.mark.stores(SHARED)
def test_the_number_of_tasks_a_job_was_made_with_wins(place: Place):
    store, num_tasks = states.open_store(place.url, "job", 5)
    store.close()
    store, again = states.open_store(place.url, "job", 9)
    place.opened.append(store)
    assert (num_tasks, again, store.num_tasks) == (5, 5, 5)
    with pytest.raises(InvalidInput, match="5 tasks"):
        Manager("job", 0, 9, store)


@pytest.mark.req("S1-34")
@pytest.mark.stores(ISOLATING)
def test_of_twenty_who_make_a_job_at_once_one_makes_it(place: Place):
    place.open("other")  # the schema is there
    barrier, numbers = threading.Barrier(20), set()
    failed: list[BaseException] = []

    def make(num_tasks: int) -> None:
        barrier.wait()
        try:
            store, decided = states.open_store(place.url, "job", num_tasks)
        except BaseException as error:  # noqa: BLE001  (it must not be lost with its thread)
            failed.append(error)
            return
        numbers.add((decided, store.record.incarnation))
        store.close()

    threads = [threading.Thread(target=make, args=(number,)) for number in range(1, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert len(numbers) == 1


@pytest.mark.stores(SHARED)
def test_a_monitor_opens_a_job_without_knowing_its_tasks_and_makes_none(place: Place):
    place.open("job", 4)
    assert place.open("job", None).num_tasks == 4
    with pytest.raises(NotFound, match="no job 'other'"):
        place.open("other", None)
    assert [record.job_id for record in states.list_jobs(place.url)] == ["job"]


@pytest.mark.stores(SHARED)
def test_jobs_do_not_see_each_other(place: Place):
    one, other = place.open("one"), place.open("one-2")
    one.set_state(State("one", 0, "a"))
    assert other.list_all_states() == []
    assert place.open("one-2").list_all_states() == []


@pytest.mark.req("S1-61")
@pytest.mark.stores(SHARED)
def test_deleting_a_job_removes_it_with_its_states(place: Place):
    store = place.open(history=True)
    for task in range(3):
        store.set_state(State("job", task, "a"))
    states.delete_job(place.url, "job")
    assert states.list_jobs(place.url) == []
    with pytest.raises(NotFound):
        states.delete_job(place.url, "job")
    again = place.open(history=True)
    assert again.list_all_states() == []
    assert again.history(0, "a") == []


@pytest.mark.req("S1-61")
@pytest.mark.stores(SHARED)
def test_a_tombstone_stops_writers_and_newcomers_but_not_readers(place: Place):
    store = place.open()
    store.set_state(State("job", 0, "a", 7))
    states.mark_job_deleted(place.url, "job")
    with pytest.raises(Refused, match="marked as deleted"):
        store.set_state(State("job", 0, "a", 8))
    with pytest.raises(Refused, match="marked as deleted"):
        place.open()
    assert place.open(num_tasks=None).get_state(0, "a").status == 7
    assert [record.deleted for record in states.list_jobs(place.url)] == [True]


@pytest.mark.stores(SHARED)
def test_writing_to_a_deleted_job_raises(place: Place):
    store = place.open()
    states.delete_job(place.url, "job")
    with pytest.raises(NotFound, match="'job' is no longer in this store"):
        store.set_state(State("job", 0, "a"))


@pytest.mark.req("S1-06")
@pytest.mark.stores(SHARED)
def test_only_task_0_deletes_the_job_and_others_do_nothing(place: Place):
    first, second = place.manager(0), place.manager(1)
    assert second.mark_job_deleted() is False
    assert second.delete_job() is False
    assert [record.deleted for record in states.list_jobs(place.url)] == [False]
    assert first.mark_job_deleted() is True
    assert [record.deleted for record in states.list_jobs(place.url)] == [True]
    assert first.delete_job() is True
    assert states.list_jobs(place.url) == []


@pytest.mark.req("S1-62")
@pytest.mark.stores(SHARED)
def test_finished_jobs_go_when_they_are_old_enough_and_others_stay(place: Place):
    for job_id, report in [("done", FINISHED), ("running", 5), ("failed", ERROR), ("marked", 1)]:
        store = place.open(job_id, 2)
        for task in range(2):
            store.set_state(State(job_id, task, "a", report))
    place.open("half", 2).set_state(State("half", 0, "a", FINISHED))
    states.mark_job_deleted(place.url, "marked")
    assert states.purge(place.url, older_than=3600) == ["marked"]
    later = datetime.now(UTC) + timedelta(hours=2)
    assert states.purge(place.url, older_than=3600, now=later) == ["done"]
    assert sorted(record.job_id for record in states.list_jobs(place.url)) == ["failed", "half", "running"]


@pytest.mark.req("S1-67")
@pytest.mark.stores(SHARED)
def test_jobs_marked_as_deleted_are_collected_and_no_others(place: Place):
    for job_id in ("finished", "running", "first", "second"):
        store = place.open(job_id, 2, history=True)
        for task in range(2):
            store.set_state(State(job_id, task, "a", FINISHED if job_id == "finished" else 5))
    for job_id in ("first", "second"):
        states.mark_job_deleted(place.url, job_id)
    assert states.purge(place.url) == ["first", "second"]
    assert states.purge(place.url) == []
    assert sorted(record.job_id for record in states.list_jobs(place.url)) == ["finished", "running"]
    again = place.open("first", 2, history=True)
    assert (again.list_all_states(), again.history(0, "a")) == ([], [])
    assert again.set_state(State("first", 0, "a", 1)).version == 1


def documented(start: str) -> str:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "states.md").read_text("utf-8")
    return page[page.index(start) :].partition("```")[0]


@pytest.mark.req("S1-67")
@pytest.mark.stores(("postgresql",))
def test_on_postgresql_the_documented_grants_suffice_to_clean_up_and_less_deletes_nothing(place: Place):
    for job_id in ("marked", "running"):
        place.open(job_id, 2).set_state(State(job_id, 0, "a", 5))
    states.mark_job_deleted(place.url, "marked")
    janitor = f"{place.url}{'&' if '?' in place.url else '?'}options=-c%20role%3Djanitor"
    with psycopg.connect(place.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE janitor")
        try:
            admin.execute(documented("GRANT USAGE").encode())
            admin.execute("REVOKE DELETE ON headway.state_jobs FROM janitor")
            with pytest.raises(StoreReadOnly, match="permission denied"):
                states.purge(janitor, older_than=0)
            assert len(states.list_jobs(place.url)) == 2
            admin.execute(documented("GRANT USAGE").encode())
            assert states.purge(janitor, older_than=0) == ["marked"]
            with pytest.raises(StoreReadOnly):
                states.open_store(janitor, "running")[0].set_state(State("running", 0, "a", 6))
        finally:
            admin.execute("DROP OWNED BY janitor")
            admin.execute("DROP ROLE janitor")


@pytest.mark.req("S1-67")
@pytest.mark.stores(("redis",))
def test_on_redis_the_documented_rights_suffice_to_clean_up_and_less_deletes_nothing(place: Place):
    for job_id in ("marked", "running"):
        place.open(job_id, 2).set_state(State(job_id, 0, "a", 5))
    states.mark_job_deleted(place.url, "marked")
    admin: Any = _redis.connect(place.url, role="state", name="admin")
    rights = documented("ACL SETUSER janitor").replace("PASSWORD", "s3cret").split()[2:]
    janitor = place.url.replace("redis://", "redis://janitor:s3cret@")
    try:
        admin.execute_command("ACL", "SETUSER", *[right for right in rights if right != "+del"])
        with pytest.raises(Unavailable, match="refused us"):
            states.purge(janitor, older_than=0)
        assert len(states.list_jobs(place.url)) == 2
        admin.execute_command("ACL", "SETUSER", *rights)
        assert states.purge(janitor, older_than=0) == ["marked"]
    finally:
        admin.execute_command("ACL", "DELUSER", "janitor")
        admin.close()


class LookedAt(datetime):
    """A moment that does something at the first comparison of a state's time with it."""

    then: Callable[[], object] | None = None

    def __sub__(self, other: Any) -> Any:
        before = LookedAt.fromisoformat(super().__sub__(other).isoformat())
        before.then = self.then
        return before

    def __ge__(self, other: Any) -> bool:  # asked first when a datetime is compared with it: ours is the subclass
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().__ge__(other)


@pytest.mark.req("S1-62")
@pytest.mark.stores(SHARED)
@pytest.mark.parametrize(
    "reported", [State("job", 0, "a", 5), State("job", 1, "b", STARTED), State("job", 1, "a", FINISHED)]
)
def test_a_job_written_to_after_purge_read_it_stays(place: Place, reported: State):
    store = place.open("job", 2)
    for task in range(2):
        store.set_state(State("job", task, "a", FINISHED))
    later = LookedAt.now(UTC) + timedelta(hours=2)
    later.then = lambda: store.set_state(reported)

    assert states.purge(place.url, older_than=3600, now=later) == []

    assert store.get_state(*reported.key).status == reported.status
    assert [record.deleted for record in states.list_jobs(place.url)] == [False]
    store.set_state(State("job", *reported.key, FINISHED))
    assert states.purge(place.url, older_than=3600, now=datetime.now(UTC) + timedelta(hours=2)) == ["job"]


def test_history_keeps_every_version_when_the_job_was_made_with_it(place: Place):
    manager = Manager("job", 1, 3, place.open(history=True))
    for number in range(1, 8):
        manager.set_state("a", status=number)
        manager.set_state("b", status=number)
    kept = manager.history(task_id=1, tag="a")
    assert [(state.version, state.status) for state in kept] == [(number, number) for number in range(1, 8)]


@pytest.mark.parametrize("tag", [None, 17, b"a", ["a"], "", "two words", "a/b", "é", "x" * 129])
def test_the_state_of_an_invalid_tag_is_an_error_and_not_an_empty_state(tag: Any, store: LiveStore):
    with pytest.raises(InvalidInput, match="tag"):
        store.get_state(0, tag)


def test_history_is_read_in_pages(place: Place):
    store = place.open(history=True)
    for number in range(7):
        for key in ((1, "a"), (1, "ab"), (11, "a"), (2, "a")):
            store.set_state(State("job", key[0] % 3, f"{key[1]}-{key[0]}", number))
    versions: list[int] = []
    while page := store.history(1, "a-1", after=versions[-1] if versions else 0, limit=3):
        assert [state.key for state in page] == [(1, "a-1")] * len(page)
        versions += [state.version for state in page]
        assert len(page) == min(3, 7 - len(versions) + len(page))
    assert versions == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(InvalidInput, match="limit must be at least 1"):
        store.history(1, "a-1", limit=0)


@pytest.mark.stores(("redis",))
def test_a_long_history_on_redis_is_read_in_pages_that_let_others_in(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.states.store.redis.HISTORY_PAGE", 100)
    store = place.open(history=True)
    for number in range(450):
        store.set_state(State("job", number % 3, "a", number))
    client = _redis.connect(place.url, role="state", name="look")
    client.config_resetstat()
    assert [state.version for state in store.history(1, "a")] == list(range(1, 151))
    stats: Any = client.info("commandstats")
    assert stats["cmdstat_xrange"]["calls"] == 6
    client.close()


def test_without_history_asking_for_it_is_refused(managers: list[Manager]):
    with pytest.raises(InvalidInput, match="has no history"):
        managers[0].history(task_id=0, tag="a")


# ---- subscriptions ----------------------------------------------------------------------------------------------


@pytest.mark.req("S1-23", "S1-24", "S1-25", "S1-26", "S1-27", "S1-11")
def test_a_subscription_yields_current_states_a_sentinel_and_changes(managers: list[Manager]):
    keys = [(task, tag) for task in range(2) for tag in ("a", "b", "c")]
    random.Random(7).shuffle(keys)
    for task, tag in keys:
        managers[task].set_started(tag)
    managers[keys[0][0]].set_finished(keys[0][1])  # the first to be written becomes the newest

    with managers[2].subscribe() as subscription:
        events = take(subscription, 6)
        assert all(event.replay for event in events)
        times = [event.state.timestamp for event in events if event.state and event.state.timestamp]
        assert times == sorted(times)
        assert {event.state.key for event in events if event.state} == set(keys)
        assert all(event.state.task_id != 2 for event in events if event.state)
        sentinel = subscription.get(60)
        assert sentinel.replay_complete
        assert sentinel.state is None
        assert not sentinel.replay
        written = [managers[2].set_state("live", status=number) for number in range(1, 6)]
        assert live(subscription, 5) == written


@pytest.mark.req("S1-26")
def test_an_empty_job_still_has_its_sentinel(managers: list[Manager]):
    with managers[0].subscribe() as subscription:
        assert subscription.get(60) == states.REPLAY_COMPLETE
        with pytest.raises(TimeoutError):
            subscription.get(0.05)


@pytest.mark.req("S1-18", "S1-30", "S1-31", "S1-32", "S1-33")
def test_each_scope_sees_its_own_keys_and_no_others(managers: list[Manager]):
    def write_everything() -> None:
        for manager in managers:
            for tag in ("a", "b"):
                manager.set_started(tag)

    write_everything()
    everything = {(task, tag) for task in range(3) for tag in ("a", "b")}
    scopes = {
        (1, "a"): {(1, "a")},
        (None, "a"): {(0, "a"), (1, "a"), (2, "a")},
        (1, None): {(1, "a"), (1, "b")},
        (None, None): everything,
    }
    subscriptions = {scope: managers[0].subscribe(task_id=scope[0], tag=scope[1]) for scope in scopes}
    for scope, expected in scopes.items():
        assert {state.key for state in replayed(subscriptions[scope])} == expected
    write_everything()
    for scope, expected in scopes.items():
        assert {state.key for state in live(subscriptions[scope], len(expected))} == expected
        with pytest.raises(TimeoutError):
            subscriptions[scope].get(0.02)
        subscriptions[scope].close()


@pytest.mark.req("S1-42", "S1-33")
@pytest.mark.stores(SHARED)
def test_a_subscriber_gets_writes_of_another_store_in_order(place: Place):
    here, there = place.manager(0), place.manager(1)
    with here.subscribe() as subscription:
        assert replayed(subscription) == []
        written = [there.set_state("a", status=number, payload={"n": number}) for number in range(1, 21)]
        heard: list[State] = []
        while not heard or heard[-1].version < 20:
            heard += live(subscription)
        versions = [state.version for state in heard]
        assert versions == sorted(set(versions))
        assert heard[-1] == written[-1]
        assert sees(here._store, 1, "a", 20) == written[-1]  # type: ignore[arg-type]


@pytest.mark.req("S1-33")
@pytest.mark.stores(LOGGED)
def test_while_it_is_connected_and_keeps_up_a_subscriber_hears_every_single_change(place: Place):
    here, there = place.manager(0), place.manager(1)
    with here.subscribe() as subscription:
        replayed(subscription)
        for number in range(1, 201):
            there.set_state("a", status=number)
        assert [state.version for state in live(subscription, 200)] == list(range(1, 201))


@pytest.mark.req("S1-43", "S1-44")
def test_a_hundred_subscribers_are_served_by_one_listener(managers: list[Manager], store: LiveStore):
    subscriptions = [managers[0].subscribe(tag="a")]
    before = threading.active_count()
    subscriptions += [managers[0].subscribe(tag="a") for _ in range(99)]
    assert threading.active_count() == before
    written = managers[1].set_started("a")
    for subscription in subscriptions:
        assert subscription.get(60).replay_complete
        assert live(subscription) == [written]
        subscription.close()
    assert store.subscribers == 0


@pytest.mark.req("S1-13")
def test_closing_ends_every_subscription_and_thread_and_may_be_repeated(place: Place):
    before = set(threading.enumerate())
    store = place.open()
    one, two = Manager("job", 0, 3, store), Manager("job", 1, 3, store)
    subscriptions = [one.subscribe(), two.subscribe(tag="a")]
    for subscription in subscriptions:
        replayed(subscription)
    reader = threading.Thread(target=lambda: list(subscriptions[1]))
    reader.start()
    one.close()
    one.close()
    reader.join(20)
    assert not reader.is_alive()
    assert list(subscriptions[0]) == []
    eventually(lambda: not (set(threading.enumerate()) - before), 20, "no thread is left")
    with pytest.raises(HeadwayError, match="was closed"):
        two.set_started("a")


@pytest.mark.req("S1-52", "S1-49")
def test_writers_and_readers_in_many_threads_leave_the_cache_at_the_last_version(managers: list[Manager]):
    rounds, stop, seen = 15, threading.Event(), []

    def write(manager: Manager, tag: str) -> None:
        for number in range(1, rounds + 1):
            manager.set_state(tag, status=number)

    def read() -> None:
        highest: dict[tuple[int, str], int] = {}
        while not stop.is_set():
            for state in managers[0]._store.list_all_states():
                assert state.version >= highest.get(state.key, 0)
                highest[state.key] = state.version
        seen.append(highest)

    writers = [threading.Thread(target=write, args=(m, tag)) for m in managers for tag in ("a", "b")]
    readers = [threading.Thread(target=read) for _ in range(2)]
    subscription = managers[0].subscribe()
    for thread in [*writers, *readers]:
        thread.start()
    for thread in writers:
        thread.join(60)
    stop.set()
    for thread in readers:
        thread.join(60)
    last: dict[tuple[int, str], int] = {}
    while sorted(last.values()) != [rounds] * 6:
        event = subscription.get(60)
        if event.state is not None:
            assert event.state.version > last.get(event.state.key, 0)
            last[event.state.key] = event.state.version
    assert all(state.version == rounds for state in managers[0]._store.list_all_states())
    assert len(seen) == 2


# ---- a listener that was held up ----------------------------------------------------------------------------------


def hold_up(store: LiveStore, writer: LiveStore) -> None:
    """Make the listener of ``store`` stand still after its next look; the caller holds the store's lock meanwhile."""

    def position() -> int:
        return int(
            getattr(store._supervisor._listener, "_cursor", 0) or getattr(store._supervisor._listener, "_change", 0)
        )

    before = position()
    writer.set_state(State("job", 0, "held"))
    eventually(lambda: position() > before, 60)


@pytest.mark.req("S1-69")
@pytest.mark.stores(LOGGED)
def test_a_burst_of_ten_thousand_changes_reaches_a_slow_reader_whole_and_in_order(place: Place):
    store, writer = place.open(), place.open()
    with store.subscribe() as subscription:
        replayed(subscription)

        def write(task: int) -> None:
            for number in range(2_500):
                writer.set_state(State("job", task, "a", number))

        writers = [threading.Thread(target=write, args=(task % 3,)) for task in range(4)]
        for each in writers:
            each.start()
        heard: dict[int, int] = {0: 0, 1: 0, 2: 0}
        for count in range(10_000):
            if count == 100:  # it reads the rest when the burst is over
                for each in writers:
                    each.join()
            event = subscription.get(60)
            assert event.state is not None
            assert event.skipped == 0
            assert event.state.version == heard[event.state.task_id] + 1
            heard[event.state.task_id] += 1
            assert len(subscription._buffer._live) <= DEPTH
        assert sorted(heard.values()) == [2_500, 2_500, 5_000]


@pytest.mark.req("S1-69")
@pytest.mark.stores(LOGGED)
def test_a_listener_held_up_by_thousands_of_changes_reads_on_from_the_log(place: Place):
    store, writer = place.open(), place.open()
    with store.subscribe() as subscription:
        replayed(subscription)
        with store._cache.lock:
            hold_up(store, writer)
            for number in range(3_000):
                writer.set_state(State("job", 2, "a", number))
        versions = [state.version for state in live(subscription, 3_001) if state.key == (2, "a")]
        assert versions == list(range(1, 3_001))


@pytest.mark.req("S1-46")
@pytest.mark.stores(LOGGED)
def test_a_listener_behind_the_end_of_the_log_lists_again_and_misses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.states.store.sql.LOG_LENGTH", 4)
    monkeypatch.setattr("headway.states.store.sql.PRUNE_EVERY", 1)
    monkeypatch.setattr("headway.states.store.redis.LOG_LENGTH", 4)
    store, writer = place.open(), place.open()
    with store.subscribe() as subscription:
        replayed(subscription)
        with store._cache.lock:
            hold_up(store, writer)
            writer.set_state(State("job", 1, "early", 7))
            for number in range(300):  # Redis cuts its stream by the hundred
                writer.set_state(State("job", 2, "a", number))
        last: dict[tuple[int, str], int] = {}
        while last.get((2, "a"), 0) < 300 or (1, "early") not in last:
            (state,) = live(subscription)
            assert state.version > last.get(state.key, 0)
            last[state.key] = state.version
    assert store.get_state(1, "early").status == 7


@pytest.mark.req("S1-54")
def test_another_state_under_a_stored_event_id_is_refused_and_logged(
    store: LiveStore, caplog: pytest.LogCaptureFixture
):
    first = store.set_state(State("job", 0, "a", 5, "once", event_id="e-1"))
    assert store.set_state(State("job", 0, "a", 5, "once", event_id="e-1")) == first
    assert not any("under this event id" in record.getMessage() for record in caplog.records)
    assert store.set_state(State("job", 0, "a", 6, "twice", event_id="e-1")) == first
    assert any("another state was stored under this event id" in record.getMessage() for record in caplog.records)


@pytest.mark.req("S1-54")
@pytest.mark.stores(ISOLATING)
def test_the_last_event_of_each_recent_writer_is_recognised(place: Place):
    stores = [place.open() for _ in range(4)]
    firsts = [store.set_state(State("job", 0, "a", n, event_id=f"e.{n}")) for n, store in enumerate(stores)]
    for _ in range(2):
        for store, first in zip(stores, firsts, strict=True):
            again = store.set_state(State("job", 0, "a", first.status, event_id=first.event_id))
            assert (again.version, again.timestamp) == (first.version, first.timestamp)
    assert stores[0].set_state(State("job", 0, "a", 9)).version == 5
    assert stores[1].set_state(State("job", 0, "a", 1, event_id="e.1")).version == 2
    assert stores[1].set_state(State("job", 0, "a", 1, event_id="e-1")).version == 6, "a dot is no wildcard"


@pytest.mark.stores(("sqlite", "postgresql", "redis"))
def test_the_record_of_recent_writers_stays_small(place: Place):
    store = place.open()
    for number in range(60):
        store._writer = f"writer{number:06d}"  # as if it were another process
        store.set_state(State("job", 0, "a", number, event_id=f"{'x' * 100}{number}"))
    assert store.set_state(State("job", 0, "a", 59, event_id=f"{'x' * 100}59")).version == 60
    assert store.set_state(State("job", 0, "a", 57, event_id=f"{'x' * 100}57")).version == 58
    if place.kind == "redis":
        from redis import Redis

        with Redis.from_url(place.url, decode_responses=True) as client:
            kept = client.hget("headway:states:job:writers", "0-a")
    else:
        kept = store._backend._database.one("SELECT recent FROM states")[0]  # type: ignore[attr-defined]
    assert 500 < len(kept) < 1_100


def test_a_dropped_subscription_is_closed_and_its_unread_events_are_counted(place: Place):
    store = place.open()
    manager = Manager("job", 0, 3, store)
    before = metrics.value("headway_states_dropped")
    manager.set_started("a")
    for _ in range(50):
        for _event in manager.subscribe():
            break  # the loop held the only reference
        for _event in store.subscribe():
            break
    gc.collect()
    assert store.subscribers == 0
    abandoned = store.subscribe()
    assert abandoned.waiting == 2
    del abandoned
    gc.collect()
    kept = store.subscribe()
    manager.set_finished("a")
    replayed(kept)
    live(kept)
    eventually(lambda: metrics.value("headway_states_dropped") - before >= 1, 20)


def test_a_subscription_whose_accepts_raises_ends_alone(place: Place):
    store = place.open()
    good, bad = store.subscribe(), store.subscribe(accepts=lambda state: 1 // (state.status - 5) > -9)
    for number in (4, 5, 6):
        store.set_state(State("job", 0, "a", number))
    replayed(good)
    assert [state.status for state in live(good, 3)] == [4, 5, 6]
    replayed(bad)
    live(bad)
    with pytest.raises(HeadwayError, match="ZeroDivisionError"):
        bad.get(60)
    assert store.fresh
    with pytest.raises(ZeroDivisionError):
        store.subscribe(accepts=lambda _: bool(1 // 0))
    assert store.subscribers == 1


def test_a_listing_does_not_revert_a_write_made_meanwhile(place: Place):
    store = place.open()
    store.set_state(State("job", 0, "old", 1))
    reading, may_end = threading.Event(), threading.Event()
    read_all = store._backend.read_all

    def slow(*arguments: object) -> object:
        snapshot = read_all(*arguments)  # type: ignore[arg-type]
        reading.set()
        assert may_end.wait(60)
        return snapshot

    store._backend.read_all = slow  # type: ignore[method-assign,assignment]  # the wire becomes slow; nothing is replaced

    def list_until_asked() -> None:
        while not reading.is_set():
            if place.kind == "firestore":  # it listens, and what it heard would be the answer
                store._supervisor._fresh_until = 0.0
            store.list_all_states()

    first = threading.Thread(target=list_until_asked)
    first.start()
    assert reading.wait(60)
    store.set_state(State("job", 0, "new", 2))
    store.set_state(State("job", 0, "old", 3))
    may_end.set()
    first.join(60)
    store._backend.read_all = read_all  # type: ignore[method-assign]
    assert {state.tag: state.status for state in store.list_all_states()} == {"new": 2, "old": 3}


def test_a_barrier_of_many_tasks_costs_as_much_for_each_as_one_of_few():
    def cpu(tasks: int) -> float:
        store, _ = states.open_store("sqlite:///:memory:", "job", tasks)
        now = datetime.now(UTC)
        with store._cache.lock:  # as if the listener had heard of them
            store._cache.states = {}
        store.list_all_states()
        for task in range(tasks):
            store._cache.states[(task, "a")] = State("job", task, "a", FINISHED, "", now, 1, "e")
        manager = Manager("job", 0, tasks, store)
        began = time.thread_time()
        assert manager.wait_for("a", timeout=60).finished
        used = time.thread_time() - began
        store.close()
        return used

    few = min(cpu(1_000) for _ in range(3))
    assert cpu(16_000) < 16 * few * 4, "16 times the tasks, and some; it was 16 times that"
