"""A job that is deleted, made again, wiped, replaced or put back under its writers, readers and subscribers."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from redis import Redis

from headway import states
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, NotFound, Refused, StorageError
from headway.states import FINISHED, JobGone, LiveStore, Manager, State, Subscription, WentBack
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually
from tests.states.conftest import QUICK, SHARED, Place, live, replayed, sees

PERSISTENT = RetryPolicy(retries=10_000, base=0.005, cap=0.05)
#: A subscriber hears of it within 5 s; the rest is for a machine that is busy with something else.
TOLD = 5.0 + 10.0


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener looks at the job after each of these silences; as they are, they are tested in test_outages."""
    monkeypatch.setattr("headway.states.store.redis.HEARTBEAT_MS", 200)
    monkeypatch.setattr("headway.states.store.sql.HEARTBEAT", 0.2)
    monkeypatch.setattr("headway.states.store.firestore_listener.HEARTBEAT", 0.2)


def ended(subscription: Subscription, error: type[HeadwayError], seconds: float = TOLD) -> list[State]:
    """What a subscriber still heard before it was told the reason."""
    heard: list[State] = []
    deadline = time.monotonic() + seconds
    while True:
        try:
            event = subscription.get(max(0.0, deadline - time.monotonic()))
        except error:
            return heard
        heard += [] if event.state is None else [event.state]


def remade(place: Place, num_tasks: int = 3) -> LiveStore:
    states.delete_job(place.url, "job")
    return place.open("job", num_tasks)


# ---- deleted, and made again ----------------------------------------------------------------------------------------


@pytest.mark.req("S1-50", "S1-61")
@pytest.mark.stores(SHARED)
def test_a_late_writer_of_a_deleted_job_cannot_write_into_the_one_made_after_it(place: Place):
    late = place.open("job", 3)
    late.set_state(State("job", 0, "a", 1))
    again = remade(place, 2)
    for task, tag in [(0, "a"), (1, "new"), (2, "a")]:  # the new job has no task 2
        with pytest.raises(JobGone, match="re-created"):
            late.set_state(State("job", task, tag, 9))
    assert again.list_all_states() == []
    assert again.set_state(State("job", 0, "a", 5)).version == 1
    fresh = place.open("job", None)
    assert [(state.key, state.status) for state in fresh.list_all_states()] == [((0, "a"), 5)]


@pytest.mark.req("S1-40", "S1-61")
@pytest.mark.stores(SHARED)
def test_a_deleted_job_ends_subscriptions_and_cached_reads(place: Place):
    store = place.open()
    store.set_state(State("job", 0, "a", 1))
    subscriptions = [store.subscribe(), Manager("job", 1, 3, store).subscribe(tag="b")]
    states.delete_job(place.url, "job")
    for subscription in subscriptions:
        ended(subscription, JobGone)
        assert subscription.closed
    eventually(lambda: not store.fresh, TOLD)
    for use in (lambda: store.get_state(0, "a"), store.list_all_states, store.subscribe):
        with pytest.raises(JobGone):
            use()
    with pytest.raises(JobGone):
        store.set_state(State("job", 0, "a", 2))


@pytest.mark.req("S1-40", "S1-61")
@pytest.mark.stores(SHARED)
def test_a_job_without_a_state_that_is_deleted_ends_its_subscribers_too(place: Place):
    store = place.open()
    subscription = store.subscribe()
    assert replayed(subscription) == []
    states.delete_job(place.url, "job")
    assert ended(subscription, JobGone) == []


@pytest.mark.req("S1-40", "S1-46")
@pytest.mark.stores(SHARED)
def test_of_a_job_that_was_made_again_an_old_subscriber_hears_nothing_and_a_new_one_everything(place: Place):
    store, writer = place.open(), place.open()
    for _ in range(3):
        writer.set_state(State("job", 1, "a"))
    sees(store, 1, "a", 3)
    subscription = store.subscribe()
    assert [state.version for state in replayed(subscription)] == [3]
    again = remade(place)
    again.set_state(State("job", 1, "a", 42))
    assert all(state.status != 42 for state in ended(subscription, JobGone))
    with place.open().subscribe() as new:
        (found,) = replayed(new)
        assert (found.version, found.status) == (1, 42)


@pytest.mark.req("S1-40")
@pytest.mark.stores(SHARED)
def test_the_first_change_of_a_job_made_again_is_not_taken_for_the_next_of_the_old_one(place: Place):
    """Its change number is exactly the one a listener of the old, empty job waits for."""
    store = place.open()
    subscription = store.subscribe()
    replayed(subscription)
    with store._cache.lock:  # the listener cannot hand anything on until both have happened
        remade(place).set_state(State("job", 1, "a", 42))
    assert ended(subscription, JobGone) == []


@pytest.mark.stores(SHARED)
def test_a_barrier_forgets_the_progress_of_a_deleted_job(place: Place):
    managers = [place.manager(task) for task in range(3)]
    waiter = place.manager(0)
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(waiter.wait_for("a", timeout=60))
        except HeadwayError as error:
            outcome.append(error)

    for manager in managers[:2]:
        manager.set_finished("a")
    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: waiter._store.subscribers == 1, 60)  # type: ignore[attr-defined]
    again = remade(place)
    again.set_state(State("job", 2, "a", FINISHED))  # the third, in another life
    thread.join(60)
    assert [type(found) for found in outcome] == [JobGone]


@pytest.mark.req("S1-61")
@pytest.mark.stores(SHARED)
def test_a_tombstone_ends_subscriptions_because_no_more_states_will_come(place: Place):
    store = place.open()
    store.set_state(State("job", 0, "a", 7))
    subscription = store.subscribe()
    assert len(replayed(subscription)) == 1
    states.mark_job_deleted(place.url, "job")
    ended(subscription, JobGone)
    assert store.get_state(0, "a").status == 7
    with pytest.raises(Refused, match="marked as deleted"):
        store.set_state(State("job", 0, "a", 8))
    with place.open("job", None).subscribe() as late:
        assert [state.status for state in replayed(late)] == [7]
        with pytest.raises(JobGone, match="marked as deleted"):
            late.get(10)


@pytest.mark.req("S1-61", "S1-62")
@pytest.mark.stores(SHARED)
def test_a_late_deletion_does_not_touch_the_job_made_since(place: Place):
    late, marking = place.open(), place.open()
    again = remade(place)
    again.set_state(State("job", 0, "a", 5))
    with suppress(JobGone):
        late.delete_job()
    with pytest.raises(JobGone):
        marking.mark_job_deleted()
    assert place.open("job", None).get_state(0, "a").status == 5
    assert [record.deleted for record in states.list_jobs(place.url)] == [False]


