"""What is particular to Firestore: its documents, its listener, its project. Against a real emulator."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]  # it ships no types
import pytest
from google.api_core.exceptions import Cancelled
from google.cloud import firestore
from google.cloud.firestore_v1.types import ListenResponse

from headway import states
from headway.core.retry import RetryPolicy
from headway.errors import InvalidInput, StorageError, Unavailable
from headway.states import JobGone, LiveStore, Manager, State
from headway.states.store.firestore import FirestoreStates
from tests.services.firestore import FirestoreEmulator
from tests.services.server import free_port
from tests.services.waiting import eventually
from tests.states.conftest import Place, live, replayed, sees
from tests.states.test_outages import PERSISTENT

pytestmark = pytest.mark.stores(("firestore",))


@pytest.fixture
def client(place: Place) -> Iterator[firestore.Client]:
    """Google's own client, to see what is really there."""
    client = firestore.Client(project=place.url.removeprefix("firestore://"))
    yield client
    client.close()


class CallCounter:
    """A gRPC server that passes every call on to the emulator, counts them by method, and misbehaves on command."""

    def __init__(self, target: str) -> None:
        self.calls: Counter[str] = Counter()
        self.open_streams: Counter[str] = Counter()
        #: Called with the method and how often it was called; a status is answered instead of passing the call on.
        self.refuse: Callable[[str, int], grpc.StatusCode | None] = lambda *_: None
        #: The same, after the emulator has done it: its answer is lost.
        self.lose: Callable[[str, int], bool] = lambda *_: False
        #: What becomes of an answer of the Listen stream: those to pass on.
        self.rewrite: Callable[[ListenResponse], list[ListenResponse]] = lambda answer: [answer]
        self._channel = grpc.insecure_channel(target)
        self._server = grpc.server(ThreadPoolExecutor(32))
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{free_port()}")
        self._server.start()

    def service(self, details: Any) -> Any:
        method = details.method.rsplit("/", 1)[1]

        def passed_on(requests: Any, context: Any) -> Iterator[bytes]:
            self.calls[method] += 1
            number = self.calls[method]
            if (refused := self.refuse(method, number)) is not None:
                context.abort(refused, "refused on the way")
            self.open_streams[method] += 1
            call = self._channel.stream_stream(details.method)(requests, metadata=context.invocation_metadata())
            context.add_callback(call.cancel)
            try:
                for answer in call:
                    if self.lose(method, number):
                        context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way")
                    yield from self._rewritten(answer) if method == "Listen" else [answer]
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            finally:
                self.open_streams[method] -= 1

        return grpc.stream_stream_rpc_method_handler(passed_on)

    def _rewritten(self, answer: bytes) -> list[bytes]:
        return [ListenResponse.serialize(kept) for kept in self.rewrite(ListenResponse.deserialize(answer))]

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


@pytest.mark.req("S1-09")
def test_the_time_of_a_state_is_the_one_at_which_the_service_took_it(place: Place, client: Any):
    stored = place.open().set_state(State("job", 0, "a", timestamp=datetime(2000, 1, 1, tzinfo=UTC)))
    document = client.document("jobs/job/states/0-a").get()
    assert stored.timestamp is not None
    assert abs(stored.timestamp - document.get("timestamp")) < timedelta(milliseconds=1)
    assert abs(document.get("timestamp") - document.update_time) < timedelta(seconds=10)


@pytest.mark.req("S1-64")
def test_unknown_fields_of_a_newer_document_are_kept(place: Place, client: Any):
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
def test_one_stream_listens_for_any_number_of_subscribers(place: Place, counter: CallCounter):
    store = place.open(retry=PERSISTENT)
    eventually(lambda: counter.open_streams["Listen"] == 1, 60)  # before anybody has read or subscribed
    subscriptions = [Manager("job", task % 3, 3, store).subscribe(tag=f"t{task % 7}") for task in range(100)]
    for number in range(7):
        store.set_state(State("job", 0, f"t{number}", 1))
    for subscription in subscriptions:
        assert replayed(subscription) == []
        assert len(live(subscription)) == 1
    assert (counter.calls["Listen"], counter.open_streams["Listen"]) == (1, 1)
    place.open("another")
    eventually(lambda: counter.open_streams["Listen"] == 2, 60)  # one for each job

    def broken(_: ListenResponse) -> list[ListenResponse]:
        counter.rewrite = lambda answer: [answer]
        raise ConnectionError("cut")

    counter.rewrite = broken
    store.set_state(State("job", 0, "t1", 2))
    eventually(lambda: counter.calls["Listen"] == 3, 60)
    eventually(lambda: counter.open_streams["Listen"] == 2, 60)  # the new one replaces the one that broke
    store.close()
    eventually(lambda: counter.open_streams["Listen"] == 1, 60)


