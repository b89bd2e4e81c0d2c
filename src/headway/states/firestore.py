"""States in Google Firestore: ``jobs/{job}`` and ``jobs/{job}/states/{task}-{tag}``.

It speaks to the service's own API instead of through the document client, for three reasons found by trying: that
client's listener says nothing when its connection is lost and spins until it is back, a callback that raises ends it
without a word, and its transactions cannot be given a time limit. Here one stream per process listens; when it breaks
the supervisor in `headway.states.live` knows at once, waits by its own policy, and lists again.

The project is always said, never taken from the environment (``FIRESTORE_EMULATOR_HOST`` is, by tests).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from headway.errors import HeadwayError, InvalidInput, MissingExtra, StorageError, Unavailable
from headway.retry import RetryPolicy, call
from headway.states import firestore_values as values
from headway.states.state import Key, State
from headway.states.store import Change, JobRecord, Relist, Snapshot, marked_deleted, no_such_job
from headway.telemetry import redact

if TYPE_CHECKING:
    from google.cloud.firestore_v1.services.firestore import FirestoreClient

T = TypeVar("T")

#: Seconds one call may take.
CALL_SECONDS = 8.0
#: Seconds of silence before the listener asks whether the service is still there, and seconds it has to answer.
HEARTBEAT, PROBE_SECONDS = 4.0, 4.0
#: Documents removed in one commit; the service takes 500.
DELETE_BATCH = 200
#: A transaction that lost against another one is tried again this often, soon.
CONFLICT = RetryPolicy(retries=8, base=0.02, cap=1.0, jitter=0.5)
# The channel's own waiting between two connections must not outlast ours.
_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 4_000),  # how long one try to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_TARGET = 1


class FirestoreStates:
    """A `Backend` over one Firestore database: ``firestore://PROJECT`` or ``firestore://PROJECT/DATABASE``."""

    kind = "firestore"
    write_policy = RetryPolicy(retries=3, base=0.5, cap=4.0, jitter=0.2)
    listens_at_once = True  # 001 wants the cache warm from the beginning

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        project, database = parts.netloc, unquote(parts.path.strip("/")) or "(default)"
        if not project:
            raise InvalidInput(
                f"{redact(url)!r} names no project.",
                hint="Use firestore://PROJECT; the project is never taken from the environment.",
            )
        self._database = f"projects/{project}/databases/{database}"
        self._api, self._channel = _connect(os.environ.get("FIRESTORE_EMULATOR_HOST"))
        # When each document was created, over the life of this store: a new one of the same name is another document.
        self._created: dict[str, dict[Key, str]] = {}

    # ---- names ---------------------------------------------------------------------------------------------------

    def _job(self, job_id: str) -> str:
        return f"{self._database}/documents/jobs/{job_id}"

    def _name(self, job_id: str, key: Key) -> str:
        return f"{self._job(job_id)}/states/{key[0]}-{key[1]}"

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *, seconds: float | None = None, **request: Any) -> Any:
        """One call, with a time limit and without the client's own retries."""
        if "parent" not in request:
            request["database"] = self._database
        options = {"timeout": seconds or CALL_SECONDS, "retry": None, "metadata": _metadata(self._database)}
        return getattr(self._api, method)(request=request, **options)

    def _documents(self, parent: str, collection: str, limit: int | None = None) -> Iterator[Any]:
        query: dict[str, Any] = {"from_": [{"collection_id": collection}]}
        if limit is not None:
            query["limit"] = limit
        with _translating():
            for response in self._ask("run_query", parent=parent, structured_query=query):
                if response.document.name:
                    yield response.document

    def _get(self, names: list[str], **options: Any) -> dict[str, Any]:
        answers = self._ask("batch_get_documents", documents=names, **options)
        return {answer.found.name: answer.found for answer in answers if answer.found.name}

    def _transact(self, work: Callable[[bytes], tuple[T, list[dict[str, Any]]]]) -> tuple[T, Any]:
        """Run ``work(transaction)``, which reads and gives a result and the writes to commit; again after conflicts."""
        from google.api_core.exceptions import Aborted

        def once() -> tuple[T, Any]:
            token = self._ask("begin_transaction").transaction
            try:
                result, writes = work(token)
                return result, self._ask("commit", writes=writes, transaction=token)
            except HeadwayError:
                with suppress(Exception):  # it would lapse by itself; the reason is what matters
                    self._ask("rollback", transaction=token)
                raise

        with _translating():
            return call(once, CONFLICT, retry_on=Aborted)

    # ---- the job -------------------------------------------------------------------------------------------------

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        name = self._job(job_id)

        def work(token: bytes) -> tuple[None, list[dict[str, Any]]]:
            if self._get([name], transaction=token):
                return None, []
            fields: dict[str, Any] = {"numTasks": num_tasks} | ({"history": True} if history else {})
            return None, [values.write(name, fields, server_time="createdAt")]

        self._transact(work)
        record = self.find(job_id)
        assert record is not None, "it was there or was made above"
        return record

    def find(self, job_id: str) -> JobRecord | None:
        with _translating():
            found = self._get([self._job(job_id)])
        return _record(next(iter(found.values()))) if found else None

    def probe(self, job_id: str) -> None:
        """Ask something, on the channel of the listener, to see whether it still carries anything."""
        with _translating():
            self._get([self._job(job_id)], seconds=PROBE_SECONDS)

    def jobs(self) -> Iterator[JobRecord]:
        return map(_record, self._documents(f"{self._database}/documents", "jobs"))

    def mark_deleted(self, job_id: str) -> None:
        if self.find(job_id) is None:
            raise no_such_job(job_id)
        with _translating():
            write = values.write(self._job(job_id), {"deleted": True}, only=["deleted"])
            self._ask("commit", writes=[write])

    def delete(self, job_id: str) -> bool:
        """In batches, the job's own document last: interrupted, it is still listed and can be deleted again."""
        record = self.find(job_id)
        if record is not None and not record.deleted:
            self.mark_deleted(job_id)  # so that nobody writes behind us
        found = record is not None
        for collection in ("states", "history"):
            while names := [doc.name for doc in self._documents(self._job(job_id), collection, DELETE_BATCH)]:
                found = True
                self._remove(names)
        self._remove([self._job(job_id)])
        return found

    def _remove(self, names: list[str]) -> None:
        with _translating():
            self._ask("commit", writes=[{"delete": name} for name in names])

    # ---- states --------------------------------------------------------------------------------------------------

    def write(self, state: State) -> State:
        job, name = self._job(state.job_id), self._name(state.job_id, state.key)

        def work(token: bytes) -> tuple[State, list[dict[str, Any]]]:
            found = self._get([job, name], transaction=token)
            if job not in found:
                raise no_such_job(state.job_id)
            if _record(found[job]).deleted:
                raise marked_deleted(state.job_id)
            before = values.state(state.job_id, found[name]) if name in found else None
            if before is not None and before.event_id == state.event_id:
                return before, []
            fields = values.fields(state, 1 if before is None else before.version + 1)
            writes = [values.write(name, fields, server_time="timestamp")]
            if _record(found[job]).history:
                kept = f"{job}/history/{state.task_id}-{state.tag}-{fields['version']}"
                writes.append(values.write(kept, fields, server_time="timestamp"))
            return replace(state, version=fields["version"], timestamp=None), writes

        stored, committed = self._transact(work)
        return values.stamped(stored, committed)

    def read_all(self, job_id: str) -> Snapshot:
        states = [values.state(job_id, doc) for doc in self._documents(self._job(job_id), "states")]
        return Snapshot("", tuple(states))

    def read_again(self, job_id: str) -> Snapshot:
        """`read_all` for the listener, who remembers when each document was created."""
        created, recreated, states = self._created.setdefault(job_id, {}), set(), []
        for doc in self._documents(self._job(job_id), "states"):
            state, created_at = values.state(job_id, doc), values.created(doc)
            if created.setdefault(state.key, created_at) != created_at:
                recreated.add(state.key)
                created[state.key] = created_at
            states.append(state)
        return Snapshot("", tuple(states), frozenset(recreated))

    def read_history(self, job_id: str, task_id: int, tag: str) -> list[State]:
        kept = (values.state(job_id, doc) for doc in self._documents(self._job(job_id), "history"))
        return sorted((state for state in kept if state.key == (task_id, tag)), key=lambda state: state.version)

    def listen(self, job_id: str) -> FirestoreListener:
        return FirestoreListener(self, job_id, self._created.setdefault(job_id, {}))

    def begin_listening(self, job_id: str, requests: Iterator[Any], send: Callable[[Any], None]) -> Any:
        """A Listen stream. Asked of the transport, which gives the call at once; the client would first wait for an
        answer, and could not be stopped meanwhile. Without a time limit: the stream is meant to stay."""
        from google.cloud.firestore_v1.types import ListenRequest

        query = {"parent": self._job(job_id), "structured_query": {"from_": [{"collection_id": "states"}]}}
        send(ListenRequest(database=self._database, add_target={"query": query, "target_id": _TARGET}))
        stream: Any = self._api.transport.listen  # typed as if it took one request
        return stream(requests, metadata=_metadata(self._database))

    def close(self) -> None:
        self._channel.close()


class FirestoreListener:
    """One Listen stream over the states of one job. A thread reads it; `changes` takes what the thread found."""

    def __init__(self, states: FirestoreStates, job_id: str, created: dict[Key, str]) -> None:
        self._states = states
        self._job_id = job_id
        self._created = created
        self._heard: queue.SimpleQueue[list[Change] | Exception] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._listening = threading.Event()
        # Both belong to the reading thread: what the stream has told, and what it tells anew after a reset.
        self._delivered: set[Key] = set()
        self._current: set[Key] | None = None
        # The stream lives as long as there may be another request: until the None that `close` puts.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = states.begin_listening(job_id, iter(self._requests.get, None), self._requests.put)
        self._thread = threading.Thread(target=self._read, name=f"headway-firestore-{job_id}", daemon=True)
        self._thread.start()

    def snapshot(self) -> Snapshot:
        if not self._listening.wait(CALL_SECONDS):  # what is written after the listing must find us listening
            raise Unavailable(f"Firestore has not begun to tell within {CALL_SECONDS:g} s.")
        return self._states.read_again(self._job_id)

    def changes(self) -> list[Change]:
        try:
            heard = self._heard.get(timeout=HEARTBEAT)
        except queue.Empty:
            self._states.probe(self._job_id)  # silence may also be a dead connection
            return []
        if isinstance(heard, Exception):
            with _translating():
                raise heard
        return heard

    def wake(self) -> None:
        self._heard.put([])

    def close(self) -> None:
        self._closing.set()
        self._requests.put(None)
        self._call.cancel()
        self._thread.join(CALL_SECONDS)  # a channel that is closed under a running call brings gRPC down

    def _read(self) -> None:
        try:
            for response in self._call:
                try:
                    self._heard.put(self._translate(response))
                except Relist as relist:
                    self._heard.put(relist)
            self._heard.put(Unavailable("Firestore ended the stream."))
        except Exception as error:  # noqa: BLE001  (whatever it was, the supervisor must hear of it)
            if not self._closing.is_set():
                self._heard.put(error)
                self._listening.set()  # whoever waits for the beginning will find the error

    def _translate(self, response: Any) -> list[Change]:
        if response.document_change.document.name:
            document = response.document_change.document
            if _TARGET in response.document_change.removed_target_ids:
                return self._removed([values.key(document.name)])
            return self._found(document)
        if response.document_delete.document:
            return self._removed([values.key(response.document_delete.document)])
        if response.document_remove.document:
            return self._removed([values.key(response.document_remove.document)])
        if "filter" in response and response.filter.count != len(self._delivered):
            raise Relist  # the service says that we missed something
        return self._turn(response.target_change) if "target_change" in response else []

    def _found(self, document: Any) -> list[Change]:
        state, created_at = values.state(self._job_id, document), values.created(document)
        self._delivered.add(state.key)
        if self._current is not None:
            self._current.add(state.key)
        found = [Change(state.key, state)]
        if self._created.get(state.key, created_at) != created_at:
            found.insert(0, Change(state.key, None))  # it was removed in between, unseen
        self._created[state.key] = created_at
        return found

    def _removed(self, keys: Iterable[Key]) -> list[Change]:
        keys = list(keys)
        for key in keys:
            self._created.pop(key, None)
            self._delivered.discard(key)
        return [Change(key, None) for key in keys]

    def _turn(self, turn: Any) -> list[Change]:
        if turn.target_change_type.name == "REMOVE":
            raise Unavailable(f"Firestore stopped telling: {turn.cause.message or turn.cause.code}")
        if turn.target_change_type.name == "RESET":
            self._current = set()  # all that stands is told again
        elif turn.target_change_type.name == "CURRENT":
            self._listening.set()
            gone = set() if self._current is None else self._delivered - self._current
            self._current = None
            if gone:
                # Removed, it seems. But a CURRENT may come between a reset and what is told after it: the listing decides.
                self._delivered -= gone
                raise Relist
        return []


def _connect(emulator: str | None) -> tuple[FirestoreClient, Any]:
    """A client of the service's API, and its channel, which whoever asked for it closes."""
    try:
        import grpc  # type: ignore[import-untyped]  # it ships no types
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.firestore_v1.services.firestore import FirestoreClient
        from google.cloud.firestore_v1.services.firestore.transports import FirestoreGrpcTransport
    except ImportError as error:
        raise MissingExtra("firestore", "A firestore:// store") from error
    if emulator:
        channel = grpc.insecure_channel(emulator, options=_CHANNEL)
    else:
        try:
            channel = FirestoreGrpcTransport.create_channel(options=_CHANNEL)
        except GoogleAuthError as error:
            raise Unavailable(
                f"There are no credentials for Firestore: {redact(str(error))}",
                hint="Name the service account's file in GOOGLE_APPLICATION_CREDENTIALS, or: gcloud auth login",
            ) from error
    return FirestoreClient(transport=FirestoreGrpcTransport(channel=channel)), channel


def _metadata(database: str) -> tuple[tuple[str, str]]:
    """The service finds the database by it."""
    return (("google-cloud-resource-prefix", database),)


def _record(document: Any) -> JobRecord:
    fields = values.plain(document.fields)
    job_id = document.name.rsplit("/", 1)[1]
    # Each document's own creation time tells a new one from an old one, so the job needs no incarnation.
    return JobRecord(
        job_id,
        int(fields["numTasks"]),
        fields.get("createdAt"),
        "",
        deleted=bool(fields.get("deleted", False)),
        history=bool(fields.get("history", False)),
    )


@contextmanager
def _translating() -> Iterator[None]:
    import grpc
    from google.api_core import exceptions

    try:
        try:
            yield
        except grpc.RpcError as error:  # from the stream, which we read without the client
            known: Exception = exceptions.from_grpc_error(error)  # type: ignore[no-untyped-call]  # as it is
            raise known from error
    except HeadwayError:
        raise
    except (exceptions.PermissionDenied, exceptions.Unauthenticated) as error:
        raise Unavailable(
            f"Firestore refused us: {redact(error.message)}",
            hint="The service account needs roles/datastore.user in that project.",
        ) from error
    except (exceptions.ServerError, exceptions.RetryError, exceptions.TooManyRequests, exceptions.Aborted) as error:
        _away(error)
    except exceptions.GoogleAPICallError as error:
        raise StorageError(f"Firestore did not do it: {redact(str(error))}") from error


def _away(error: Exception) -> NoReturn:
    raise Unavailable(
        f"Firestore cannot be reached: {redact(str(error))}", hint="Check the network and the project's name."
    ) from error
