"""The outbox in Redis: the stream ``smap:events``, to which Lua scripts append events in the step that decides them.

Each sink is a consumer group with one consumer, ``relay``. The lease of the sink says which process that is. Entries that a
relay had read and not acknowledged when it died are the first ones that its successor reads.

An entry leaves the stream when every group has settled it; ``on_delivered`` receives the events just before. While only some
sinks have taken an event, ``notes`` records which. An event that is announced again after Redis lost data has the field
``again``, and sinks that took it before are skipped. Refused events and entries that cannot be read as events move to
``smap:events:quarantine`` in the transaction that acknowledges them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headway._lease import Lease, Owner, RedisLeases, read_owner
from headway._redis import (
    EVENTS,
    EVENTS_HOLD,
    EVENTS_LEASE,
    EVENTS_QUARANTINE,
    EVENTS_REFUSALS,
    client_address,
    failures,
    script,
    translate,
)
from headway.errors import HeadwayError
from headway.events.envelope import Event, whole
from headway.events.outbox import LEASE, Backlog, Refused
from headway.events.store.redis_stream import CONSUMER, DAMAGE, Stream, event_of, position
from headway.events.store.redis_trim import SinkNotes, Trimmer
from headway.telemetry import Log, metrics, redact

if TYPE_CHECKING:
    from redis import Redis

log = Log("events")

#: Waiting entries counted exactly; beyond that the number is estimated.
COUNT_LIMIT = 1_000

#: Seconds for which nothing leaves a stream that Redis had lost. Meanwhile the relays of other sinks subscribe again: they
#: check every 30 s, and back off from a server that was unreachable for up to 72 s.
HOLD = 120

#: Seconds a sink waits until its deliveries are noted in the database. After that the sink goes on without the note.
NOTING = 0.5

#: Field of an entry that is for one sink only: a retried event.
_TO = b"to"

#: Field of an event that may have been in the stream before Redis lost data.
_AGAIN = b"again"


class RedisOutbox:
    """The outbox of one Redis (see `headway.events.outbox.Outbox`). Safe for many threads and processes."""

    name = "redis"

    def __init__(
        self,
        client: Redis,
        *,
        on_delivered: Callable[[Sequence[Event]], None] | None = None,
        notes: SinkNotes | None = None,
        lease: float = LEASE,
    ) -> None:
        self._client: Any = client  # redis-py types every reply as possibly awaitable
        self._leases = RedisLeases(client)
        self._notes, self._lease = notes, lease
        self._jobs: dict[str, str | None] = {}
        self._stream, self._key, self._quarantine = Stream(client), EVENTS(), EVENTS_QUARANTINE()
        self._trimmer = Trimmer(client, self._jobs, lambda sink: self._subscribe(sink, again=True), on_delivered, notes)

    def subscribe(self, sink: str, job: str | None = None) -> None:
        """Keep events for ``sink``: create its consumer group at the start of the stream."""
        again = sink in self._jobs
        self._jobs[sink] = job
        with self._translate_errors():
            self._subscribe(sink, again=again)

    def waits(self, sink: str) -> bool:
        """Return whether the stream has any entry."""
        with self._translate_errors():
            return bool(self._client.xlen(self._key))

    def acquire(self, sink: str) -> Lease:
        """Acquire the lease of the sink, or raise `Held`."""
        with self._translate_errors():
            return self._leases.acquire(_lease_key(sink), Owner.current(), self._lease)

    def renew(self, lease: Lease) -> None:
        """Renew the lease, or raise `StaleClaim`."""
        with self._translate_errors():
            self._leases.renew(lease)

    def release(self, lease: Lease) -> None:
        """Release the lease."""
        with self._translate_errors():
            self._leases.release(lease)

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        """Return the next events of the sink. Invalid entries are logged and put aside."""
        with self._translate_errors():
            try:
                return self._next(sink, limit)
            except failures() as error:
                if "NOGROUP" not in str(error):
                    raise
                # The server lost the stream. Events that are announced again wait from its start.
                self._subscribe(sink, again=True)
                return self._next(sink, limit)

    def delivered(self, sink: str, handles: Sequence[str]) -> None:
        """Acknowledge these entries."""
        with self._translate_errors():
            self._client.xack(self._key, sink, *handles)

    def count_refusal(self, sink: str, handle: str, *, seen: int, apart: float) -> int:
        """Count one more refusal (see `Outbox.count_refusal`). Two steps: only the owner of the lease delivers."""
        with self._translate_errors():
            key, (seconds, microseconds) = _refusals_key(sink), self._client.time()
            refusing, times, at = str(self._client.get(key) or "- 0 0").split()
            now = seconds + microseconds / 1e6
            count = int(times) if refusing == handle else 0
            if count in (0, seen) or not 0 <= now - float(at) < apart:
                count += 1
                self._client.set(key, f"{handle} {count} {now:.3f}", ex=86_400)
            return count

    def put_aside(self, sink: str, handle: str, reason: str) -> None:
        """Move the entry to the quarantine."""
        with self._translate_errors():
            found = self._stream.range(handle, handle, 1)
            self._put_aside(sink, handle, found[0][1] if found else {}, reason)

    def refused(self, sink: str | None = None) -> list[Refused]:
        """Return the events in the quarantine, oldest first."""
        with self._translate_errors():
            entries = self._stream.raw("XRANGE", self._quarantine, "-", "+")
        found = []
        for handle, fields in entries:
            name = _text(fields.get(b"sink"))
            if sink is None or name == sink:
                at = datetime.fromtimestamp(int(handle.partition(b"-")[0]) / 1000, UTC)
                id, type, job, reason = [
                    _text(fields.get(field)) for field in (b"event.id", b"event.type", b"event.job", b"reason")
                ]
                found.append(Refused(name, handle.decode(), id, type, job, reason, at))
        return found

    def retry(self, found: Refused) -> None:
        """Append the event again for this sink only, under the same id. Groups cannot undo an acknowledgement."""
        with self._translate_errors():
            for handle, fields in self._stream.raw("XRANGE", self._quarantine, found.handle, found.handle):
                again: list[bytes] = [_TO, found.sink.encode()]
                for name, value in fields.items():
                    if name.startswith(b"event."):
                        again += [name.removeprefix(b"event."), value]
                pipeline = self._client.pipeline(transaction=True)
                pipeline.execute_command("XADD", self._key, "*", *again)
                pipeline.execute_command("XDEL", self._quarantine, handle)
                pipeline.execute()

    def discard(self, found: Refused) -> None:
        """Delete the event from the quarantine."""
        with self._translate_errors():
            self._client.xdel(self._quarantine, found.handle)

    def backlog(self, sink: str | None = None) -> list[Backlog]:
        """Return how far each known sink, or one of them, is behind."""
        with self._translate_errors():
            if not self._client.exists(self._key):
                return []
            groups = [group for group in self._client.xinfo_groups(self._key) if sink in (None, group["name"])]
            refused: dict[str, int] = {}
            for _, fields in self._stream.raw("XRANGE", self._quarantine, "-", "+"):
                name = _text(fields.get(b"sink"))
                refused[name] = refused.get(name, 0) + 1
            return [self._behind(group, refused) for group in groups]

    def _behind(self, group: Mapping[str, Any], refused: Mapping[str, int]) -> Backlog:
        name, last_read = str(group["name"]), str(group["last-delivered-id"])
        pending = self._client.xpending(self._key, name)
        fresh = self._stream.range(f"({last_read}", "+", COUNT_LIMIT)
        unread = (
            len(fresh)
            if len(fresh) < COUNT_LIMIT
            else max(COUNT_LIMIT, self._client.xlen(self._key) - pending["pending"])
        )
        first = pending["min"] if pending["pending"] else fresh[0][0] if fresh else None
        now = self._client.time()
        age = None if first is None else max(0.0, now[0] + now[1] / 1e6 - position(first)[0] / 1000)
        owner = read_owner(str(self._client.get(_lease_key(name)) or "").partition(" ")[2])
        serves = str(owner.owner) if owner and not owner.owner.is_dead else None
        return Backlog(name, pending["pending"] + unread, age, refused.get(name, 0), serves)

    def forget(self, sink: str) -> bool:
        """Delete the consumer group of the sink. Return whether it existed."""
        with self._translate_errors():
            return bool(self._client.exists(self._key)) and bool(self._client.xgroup_destroy(self._key, sink))

    def tidy(self, sink: str) -> None:
        """Remove settled entries now, without waiting for their note. `waiting` does so only when idle."""
        with self._translate_errors():
            self._trimmer.trim(0.0)

    # ---- reading ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except failures() as error:
            raise translate(error, client_address(self._client)) from error

    def _subscribe(self, sink: str, *, again: bool) -> None:
        self._trimmer.forget_notes(sink)
        script("events/subscribe")(self._client, [self._key, EVENTS_HOLD()], [sink, HOLD if again else 0])

    def _next(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        while True:
            # In order: first the entries that were read and not acknowledged, then new ones.
            entries = self._stream.read(sink, "0", limit)
            if len(entries) < limit:
                entries += self._stream.read(sink, ">", limit - len(entries))
            found = [(handle, event) for handle, fields in entries if (event := self._wanted(sink, handle, fields))]
            again = {handle for handle, fields in entries if _AGAIN in fields}
            if again:
                found = self._skip_taken(sink, found, again)
            if found:
                return found
            if not entries and not self._adopt(sink, limit):
                self._trimmer.trim(NOTING)
                return []

    def _wanted(self, sink: str, handle: str, fields: Mapping[bytes, bytes]) -> Event | None:
        """Return the event of an entry, or None if it is not for this sink; then acknowledge or put it aside."""
        event = None
        if fields.get(_TO, sink.encode()) == sink.encode():
            try:
                event = event_of(fields)
            except DAMAGE as error:
                self._put_damaged_aside(sink, handle, fields, error)
                return None
        job = self._jobs.get(sink)
        if event is None or (job is not None and event.job != job):
            self._client.xack(self._key, sink, handle)
            return None
        return event

    def _skip_taken(self, sink: str, found: list[tuple[str, Event]], again: set[str]) -> list[tuple[str, Event]]:
        """Skip the events in ``again`` that the sink took before Redis lost the stream.

        While the database does not answer they are delivered again: later events must not wait for it.
        """
        repeated = [event for handle, event in found if handle in again]
        if self._notes is None or not repeated:
            return found
        try:
            taken = self._notes.taken(sink, repeated)
        except HeadwayError as error:
            log.warning("delivering without knowing earlier deliveries", sink=sink, error=str(error))
            return found
        settled = [handle for handle, event in found if handle in again and event.id in taken]
        if settled:
            self._client.xack(self._key, sink, *settled)
        return [(handle, event) for handle, event in found if handle not in settled]

    def _put_damaged_aside(self, sink: str, handle: str, fields: Mapping[bytes, bytes], error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        log.error(
            "a stream entry is not a valid event and is put aside", key=self._key, reason=handle, sink=sink, error=why
        )
        metrics.count("headway_events_refused", sink=sink)
        self._put_aside(sink, handle, fields, f"invalid event: {why}")

    def _adopt(self, sink: str, limit: int) -> bool:
        """Claim entries that a consumer of another name has read. The lease makes this safe."""
        if self._client.xpending(self._key, sink)["pending"] == 0:
            return False
        self._stream.raw("XAUTOCLAIM", self._key, sink, CONSUMER, 0, "0", "COUNT", limit)
        return True

    def _put_aside(self, sink: str, handle: str, fields: Mapping[bytes, bytes], reason: str) -> None:
        words: list[object] = ["sink", sink, "reason", whole(redact(reason))[:500]]
        for name, value in fields.items():
            if name not in (_TO, _AGAIN):  # without them a retry is delivered even if `notes` has the event
                words += [b"event." + name, value]
        pipeline = self._client.pipeline(transaction=True)
        if fields:  # empty: the entry was deleted
            pipeline.execute_command("XADD", self._quarantine, "*", *words)
        pipeline.execute_command("XACK", self._key, sink, handle)
        pipeline.execute()


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "backslashreplace")


def _lease_key(sink: str) -> str:
    return EVENTS_LEASE(sink=_digest(sink))


def _refusals_key(sink: str) -> str:
    return EVENTS_REFUSALS(sink=_digest(sink))


def _digest(sink: str) -> str:
    return hashlib.sha256(sink.encode()).hexdigest()[:16]