@pytest.mark.req("S1-40", "S1-68")
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
    subscription = store.subscribe()
    firestore_emulator.kill9()  # its documents are gone
    eventually(lambda: not store.fresh, 60)
    firestore_emulator.start()
    with pytest.raises(JobGone):
        list(subscription)
    with pytest.raises(JobGone):
        store.set_state(State("job", 0, "a", 6))
    again = place.open()
    assert again.set_state(State("job", 0, "a", 7)).version == 1


def test_while_the_service_is_away_the_listener_waits_and_does_not_spin(
    place: Place, firestore_emulator: FirestoreEmulator
):
    store = place.open()  # with waits of a hundredth of a second, five times
    subscription = store.subscribe()
    firestore_emulator.kill9()
    with pytest.raises(Unavailable):
        list(subscription)
    before = time.process_time()
    time.sleep(0.6)
    assert time.process_time() - before < 0.3  # Google's own listener used 0.8 of every second
    firestore_emulator.start()


@pytest.mark.parametrize(
    "poison",
    [
        {"colour": "blue"},
        {"taskID": "1", "tag": "x", "status": 1, "message": "", "version": 1},
        {"taskID": 1, "tag": "x", "status": "high", "message": "", "version": 1},
        {"taskID": 0, "tag": "a", "status": 1, "message": "", "version": 99},
    ],
    ids=["no fields", "task", "status", "another key's"],
)
def test_an_invalid_document_affects_no_other(
    place: Place, client: Any, poison: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    store = place.open()
    subscription = store.subscribe()
    client.document("jobs/job/states/1-x").set(poison)
    client.document("jobs/job/states/nonsense").set(poison)
    eventually(lambda: any("is corrupt" in record.getMessage() for record in caplog.records), 60)
    store.set_state(State("job", 0, "a", 5))
    assert replayed(subscription) == []
    assert [state.status for state in live(subscription)] == [5]
    client.document("jobs/job/states/nonsense").delete()
    fresh = place.open()
    assert [state.status for state in fresh.list_all_states()] == [5]


@pytest.mark.req("S1-59")
@pytest.mark.parametrize("url", ["firestore://", "firestore:///", "firestore:///database"])
def test_the_project_is_demanded_and_never_taken_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "FIRESTORE_PROJECT_ID"):
        monkeypatch.setenv(name, "inferred")
    with pytest.raises(InvalidInput, match="does not name a project"):
        states.open_store(url, "job", 1)


@pytest.mark.req("S1-60")
def test_projects_share_nothing_neither_writing_nor_listening_nor_deleting(
    place: Place, firestore_emulator: FirestoreEmulator
):
    store = place.open()
    store.set_state(State("job", 0, "a", 5))
    url = "firestore://" + firestore_emulator.new_project()
    other, _ = states.open_store(url, "job", 2)
    with other.subscribe() as subscription:
        assert other.num_tasks == 2
        assert replayed(subscription) == []
        store.set_state(State("job", 0, "a", 6))
        other.set_state(State("job", 1, "b", 7))
        assert [(state.key, state.status) for state in live(subscription)] == [((1, "b"), 7)]
    other.close()
    states.delete_job(url, "job")
    assert place.open().get_state(0, "a").status == 6


@pytest.mark.req("S1-60")
def test_the_documented_role_may_use_documents_and_no_more():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "states.md").read_text()
    assert set(re.findall(r"roles/[\w.]+", text)) == {"roles/datastore.user"}


@pytest.mark.req("S1-34", "S1-35")
def test_the_constructor_gives_the_store_and_the_number_of_tasks_in_force(place: Place):
    first = states.open_store(place.url, "job", 5)
    second = states.open_store(place.url, "job", 9)
    assert [(type(store), number) for store, number in (first, second)] == [(LiveStore, 5), (LiveStore, 5)]
    for store, _ in (first, second):
        assert isinstance(store._backend, FirestoreStates)
        store.close()


@pytest.mark.req("S1-61")
def test_a_deletion_that_was_interrupted_is_finished_by_the_next(
    place: Place, client: Any, counter: CallCounter, monkeypatch: pytest.MonkeyPatch
):
    store = place.open(history=True)
    for number in range(5):
        store.set_state(State("job", 0, f"t{number}"))
    store.close()
    monkeypatch.setattr("headway.states.store.firestore.DELETE_BATCH", 2)
    counter.calls.clear()  # the tombstone, the first batch, and no further
    counter.refuse = lambda method, number: grpc.StatusCode.UNAVAILABLE if method == "Commit" and number > 2 else None
    with pytest.raises(Unavailable):
        states.delete_job(place.url, "job")
    assert client.document("jobs/job").get().to_dict()["deleted"] is True
    assert len(list(client.collection("jobs/job/states").stream())) == 3
    counter.refuse = lambda *_: None
    states.delete_job(place.url, "job")
    assert not client.document("jobs/job").get().exists
    for collection in ("states", "history"):
        assert list(client.collection(f"jobs/job/{collection}").stream()) == []


