"""What is particular to Firestore: its documents, its listener, its project. Against a real emulator."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc  # type: ignore[import-untyped]  # it ships no types
import pytest
from google.cloud import firestore

from headway import states
from headway.errors import InvalidInput, NotFound, Unavailable
from headway.states import LiveStore, Manager, State
from headway.states.firestore import FirestoreListener, FirestoreStates
from tests.services.firestore import FirestoreEmulator
from tests.services.server import free_port
from tests.services.waiting import eventually
from tests.states.conftest import QUICK, Place, live, replayed, sees
from tests.states.test_outages import PERSISTENT

pytestmark = pytest.mark.stores(("firestore",))


@pytest.fixture
def client(place: Place) -> Iterator[firestore.Client]:
    """Google's own client, to see what is really there."""
    client = firestore.Client(project=place.url.removeprefix("firestore://"))
    yield client
    client.close()


class CallCounter:
    """A gRPC server that passes every call on to the emulator and counts them by method."""

    def __init__(self, target: str) -> None:
        self.calls: Counter[str] = Counter()
        self.open_streams: Counter[str] = Counter()
        self._channel = grpc.insecure_channel(target)
        self._server = grpc.server(ThreadPoolExecutor(32))
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{free_port()}")
        self._server.start()

    def service(self, details: Any) -> Any:
        method = details.method.rsplit("/", 1)[1]

        def passed_on(requests: Any, context: Any) -> Iterator[bytes]:
            self.calls[method] += 1
            self.open_streams[method] += 1
            call = self._channel.stream_stream(details.method)(requests, metadata=context.invocation_metadata())
            context.add_callback(call.cancel)
            try:
                yield from call
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            finally:
                self.open_streams[method] -= 1

        return grpc.stream_stream_rpc_method_handler(passed_on)

    def close(self) -> None:
        self._server.stop(0).wait(10)
        self._channel.close()


@pytest.fixture
def counter(
    place: Place, firestore_emulator: FirestoreEmulator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CallCounter]:
    counter = CallCounter(firestore_emulator.host)
    monkeypatch.setenv("FIRESTORE_EMULATOR_HOST", f"127.0.0.1:{counter.port}")
    yield counter
    for store in place.opened:
        store.close()
    counter.close()


@pytest.mark.req("S1-36", "S1-34")
def test_the_job_document_has_its_tasks_and_its_time_and_a_tombstone_when_marked(place: Place, client: Any):
    place.open("job-123", 4)
    document = client.document("jobs/job-123").get().to_dict()
    assert document.keys() == {"numTasks", "createdAt"}
    assert document["numTasks"] == 4
    assert abs(document["createdAt"] - datetime.now(UTC)) < timedelta(minutes=1)
    states.mark_job_deleted(place.url, "job-123")
    assert client.document("jobs/job-123").get().to_dict() == document | {"deleted": True}


@pytest.mark.req("S1-37", "S1-38")
def test_a_state_is_the_document_the_design_describes(place: Place, client: Any):
    store = place.open("job-123")
    manager = Manager("job-123", 0, 3, store)
    stored = manager.set_started("ingest", payload={"rows": 7}, event_id="e-1")
    document = client.document("jobs/job-123/states/0-ingest").get().to_dict()
    assert abs(document.pop("timestamp") - stored.timestamp) < timedelta(milliseconds=1)
    assert document == {
        "taskID": 0,
        "tag": "ingest",
        "status": 1,
        "message": "\U0001f7e2 Started",
        "version": 1,
        "eventID": "e-1",
        "payload": {"rows": 7},
        "schemaVersion": 1,
    }
    manager.set_finished("ingest")
    assert "payload" not in client.document("jobs/job-123/states/0-ingest").get().to_dict()
    assert [found.id for found in client.collection("jobs/job-123/states").stream()] == ["0-ingest"]


@pytest.mark.req("S1-64")
def test_a_document_of_a_newer_schema_is_read_and_what_is_not_known_is_left_alone(place: Place, client: Any):
    store = place.open()
    newer = {
        "taskID": 1, "tag": "a", "status": 5, "message": "", "version": 3, "schemaVersion": 2,
        "timestamp": firestore.SERVER_TIMESTAMP, "colour": "blue", "parts": [1, {"x": 2.5}],
    }  # fmt: skip
    client.document("jobs/job/states/1-a").set(newer)
    found = sees(store, 1, "a", 3)
    assert (found.schema_version, found.status, found.event_id, found.payload) == (2, 5, "", None)
    assert Manager("job", 1, 3, store).set_state("a", status=6).version == 4


@pytest.mark.req("S1-39", "S1-41")
def test_everything_is_read_once_at_the_beginning_and_reading_then_costs_no_call(place: Place, counter: CallCounter):
    writer = place.open()
    for task in range(3):
        for tag in ("a", "b"):
            writer.set_state(State("job", task, tag, task))
    counter.calls.clear()
    store = place.open()
    assert counter.calls["RunQuery"] == 1
    manager = Manager("job", 0, 3, store)
    counter.calls.clear()
    for _ in range(1_000):
        assert manager.get_state(task_id=2, tag="b").status == 2
    assert manager.get_state(tag="a").status == 0
    assert len(store.list_all_states()) == 6
    assert sum(counter.calls.values()) <= 1  # at most one sign of life between two stores


@pytest.mark.req("S1-43", "S1-44")
def test_one_stream_listens_from_the_beginning_whatever_the_number_of_subscribers(place: Place, counter: CallCounter):
    store = place.open()
    eventually(lambda: counter.open_streams["Listen"] == 1, 60)
    subscriptions = [Manager("job", task % 3, 3, store).subscribe(tag=f"t{task % 7}") for task in range(100)]
    for number in range(7):
        store.set_state(State("job", 0, f"t{number}", 1))
    for subscription in subscriptions:
        assert replayed(subscription) == []
        assert len(live(subscription)) == 1
    assert counter.calls["Listen"] == 1
    store.close()
    eventually(lambda: counter.open_streams["Listen"] == 0, 60)


@pytest.mark.req("S1-40")
def test_documents_added_changed_and_removed_behind_its_back_reach_the_cache(place: Place, client: Any):
    store = place.open()
    subscription = store.subscribe()
    replayed(subscription)
    store.set_state(State("job", 0, "a", 5))
    store.set_state(State("job", 0, "a", 6))
    document = client.document("jobs/job/states/0-a")
    document.delete()
    eventually(lambda: store.get_state(0, "a").version == 0, 60)
    store.set_state(State("job", 0, "a", 9))
    seen: list[State] = []
    while not seen or seen[-1].status != 9:
        seen += live(subscription)
    assert seen[-1].version == 1
    document.update({"status": 77, "version": 2})
    assert sees(store, 0, "a", 2).status == 77


@pytest.mark.req("S1-46")
def test_the_emulator_may_be_killed_and_started_under_a_listener(place: Place, firestore_emulator: FirestoreEmulator):
    store = place.open(retry=PERSISTENT)
    store.set_state(State("job", 0, "a", 5))
    firestore_emulator.kill9()  # its documents are gone
    eventually(lambda: not store.fresh, 60)
    firestore_emulator.start()
    eventually(lambda: store.fresh and store.list_all_states() == [], 60)
    with pytest.raises(NotFound):
        store.set_state(State("job", 0, "a", 6))
    place.open().set_state(State("job", 0, "a", 7))
    assert sees(store, 0, "a", 1).status == 7


def test_while_the_service_is_away_the_listener_waits_and_does_not_spin(
    place: Place, firestore_emulator: FirestoreEmulator
):
    store = place.open()  # with waits of a hundredth of a second, five times
    subscription = store.subscribe()
    firestore_emulator.kill9()
    with pytest.raises(Unavailable):
        list(subscription)
    before = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - before < 0.75  # Google's own listener used 0.8 of every second
    firestore_emulator.start()


def test_a_message_the_listener_cannot_read_does_not_end_it(place: Place, monkeypatch: pytest.MonkeyPatch):
    found, raised = FirestoreListener._found, threading.Event()

    def raising(self: FirestoreListener, document: Any) -> Any:
        if not raised.is_set():
            raised.set()
            raise ValueError("not my day")
        return found(self, document)

    store = place.open(retry=QUICK)
    monkeypatch.setattr(FirestoreListener, "_found", raising)
    store.set_state(State("job", 0, "a", 5))
    assert raised.wait(20)
    subscription = store.subscribe()
    place.open().set_state(State("job", 0, "b", 6))
    assert sees(store, 0, "b", 1).status == 6
    assert not subscription.closed


@pytest.mark.req("S1-59")
@pytest.mark.parametrize("url", ["firestore://", "firestore:///", "firestore:///database"])
def test_the_project_is_demanded_and_never_taken_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "FIRESTORE_PROJECT_ID"):
        monkeypatch.setenv(name, "inferred")
    with pytest.raises(InvalidInput, match="names no project"):
        states.open_store(url, "job", 1)


@pytest.mark.req("S1-60")
def test_projects_share_nothing(place: Place, firestore_emulator: FirestoreEmulator):
    place.open().set_state(State("job", 0, "a", 5))
    other, _ = states.open_store("firestore://" + firestore_emulator.new_project(), "job", 2)
    assert other.num_tasks == 2
    assert other.list_all_states() == []
    other.close()


@pytest.mark.req("S1-34", "S1-35")
def test_the_constructor_gives_the_store_and_the_number_of_tasks_in_force(place: Place):
    first = states.open_store(place.url, "job", 5)
    second = states.open_store(place.url, "job", 9)
    assert [(type(store), number) for store, number in (first, second)] == [(LiveStore, 5), (LiveStore, 5)]
    for store, _ in (first, second):
        assert isinstance(store._backend, FirestoreStates)
        store.close()


@pytest.mark.req("S1-61")
def test_a_deletion_that_was_interrupted_is_finished_by_the_next(place: Place, client: Any, monkeypatch: Any):
    store = place.open(history=True)
    for number in range(5):
        store.set_state(State("job", 0, f"t{number}"))
    monkeypatch.setattr("headway.states.firestore.DELETE_BATCH", 2)
    remove = FirestoreStates._remove
    removed: list[list[str]] = []

    def interrupted(self: FirestoreStates, names: list[str]) -> None:
        if len(removed) == 1:
            raise Unavailable("cut")
        removed.append(names)
        remove(self, names)

    monkeypatch.setattr(FirestoreStates, "_remove", interrupted)
    with pytest.raises(Unavailable):
        states.delete_job(place.url, "job")
    assert client.document("jobs/job").get().to_dict()["deleted"] is True
    monkeypatch.setattr(FirestoreStates, "_remove", remove)
    states.delete_job(place.url, "job")
    assert not client.document("jobs/job").get().exists
    for collection in ("states", "history"):
        assert list(client.collection(f"jobs/job/{collection}").stream()) == []


def test_without_credentials_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.delenv("FIRESTORE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(Unavailable, match="no credentials") as caught:
        states.open_store("firestore://some-project", "job", 1)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint
