"""States in Google Firestore: ``jobs/{job}`` and ``jobs/{job}/states/{task}-{tag}``.

This backend uses the low-level API instead of the document client, for three reasons. The client's listener does not
report a lost connection and busy-loops until it is back. A callback that raises ends the listener silently. And its
transactions have no time limit. Here each process opens one stream per job. When the stream breaks, the supervisor in
`headway.states.live` notices at once, backs off by its own policy, and lists again.

A job's incarnation is the creation time of its document. When a state document appears, disappears or is re-created,
the listener rereads the job's document before it publishes. So states of a re-created job are never mixed with old ones.

The project always comes from the URL, never from the environment. Tests set ``FIRESTORE_EMULATOR_HOST``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from headway.core.retry import RetryPolicy, call
from headway.errors import InvalidInput, StorageError, Unavailable
from headway.states.state import Key, State, moment
from headway.states.store import firestore_service as service
from headway.states.store import firestore_values as values
from headway.states.store.contract import (
    JobGone,
    JobRecord,
    Mark,
    Snapshot,
    found_in_recent,
    job_gone,
    marked_deleted,
    no_such_job,
    readable,
    recent_with,
)
from headway.states.store.firestore_listener import TARGET, FirestoreListener
from headway.telemetry import redact

if TYPE_CHECKING:
    pass

T = TypeVar("T")

#: Timeout of a rollback, in seconds. A transaction without rollback locks its documents for a minute.
ROLLBACK_SECONDS = 2.0
#: Timeout of the check that the service and the job still exist, in seconds.
PROBE_SECONDS = 4.0
#: Documents deleted per commit. The service's limit is 500.
DELETE_BATCH = 200
#: Retries of a transaction after a conflict: about half a minute in total.
CONFLICT = RetryPolicy(retries=20, base=0.02, cap=2.0, jitter=0.5)
#: Retries while opening a store, for a short outage.
OPENING = RetryPolicy(retries=3, base=0.25, cap=1.0)


class FirestoreStates:
    """A `Backend` over one Firestore database: ``firestore://PROJECT`` or ``firestore://PROJECT/DATABASE``."""

    kind = "firestore"
    write_policy = RetryPolicy(retries=3, base=0.5, cap=4.0, jitter=0.2)
    listens_at_once = True  # spec 001 requires a warm cache from the start

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        project, database = parts.netloc, unquote(parts.path.strip("/")) or "(default)"
        if not project:
            raise InvalidInput(
                f"{redact(url)!r} does not name a project.",
                hint="Use firestore://PROJECT; the project is never taken from the environment.",
            )
        self._database = f"projects/{project}/databases/{database}"
        self._api, self._channel = service.connect(os.environ.get("FIRESTORE_EMULATOR_HOST"))
        # Creation time of every document seen. A document re-created under the same name is a different document.
        self._created: dict[str, dict[Key, str]] = {}
        self._written: dict[tuple[str, Key], str] = {}  # our last event id per key

    # ---- names ---------------------------------------------------------------------------------------------------

    def _job(self, job_id: str) -> str:
        return f"{self._database}/documents/jobs/{job_id}"

    def _name(self, job_id: str, key: Key) -> str:
        return f"{self._job(job_id)}/states/{key[0]}-{key[1]}"

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *, seconds: float | None = None, **request: Any) -> Any:
        """Make one call with a time limit and without the client's own retries."""
        if "parent" not in request:
            request["database"] = self._database
        options = {
            "timeout": seconds or service.CALL_SECONDS,
            "retry": None,
            "metadata": service.metadata(self._database),
        }
        return getattr(self._api, method)(request=request, **options)

    def _documents(
        self, parent: str, collection: str, limit: int | None = None, *, newest: bool = False, **options: Any
    ) -> Iterator[Any]:
        query: dict[str, Any] = {"from_": [{"collection_id": collection}]}
        if limit is not None:
            query["limit"] = limit
        if newest:
            query["order_by"] = [{"field": {"field_path": "timestamp"}, "direction": "DESCENDING"}]
        with service.translating():
            for response in self._ask("run_query", parent=parent, structured_query=query, **options):
                if response.document.name:
                    yield response.document

    def _get(self, names: list[str], **options: Any) -> dict[str, Any]:
        answers = self._ask("batch_get_documents", documents=names, **options)
        return {answer.found.name: answer.found for answer in answers if answer.found.name}

    def _transact(self, work: Callable[[bytes], tuple[T, list[dict[str, Any]]]]) -> tuple[T, Any]:
        """Run ``work(transaction)``, commit the writes it returns, and retry after a conflict.

        ``work`` reads within the transaction and returns a result and the writes. A conflict is not an outage: another
        transaction committed first. Unless the commit succeeds, the transaction is rolled back, because the service keeps
        its documents locked until then.
        """
        from google.api_core.exceptions import Aborted

        def once() -> tuple[T, Any]:
            token = self._ask("begin_transaction").transaction
            try:
                result, writes = work(token)
                return result, self._ask("commit", writes=writes, transaction=token)
            except BaseException:
                with suppress(Exception):  # the transaction would expire by itself; the original error matters more
                    self._ask("rollback", transaction=token, seconds=ROLLBACK_SECONDS)
                raise

        with service.translating():
            try:
                return call(once, CONFLICT, retry_on=Aborted)
            except Aborted as error:
                raise StorageError(
                    f"Other processes keep writing the same documents of Firestore: {redact(str(error))}",
                    hint="Let fewer processes write the states of one task, or write less often.",
                ) from error

    # ---- the job -------------------------------------------------------------------------------------------------

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        """Create the job if it does not exist. The service decides atomically, so concurrent callers do not wait."""
        from google.api_core.exceptions import AlreadyExists, FailedPrecondition

        fields: dict[str, Any] = {"numTasks": num_tasks} | ({"history": True} if history else {})
        creation = values.write(self._job(job_id), fields, server_time="createdAt") | {
            "current_document": {"exists": False}
        }
        while True:
            record = call(lambda: self.find(job_id), OPENING, retry_on=Unavailable)
            if record is not None:
                return record
            with service.translating(), suppress(AlreadyExists, FailedPrecondition):
                self._ask("commit", writes=[creation])

    def find(self, job_id: str) -> JobRecord | None:
        return self._find(job_id)

    def _find(self, job_id: str, **options: Any) -> JobRecord | None:
        with service.translating():
            found = self._get([self._job(job_id)], **options)
        return _record(next(iter(found.values()))) if found else None

    def same(self, job: JobRecord, *, deleted: bool) -> bool:
        """Return whether the job still has its incarnation and the given ``deleted`` flag.

        The call uses the listener's channel, so an answer also proves that the channel works.
        """
        found = self._find(job.job_id, seconds=PROBE_SECONDS)
        return found is not None and (found.incarnation, found.deleted) == (job.incarnation, deleted)

    def jobs(self) -> Iterator[JobRecord]:
        return map(_record, self._documents(f"{self._database}/documents", "jobs"))

    def mark_deleted(self, job_id: str, incarnation: str | None = None) -> None:
        self._mark_deleted(job_id, incarnation, None)

    def _mark_deleted(self, job_id: str, incarnation: str | None, unless_after: Mark) -> bool:
        """Mark the job as deleted, unless it was written to after ``unless_after``. Return whether it is marked.

        Every write reads the job's document in its transaction. So it commits before this one and is seen here, or it
        finds the mark.
        """
        name = self._job(job_id)

        def work(token: bytes) -> tuple[bool, list[dict[str, Any]]]:
            found = self._get([name], transaction=token)
            if name not in found:
                raise no_such_job(job_id) if incarnation is None else job_gone(job_id)
            if incarnation not in (None, _record(found[name]).incarnation):
                raise job_gone(job_id, remade=True)
            if unless_after is not None:
                newest = self._documents(name, "states", 1, newest=True, transaction=token)
                if values.mark(newest) != unless_after:
                    return False, []
            return True, [values.write(name, {"deleted": True}, only=["deleted"])]

        return self._transact(work)[0]

    def delete(self, job_id: str, incarnation: str | None = None, *, unless_after: Mark = None) -> bool:
        """Delete in batches, the job's document last. An interrupted deletion stays listed and can be repeated."""
        record = self.find(job_id)
        if incarnation is not None and (record is None or record.incarnation != incarnation):
            return False
        if record is not None and not record.deleted:
            try:
                if not self._mark_deleted(job_id, record.incarnation, unless_after):  # prevents further writes
                    return False
            except JobGone:
                return False  # another process deleted it at the same time
        found = record is not None
        for collection in ("states", "history"):
            while names := [doc.name for doc in self._documents(self._job(job_id), collection, DELETE_BATCH)]:
                found = True
                if not self._remove(job_id, record, names):
                    return found
        self._remove(job_id, record, [self._job(job_id)])
        return found

    def _remove(self, job_id: str, record: JobRecord | None, names: list[str]) -> bool:
        """Delete documents if the job still has the expected incarnation. Return whether it has.

        Another process may have deleted the job and created it again.
        """
        job, incarnation = self._job(job_id), record.incarnation if record is not None else ""

        def work(token: bytes) -> tuple[bool, list[dict[str, Any]]]:
            found = self._get([job], transaction=token)
            now = _record(found[job]).incarnation if job in found else ""
            return now == incarnation, [{"delete": name} for name in names] if now == incarnation else []

        return self._transact(work)[0]

    # ---- states --------------------------------------------------------------------------------------------------

    def write(self, state: State, job: JobRecord, writer: str) -> State:
        name, ours = self._name(state.job_id, state.key), (writer, state.key)

        def work(token: bytes) -> tuple[State, list[dict[str, Any]]]:
            found = self._get([self._job(job.job_id), name], transaction=token)
            self._check_writable(job, found)
            if name not in found:
                version, recent = 1, ""
            else:
                before, recent = values.state(job.job_id, found[name]), values.recent(found[name])
                if before.event_id == state.event_id:
                    return before, []
                if (repeated := found_in_recent(recent, state.event_id)) is not None:
                    return replace(state, version=repeated[0], timestamp=moment(repeated[1])), []
                version = before.version + 1
                if before.event_id and before.event_id != self._written.get(ours):
                    time = before.timestamp.timestamp() if before.timestamp is not None else 0
                    recent = recent_with(recent, "", before.event_id, before.version, time, now=writer)
            fields = values.fields(state, version, recent)
            writes = [values.write(name, fields, server_time="timestamp")]
            if job.history:
                kept = f"{self._job(job.job_id)}/history/{state.task_id}-{state.tag}-{version}"
                writes.append(values.write(kept, values.fields(state, version), server_time="timestamp"))
            return replace(state, version=version, timestamp=None), writes

        stored, committed = self._transact(work)
        self._written[ours] = state.event_id
        return values.stamped(stored, committed)

    def _check_writable(self, job: JobRecord, found: dict[str, Any]) -> None:
        name = self._job(job.job_id)
        now = _record(found[name]) if name in found else None
        if now is None or now.incarnation != job.incarnation:
            raise job_gone(job.job_id, remade=now is not None)
        if now.deleted:
            raise marked_deleted(job.job_id)

    def read_all(self, job: JobRecord, since: Mark) -> Snapshot:
        """Read the states, then the job. If the job is unchanged after the listing, it was unchanged throughout."""
        del since  # Firestore never goes back in time; creation times reveal re-created documents
        created, recreated, documents = self._created.setdefault(job.job_id, {}), set(), {}
        for document in self._documents(self._job(job.job_id), "states"):
            documents[document.name] = document
        states = readable(documents.values(), lambda found: values.state(job.job_id, found), job.job_id)
        for state in states:
            made = values.created(documents[self._name(job.job_id, state.key)])
            if created.setdefault(state.key, made) != made:
                recreated.add(state.key)
                created[state.key] = made
        now = self.find(job.job_id)
        if now is None:
            return Snapshot("")
        mark = values.mark(documents.values())
        return Snapshot(now.incarnation, tuple(states), mark, now.deleted, recreated=frozenset(recreated))

    def read_history(self, job_id: str, task_id: int, tag: str, *, after: int, limit: int) -> list[State]:
        kept = readable(self._documents(self._job(job_id), "history"), lambda doc: values.state(job_id, doc), job_id)
        wanted = (state for state in kept if state.key == (task_id, tag) and state.version > after)
        return sorted(wanted, key=lambda state: state.version)[:limit]

    def listen(self, job: JobRecord) -> FirestoreListener:
        return FirestoreListener(self, job, self._created.setdefault(job.job_id, {}))

    def begin_listening(self, job_id: str, requests: Iterator[Any], send: Callable[[Any], None]) -> Any:
        """Open a Listen stream, without a time limit.

        It uses the transport, which returns the call at once. The client would block until the first response and could
        not be canceled meanwhile.
        """
        from google.cloud.firestore_v1.types import ListenRequest

        query = {"parent": self._job(job_id), "structured_query": {"from_": [{"collection_id": "states"}]}}
        send(ListenRequest(database=self._database, add_target={"query": query, "target_id": TARGET}))
        stream: Any = self._api.transport.listen  # typed as if it took a single request
        return stream(requests, metadata=service.metadata(self._database))

    def close(self) -> None:
        self._channel.close()


def _record(document: Any) -> JobRecord:
    fields = values.plain(document.fields)
    job_id = document.name.rsplit("/", 1)[1]
    return JobRecord(
        job_id,
        int(fields["numTasks"]),
        fields.get("createdAt"),
        values.created(document),
        deleted=bool(fields.get("deleted", False)),
        history=bool(fields.get("history", False)),
    )