def test_a_message_lost_on_the_way_is_noticed_by_the_count_the_service_sends(place: Place, counter: CallCounter):
    lost: list[str] = []

    def forgetful(answer: ListenResponse) -> list[ListenResponse]:
        if not lost and answer.document_change.document.name.endswith("/1-a"):
            lost.append(answer.document_change.document.name)
            return [ListenResponse(filter={"target_id": 1, "count": 1})]  # as the service does when it knows better
        return [answer]

    store = place.open()
    subscription = store.subscribe()
    replayed(subscription)
    counter.rewrite = forgetful
    place.open().set_state(State("job", 1, "a", 5))
    assert [state.status for state in live(subscription)] == [5]
    assert lost


def test_nothing_is_listed_before_the_service_has_begun_to_tell(place: Place, counter: CallCounter):
    begun, may_begin = threading.Event(), threading.Event()

    def held(answer: ListenResponse) -> list[ListenResponse]:
        begun.set()
        assert may_begin.wait(60)
        return [answer]

    place.open().close()
    counter.rewrite = held
    counter.calls.clear()
    opening = threading.Thread(target=place.open)
    opening.start()
    assert begun.wait(60)
    assert counter.calls["RunQuery"] == 0
    may_begin.set()
    opening.join(60)
    assert counter.calls["RunQuery"] == 1


def test_after_giving_up_a_document_that_was_made_again_is_read_as_it_is(
    place: Place, client: Any, counter: CallCounter
):
    store = place.open(retry=RetryPolicy(retries=1, base=0.01))
    for number in range(3):
        store.set_state(State("job", 0, "a", number + 1))
    subscription = store.subscribe()
    counter.refuse = lambda method, _: grpc.StatusCode.UNAVAILABLE if method == "Listen" else None
    counter.rewrite = lambda _: (_ for _ in ()).throw(ConnectionError("cut"))

    def deleted() -> bool:
        try:
            client.document("jobs/job/states/0-a").delete()
        except Cancelled:  # so the emulator answers a writer whom it finds telling a stream that was cut
            return False
        return True

    eventually(deleted, 30)
    with pytest.raises(Unavailable):
        list(subscription)
    counter.rewrite = lambda answer: [answer]
    client.document("jobs/job/states/0-a").set(
        {"taskID": 0, "tag": "a", "status": 42, "message": "", "version": 1, "timestamp": firestore.SERVER_TIMESTAMP}
    )
    assert (store.get_state(0, "a").status, store.get_state(0, "a").version) == (42, 1)


@pytest.mark.req("S1-53", "S1-54")
def test_a_write_with_a_lost_answer_is_recognised_despite_another_writer(
    place: Place, counter: CallCounter, client: Any, monkeypatch: pytest.MonkeyPatch
):
    store, other = place.open(), place.open()
    committed, lost = threading.Event(), threading.Event()

    def lose(method: str, _: int) -> bool:
        if method == "Commit" and not lost.is_set():
            lost.set()
            return True
        if method == "Commit":
            committed.set()
        return False

    store.set_state(State("job", 0, "a", 1))
    counter.lose = lose
    written: list[State] = []
    writing = threading.Thread(target=lambda: written.append(store.set_state(State("job", 0, "a", 2))))
    writing.start()
    assert lost.wait(60)
    assert other.set_state(State("job", 0, "a", 3)).version in (2, 3)
    writing.join(60)
    versions = client.document("jobs/job/states/0-a").get().to_dict()["version"]
    assert versions == 3, "three states were written"
    assert written[0].version == 2


def test_a_refused_commit_does_not_hold_up_the_next_write_of_its_key(place: Place, counter: CallCounter):
    store = place.open()
    store.set_state(State("job", 0, "a", 1))
    counter.refuse = lambda method, _: grpc.StatusCode.INVALID_ARGUMENT if method == "Commit" else None
    with pytest.raises(StorageError):
        store.set_state(State("job", 0, "a", 2))
    counter.refuse = lambda *_: None
    rolled_back = counter.calls["Rollback"]
    began = time.monotonic()
    assert store.set_state(State("job", 0, "a", 3)).version == 2
    assert time.monotonic() - began < 20, "a transaction that is left open holds its documents for a minute"
    assert rolled_back == 1


def test_a_conflict_is_tried_again_and_is_never_called_an_outage(place: Place, counter: CallCounter, monkeypatch: Any):
    store = place.open()
    counter.calls.clear()
    counter.refuse = lambda method, number: grpc.StatusCode.ABORTED if method == "Commit" and number <= 6 else None
    assert store.set_state(State("job", 0, "a", 1)).version == 1
    monkeypatch.setattr("headway.states.store.firestore.CONFLICT", RetryPolicy(retries=2, base=0.01))
    counter.refuse = lambda method, _: grpc.StatusCode.ABORTED if method == "Commit" else None
    with pytest.raises(StorageError, match="Other processes keep writing") as caught:
        store.set_state(State("job", 0, "a", 2))
    assert "cannot be reached" not in str(caught.value)


def test_without_credentials_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.delenv("FIRESTORE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(Unavailable, match="No credentials") as caught:
        states.open_store("firestore://some-project", "job", 1)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint
