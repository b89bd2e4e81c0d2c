"""A Firestore Listen stream that delivers the changes of one job.

When a state document appears, disappears or is re-created, the listener rereads the job's document before it publishes.
So the states of a re-created job are never mixed with those of the previous one.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.errors import Unavailable
from headway.states.state import Key, State
from headway.states.store import firestore_service as service
from headway.states.store import firestore_values as values
from headway.states.store.contract import Change, JobRecord, Mark, Relist, Snapshot, readable

if TYPE_CHECKING:
    from headway.states.store.firestore import FirestoreStates

#: Seconds of silence after which the listener checks that the service and the job still exist.
HEARTBEAT = 3.0
#: Id of our query on the stream.
TARGET = 1


@dataclass(frozen=True, slots=True)
class _Seen:
    """A document from the stream: its state and creation time, or no state if it was removed."""

    key: Key
    state: State | None = None
    created: str = ""


class FirestoreListener:
    """Listen stream over the states of one job. A thread reads the stream; `changes` returns what it queued."""

    mark: Mark = None

    def __init__(self, states: FirestoreStates, job: JobRecord, created: dict[Key, str]) -> None:
        self._states = states
        self._job = job
        self._deleted = job.deleted
        self._created = created
        self._heard: queue.SimpleQueue[list[_Seen] | Exception] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._woken = False
        self._listening = threading.Event()
        # Used by the reading thread only: document names delivered so far, and those delivered since a reset.
        self._delivered: set[str] = set()
        self._current: set[str] | None = None
        # The stream stays open while the request iterator blocks: until `close` puts None.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = states.begin_listening(job.job_id, iter(self._requests.get, None), self._requests.put)
        self._thread = threading.Thread(target=self._read, name=f"headway-firestore-{job.job_id}", daemon=True)
        self._thread.start()

    def snapshot(self, since: Mark) -> Snapshot:
        if not self._listening.wait(service.CALL_SECONDS):  # no write after the listing may be missed
            raise Unavailable(f"Firestore did not start the stream within {service.CALL_SECONDS:g} s.")
        snapshot = self._states.read_all(self._job, since)
        self._deleted = snapshot.deleted
        return snapshot

    def changes(self) -> list[Change]:
        seen, check = self._next(), False
        changes: list[Change] = []
        for document in seen:
            before = self._created.get(document.key)
            if document.state is None:
                check = True
                self._created.pop(document.key, None)
            elif before != document.created:
                check = True
                self._created[document.key] = document.created
                if before is not None:
                    changes.append(Change(document.key, None))  # removed and re-created in between
            changes.append(Change(document.key, document.state))
        if (check or not seen) and not self._woken and not self._states.same(self._job, deleted=self._deleted):
            raise Relist
        return changes

    def _next(self) -> list[_Seen]:
        """Return all queued documents, or an empty list after `HEARTBEAT` seconds of silence."""
        seen: list[_Seen] = []
        try:
            heard = self._heard.get(timeout=HEARTBEAT)
            while True:
                if isinstance(heard, Exception):
                    with service.translating():
                        raise heard
                seen += heard
                heard = self._heard.get_nowait()
        except queue.Empty:
            return seen

    def wake(self) -> None:
        self._woken = True
        self._heard.put([])

    def close(self) -> None:
        self._closing.set()
        self._requests.put(None)
        self._call.cancel()
        self._thread.join(service.CALL_SECONDS)  # closing a channel during a running call crashes gRPC

    def _read(self) -> None:
        try:
            for response in self._call:
                try:
                    if seen := self._translate(response):
                        self._heard.put(seen)
                except Relist as relist:
                    self._heard.put(relist)
            self._heard.put(Unavailable("Firestore ended the stream."))
        except Exception as error:  # noqa: BLE001  (the supervisor must receive every error)
            if not self._closing.is_set():
                self._heard.put(error)
                self._listening.set()  # a waiting `snapshot` proceeds; `changes` raises the error

    def _translate(self, response: Any) -> list[_Seen]:
        if response.document_change.document.name:
            document = response.document_change.document
            if TARGET in response.document_change.removed_target_ids:
                return self._removed(document.name)
            return self._found(document)
        if response.document_delete.document:
            return self._removed(response.document_delete.document)
        if response.document_remove.document:
            return self._removed(response.document_remove.document)
        if "filter" in response and response.filter.count != len(self._delivered):
            raise Relist  # the service's document count differs: we missed a change
        if "target_change" in response:
            self._change_target(response.target_change)
        return []

    def _found(self, document: Any) -> list[_Seen]:
        self._delivered.add(document.name)
        if self._current is not None:
            self._current.add(document.name)
        states = readable([document], lambda found: values.state(self._job.job_id, found), self._job.job_id)
        return [_Seen(state.key, state, values.created(document)) for state in states]

    def _removed(self, name: str) -> list[_Seen]:
        self._delivered.discard(name)
        try:
            return [_Seen(values.key(name))]
        except ValueError:
            return []  # not a state document

    def _change_target(self, change: Any) -> None:
        if change.target_change_type.name == "REMOVE":
            raise Unavailable(f"Firestore ended the stream: {change.cause.message or change.cause.code}")
        if change.target_change_type.name == "RESET":
            self._current = set()  # the service will send all current documents again
        elif change.target_change_type.name == "CURRENT":
            self._listening.set()
            gone = set() if self._current is None else self._delivered - self._current
            self._current = None
            if gone:
                # Probably removed. But CURRENT may arrive between a reset and the documents sent after it, so list again.
                self._delivered -= gone
                raise Relist
