"""One Listen stream of Firestore: what changes in one job, as its documents are told.

A document of a state that appears, disappears or was created anew makes the listener look at the job's own document
before anybody is told, so that the states of a job that was made again are never taken for those of the one before.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.errors import Unavailable
from headway.states import firestore_service as service
from headway.states import firestore_values as values
from headway.states.state import Key, State
from headway.states.store import Change, JobRecord, Mark, Relist, Snapshot, readable

if TYPE_CHECKING:
    from headway.states.firestore import FirestoreStates

#: Seconds of silence before the listener asks whether the service and the job are still there.
HEARTBEAT = 3.0
#: The number by which the stream names what we asked it for.
TARGET = 1


@dataclass(frozen=True, slots=True)
class _Seen:
    """A document the stream told of: with its state and when it was created, or gone."""

    key: Key
    state: State | None = None
    created: str = ""


class FirestoreListener:
    """One Listen stream over the states of one job. A thread reads it; `changes` takes what the thread found."""

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
        # Both belong to the reading thread: the names the stream has delivered, and those it delivers anew after a reset.
        self._delivered: set[str] = set()
        self._current: set[str] | None = None
        # The stream lives as long as there may be another request: until the None that `close` puts.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = states.begin_listening(job.job_id, iter(self._requests.get, None), self._requests.put)
        self._thread = threading.Thread(target=self._read, name=f"headway-firestore-{job.job_id}", daemon=True)
        self._thread.start()

    def snapshot(self, since: Mark) -> Snapshot:
        if not self._listening.wait(service.CALL_SECONDS):  # what is written after the listing must find us listening
            raise Unavailable(f"Firestore has not begun to tell within {service.CALL_SECONDS:g} s.")
        snapshot = self._states.read_all(self._job, since)
        self._deleted = snapshot.deleted
        return snapshot

    def changes(self) -> list[Change]:
        seen, look = self._next(), False
        changes: list[Change] = []
        for document in seen:
            before = self._created.get(document.key)
            if document.state is None:
                look = True
                self._created.pop(document.key, None)
            elif before != document.created:
                look = True
                self._created[document.key] = document.created
                if before is not None:
                    changes.append(Change(document.key, None))  # it was removed in between, unseen
            changes.append(Change(document.key, document.state))
        if (look or not seen) and not self._woken and not self._states.same(self._job, deleted=self._deleted):
            raise Relist
        return changes

    def _next(self) -> list[_Seen]:
        """All that was heard up to now; nothing after a silence."""
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
        self._thread.join(service.CALL_SECONDS)  # a channel that is closed under a running call brings gRPC down

    def _read(self) -> None:
        try:
            for response in self._call:
                try:
                    if seen := self._translate(response):
                        self._heard.put(seen)
                except Relist as relist:
                    self._heard.put(relist)
            self._heard.put(Unavailable("Firestore ended the stream."))
        except Exception as error:  # noqa: BLE001  (whatever it was, the supervisor must hear of it)
            if not self._closing.is_set():
                self._heard.put(error)
                self._listening.set()  # whoever waits for the beginning will find the error

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
            raise Relist  # the service says that we missed something
        if "target_change" in response:
            self._turn(response.target_change)
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
            return []  # it was no state

    def _turn(self, turn: Any) -> None:
        if turn.target_change_type.name == "REMOVE":
            raise Unavailable(f"Firestore stopped telling: {turn.cause.message or turn.cause.code}")
        if turn.target_change_type.name == "RESET":
            self._current = set()  # all that is current is told again
        elif turn.target_change_type.name == "CURRENT":
            self._listening.set()
            gone = set() if self._current is None else self._delivered - self._current
            self._current = None
            if gone:
                # Removed, it seems. But a CURRENT may come between a reset and what is told after it: the listing decides.
                self._delivered -= gone
                raise Relist