@pytest.mark.stores(("postgresql", "redis", "sqlite"))
def test_writing_while_others_delete_and_make_the_job_again_gives_a_version_or_says_that_the_job_is_gone(place: Place):
    stop, odd, written = threading.Event(), [], []

    def write(task: int) -> None:
        while not stop.is_set():
            try:
                store, _ = states.open_store(place.url, "job", 3, retry=QUICK)
            except (NotFound, Refused):
                continue
            with closing(store):
                try:
                    for number in range(20):
                        written.append(store.set_state(State("job", task, "a", number)).version)
                except JobGone:
                    continue
                except BaseException as error:  # noqa: BLE001  (anything else is what this test is about)
                    odd.append(error)
                    return

    threads = [threading.Thread(target=write, args=(task,)) for task in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        before = len(written)
        eventually(lambda before=before: len(written) > before or odd, 60)  # type: ignore[misc]
        with suppress(NotFound):
            states.delete_job(place.url, "job")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert odd == []


# ---- wiped, replaced ------------------------------------------------------------------------------------------------


def wipe_redis(place: Place) -> None:
    with Redis.from_url(place.url) as client:
        client.flushall()


def drop_schema(place: Place) -> None:
    with psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA headway CASCADE")


def truncate(place: Place) -> None:
    with psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute("TRUNCATE headway.state_jobs CASCADE")


def file_of(place: Place) -> Path:
    return Path(place.url.removeprefix("sqlite:///"))


def unlink(place: Place) -> None:
    for name in ("", "-wal", "-shm"):
        Path(f"{file_of(place)}{name}").unlink(missing_ok=True)


def replace_file(place: Place) -> None:
    """By a database of ours that has never heard of the job."""
    other = file_of(place).with_name("other.db")
    states.open_store(f"sqlite:///{other}", "other", 1)[0].close()
    unlink(place)
    other.rename(file_of(place))


def remove_documents(place: Place) -> None:
    from google.cloud import firestore

    client = firestore.Client(project=place.url.removeprefix("firestore://"))
    client.document("jobs/job").delete()
    client.close()


WIPES = [
    ("redis", wipe_redis),
    ("postgresql", drop_schema),
    ("postgresql", truncate),
    ("sqlite", unlink),
    ("sqlite", replace_file),
    ("firestore", remove_documents),
]


@pytest.mark.parametrize(
    ("place", "wipe"), WIPES, indirect=["place"], ids=lambda value: getattr(value, "__name__", value)
)
def test_subscribers_hear_that_the_store_was_wiped_or_replaced_and_no_write_is_acknowledged_into_the_void(
    place: Place, wipe: Callable[[Place], None]
):
    store = place.open()
    store.set_state(State("job", 0, "a", 1))
    subscription = store.subscribe()
    assert len(replayed(subscription)) == 1
    wipe(place)
    ended(subscription, JobGone)
    assert not store.fresh
    with pytest.raises(JobGone):
        store.get_state(0, "a")
    with pytest.raises(JobGone):
        store.set_state(State("job", 0, "a", 2))
    place.opened.remove(store)
    store.close()


@pytest.mark.parametrize(("place", "wipe"), WIPES[3:5], indirect=["place"], ids=["removed", "replaced"])
def test_a_store_that_only_writes_is_refused_as_soon_as_its_file_has_lost_its_name(
    place: Place, wipe: Callable[[Place], None]
):
    store = place.open()
    assert store.set_state(State("job", 0, "a", 1)).version == 1
    wipe(place)
    with pytest.raises((JobGone, StorageError)):
        store.set_state(State("job", 0, "a", 2))


@pytest.mark.stores(("sqlite",))
def test_waiting_readers_learn_of_a_file_removed_during_a_disconnection(place: Place):
    store = place.open(retry=PERSISTENT)
    subscription = store.subscribe()
    replayed(subscription)
    with store._supervisor._listing:  # the listener comes back, and cannot list before the file is gone
        listener = store._supervisor._listener
        assert listener is not None
        listener._waker._watch._connection.close()  # type: ignore[attr-defined]  # as if it had been lost
        unlink(place)
    ended(subscription, JobGone)


@pytest.mark.stores(("sqlite",))
def test_what_a_subscription_accepts_may_read_the_store_also_while_the_listener_comes_back(place: Place):
    store, other = place.open(retry=PERSISTENT), place.open()
    store.set_state(State("job", 1, "a", 1))
    subscription = store.subscribe(accepts=lambda _: store.get_state(1, "a").status == 2)
    assert replayed(subscription) == []
    with store._supervisor._listing:  # the listener comes back, and cannot list before both are written
        listener = store._supervisor._listener
        assert listener is not None
        listener._waker._watch._connection.close()  # type: ignore[attr-defined]  # as if it had been lost
        eventually(lambda: not store.fresh, 30)
        other.set_state(State("job", 0, "a", 9))
        other.set_state(State("job", 1, "a", 2))
    assert [state.key for state in live(subscription, 2)] == [(0, "a"), (1, "a")]
    assert store.get_state(0, "a").status == 9


def test_a_program_that_changes_its_directory_keeps_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with closing(states.open_store("sqlite:///here.db", "job", 1, retry=QUICK)[0]) as store:
        subscription = store.subscribe()
        replayed(subscription)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert store.set_state(State("job", 0, "a", 1)).version == 1
        assert store.get_state(0, "a").status == 1
        assert [state.status for state in live(subscription)] == [1]


# ---- put back -------------------------------------------------------------------------------------------------------


@pytest.fixture
def aged(redis_factory: Callable[..., RedisServer], tcp_proxy: Callable[[int], TcpProxy]) -> Iterator[Aged]:
    server = redis_factory(dbfilename="dump.rdb")
    aged = Aged(server, tcp_proxy(server.port))
    yield aged
    for store in aged.opened:
        store.close()


class Aged:
    """A Redis that comes back with what it had when `remember` was called, and a line to it that can be cut."""

    def __init__(self, server: RedisServer, proxy: TcpProxy) -> None:
        self.server, self.proxy = server, proxy
        self.opened: list[LiveStore] = []

    def open(self, port: int | None = None) -> LiveStore:
        url = f"redis://127.0.0.1:{port or self.server.port}/1"
        store, _ = states.open_store(url, "job", 3, retry=PERSISTENT)
        self.opened.append(store)
        return store

    def remember(self) -> None:
        with self.server.client() as client:
            client.save()
        shutil.copy(self.server.directory / "dump.rdb", self.server.directory / "kept.rdb")

    def go_back(self) -> None:
        self.server.kill9()
        shutil.copy(self.server.directory / "kept.rdb", self.server.directory / "dump.rdb")
        self.server.start()


def write(store: LiveStore, times: int, tag: str = "a") -> State:
    for number in range(times):
        last = store.set_state(State("job", 1, tag, number + 1))
    return last


def test_an_older_redis_ends_subscriptions_and_reads_continue(aged: Aged):
    reader, writer = aged.open(), aged.open()
    write(writer, 5)
    aged.remember()
    write(writer, 5)
    subscription = reader.subscribe()
    assert [state.version for state in replayed(subscription)] == [10]
    aged.go_back()
    assert ended(subscription, WentBack) == []
    eventually(lambda: reader.fresh, 60)
    assert reader.get_state(1, "a").version == 5
    with reader.subscribe() as again:
        assert [state.version for state in replayed(again)] == [5]
        assert write(writer, 1).version == 6
        assert [state.version for state in live(again)] == [6]


def test_a_redis_that_came_back_older_and_went_on_past_the_reader_is_noticed_too(aged: Aged):
    """Every version and number is higher than what the reader knows: only the entry it heard last is missing."""
    reader, writer = aged.open(aged.proxy.port), aged.open()
    write(writer, 5)
    aged.remember()
    write(writer, 2)
    subscription = reader.subscribe()
    assert [state.version for state in replayed(subscription)] == [7]
    aged.proxy.refuse()
    aged.proxy.cut()
    aged.go_back()
    assert write(writer, 9).version == 14
    aged.proxy.pass_through()
    assert ended(subscription, WentBack) == []
    assert sees(reader, 1, "a", 14).version == 14


def test_a_redis_that_came_back_older_and_whose_log_was_cut_past_the_reader_is_known_by_its_run_id(
    aged: Aged, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.states.store.redis.LOG_LENGTH", 4)
    reader, writer = aged.open(aged.proxy.port), aged.open()
    write(writer, 5)
    aged.remember()
    write(writer, 2)
    subscription = reader.subscribe()
    replayed(subscription)
    aged.proxy.refuse()
    aged.proxy.cut()
    aged.go_back()
    write(writer, 300)  # Redis cuts its stream by the hundred
    aged.proxy.pass_through()
    assert ended(subscription, WentBack) == []


def test_a_redis_that_was_restarted_and_lost_nothing_ends_no_subscription(aged: Aged):
    reader, writer = aged.open(), aged.open()
    write(writer, 5)
    subscription = reader.subscribe()
    replayed(subscription)
    aged.remember()
    aged.go_back()
    assert write(writer, 1).version == 6
    assert [state.version for state in live(subscription)] == [6]


def test_restored_keys_are_noticed_without_a_lost_connection(aged: Aged):
    reader, writer = aged.open(), aged.open()
    write(writer, 5)
    with aged.server.client(1) as client, Redis(port=aged.server.port, db=1) as raw:
        kept = {key: raw.dump(key) for key in client.keys("headway:states:job*")}
        write(writer, 5)
        subscription = reader.subscribe()
        assert [state.version for state in replayed(subscription)] == [10]
        for key, value in kept.items():
            raw.restore(key, 0, value, replace=True)
    assert ended(subscription, WentBack) == []


def test_a_barrier_begins_again_when_its_store_went_back(aged: Aged):
    stores = [aged.open() for _ in range(3)]
    managers = [Manager("job", task, 3, store) for task, store in enumerate(stores)]
    managers[0].set_started("a")
    aged.remember()
    managers[0].set_finished("a")
    managers[1].set_finished("a")
    done: list[Any] = []
    waiter = Manager("job", 2, 3, aged.open())
    thread = threading.Thread(target=lambda: done.append(waiter.wait_for("a", timeout=60)))
    thread.start()
    eventually(lambda: waiter._store.subscribers == 1, 60)  # type: ignore[attr-defined]
    aged.go_back()
    for manager in managers[1:]:
        manager.set_finished("a")
    eventually(lambda: waiter._store.fresh, 60)  # type: ignore[attr-defined]
    sees(waiter._store, 2, "a", 1)  # type: ignore[arg-type]
    assert done == [], "task 0 has to finish again"
    managers[0].set_finished("a")
    thread.join(60)
    assert done[0].finished


@pytest.mark.stores(("sqlite",))
def test_a_sqlite_file_that_was_put_back_in_place_ends_subscriptions(place: Place, tmp_path: Path):
    reader, writer = place.open(), place.open()
    write(writer, 5)
    with closing(sqlite3.connect(file_of(place))) as now, closing(sqlite3.connect(tmp_path / "kept.db")) as kept:
        now.backup(kept)
        write(writer, 5)
        subscription = reader.subscribe()
        assert [state.version for state in replayed(subscription)] == [10]
        kept.backup(now)
    assert ended(subscription, WentBack) == []
    assert reader.get_state(1, "a").version == 5


@pytest.mark.stores(("postgresql",))
def test_postgresql_tables_that_were_put_back_end_subscriptions(place: Place):
    reader, writer = place.open(), place.open()
    write(writer, 5)
    tables = ("state_jobs", "states", "state_log")
    with psycopg.connect(place.url) as connection:
        for table in tables:
            connection.execute(f"CREATE TABLE public.kept_{table} AS SELECT * FROM headway.{table}")
    write(writer, 2)
    subscription = reader.subscribe()
    assert [state.version for state in replayed(subscription)] == [7]
    with psycopg.connect(place.url) as connection:
        connection.execute("DELETE FROM headway.state_jobs")
        for table in tables:
            connection.execute(f"INSERT INTO headway.{table} SELECT * FROM public.kept_{table}")
    assert ended(subscription, WentBack) == []
    assert reader.get_state(1, "a").version == 5


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.stores(("sqlite", "redis"))
def test_waiting_and_following_on_the_command_line_end_when_the_job_is_deleted(place: Place, spawn_cli: Any):
    place.open().set_state(State("job", 0, "a", FINISHED))
    waiting = spawn_cli("states", "wait", "job", "--tag", "a", "--store", place.url)
    following = spawn_cli("states", "job", "--follow", "--json", "--store", place.url)
    assert '"replay"' in following.stdout.readline()
    assert '"replay_complete"' in following.stdout.readline()
    states.delete_job(place.url, "job")
    for process in (waiting, following):
        assert process.wait(60) == 2
        assert "in this store" in process.stderr.read()


def test_following_continues_after_a_restored_store(aged: Aged, spawn_cli: Any):
    writer = aged.open()
    write(writer, 5)
    aged.remember()
    write(writer, 5)
    following = spawn_cli("states", "job", "--follow", "--json", "--store", aged.server.url(1))
    assert '"version": 10' in following.stdout.readline()
    following.stdout.readline()
    aged.go_back()
    assert '"went_back"' in following.stdout.readline()
    assert '"version": 5' in following.stdout.readline()
    assert '"replay_complete"' in following.stdout.readline()
    write(writer, 1)
    assert '"version": 6' in following.stdout.readline()
