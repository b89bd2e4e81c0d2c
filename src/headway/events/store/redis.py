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
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

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
from headway.errors import HeadwayError, InvalidInput
from headway.events.envelope import Event, from_fields, whole
from headway.events.outbox import LEASE, Backlog, Refused
from headway.telemetry import Log, metrics, redact

if TYPE_CHECKING:
    from redis import Redis

log = Log("events")

CONSUMER = "relay"

#: Waiting entries counted exactly; beyond that the number is estimated.
COUNT_LIMIT = 1_000

#: Entries removed at a time.
TRIM = 1_000

#: Seconds for which nothing leaves a stream that Redis had lost. Meanwhile the relays of other sinks subscribe again: they
#: check every 30 s, and back off from a server that was unreachable for up to 72 s.
HOLD = 120

#: Seconds a sink waits until its deliveries are noted in the database. After that the sink goes on without the note.
NOTING = 0.5

#: Field of an entry that is for one sink only: a retried event.
_TO = b"to"

#: Field of an event that may have been in the stream before Redis lost data.
_AGAIN = b"again"

#: Exceptions from reading an entry that is not a valid event.
_DAMAGE = (KeyError, ValueError, TypeError, OverflowError, OSError, RecursionError, InvalidInput)

Entry = tuple[str, Mapping[bytes, bytes]]


class SinkNotes(Protocol):
    """Records outside Redis which sink took which event."""

    def note(self, sink: str, events: Sequence[Event]) -> None:
        """Record that the sink took these events."""
        ...

    def taken(self, sink: str, events: Sequence[Event]) -> set[str]:
        """Return the ids of those events that the sink took before."""
        ...


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
        self._on_delivered, self._notes, self._lease = on_delivered, notes, lease
        self._noted: dict[str, str] = {}  # sink -> last entry recorded in `notes`
        self._jobs: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._noting: threading.Thread | None = None
        self._noting_since = 0.0
        self._key, self._quarantine = EVENTS(), EVENTS_QUARANTINE()

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
            found = self._range(handle, handle, 1)
            self._put_aside(sink, handle, found[0][1] if found else {}, reason)

    def refused(self, sink: str | None = None) -> list[Refused]:
        """Return the events in the quarantine, oldest first."""
        with self._translate_errors():
            entries = self._raw("XRANGE", self._quarantine, "-", "+")
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
            for handle, fields in self._raw("XRANGE", self._quarantine, found.handle, found.handle):
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
            for _, fields in self._raw("XRANGE", self._quarantine, "-", "+"):
                name = _text(fields.get(b"sink"))
                refused[name] = refused.get(name, 0) + 1
            return [self._behind(group, refused) for group in groups]

    def _behind(self, group: Mapping[str, Any], refused: Mapping[str, int]) -> Backlog:
        name, last_read = str(group["name"]), str(group["last-delivered-id"])
        pending = self._client.xpending(self._key, name)
        fresh = self._range(f"({last_read}", "+", COUNT_LIMIT)
        unread = (
            len(fresh)
            if len(fresh) < COUNT_LIMIT
            else max(COUNT_LIMIT, self._client.xlen(self._key) - pending["pending"])
        )
        first = pending["min"] if pending["pending"] else fresh[0][0] if fresh else None
        now = self._client.time()
        age = None if first is None else max(0.0, now[0] + now[1] / 1e6 - _position(first)[0] / 1000)
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
            self._trim(0.0)

    # ---- reading ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except failures() as error:
            raise translate(error, client_address(self._client)) from error

    def _subscribe(self, sink: str, *, again: bool) -> None:
        self._noted.pop(sink, None)
        script("events/subscribe")(self._client, [self._key, EVENTS_HOLD()], [sink, HOLD if again else 0])

    def _raw(self, *words: object) -> Any:
        """Run a command and return bytes: any program may append bytes that are not UTF-8."""
        return self._client.execute_command(*words, NEVER_DECODE=True)

    def _range(self, first: str, last: str, count: int) -> list[Entry]:
        reply = self._raw("XRANGE", self._key, first, last, "COUNT", count)
        return [(handle.decode(), fields or {}) for handle, fields in reply]

    def _next(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        while True:
            # In order: first the entries that were read and not acknowledged, then new ones.
            entries = self._read(sink, "0", limit)
            if len(entries) < limit:
                entries += self._read(sink, ">", limit - len(entries))
            found = [(handle, event) for handle, fields in entries if (event := self._wanted(sink, handle, fields))]
            again = {handle for handle, fields in entries if _AGAIN in fields}
            if again:
                found = self._skip_taken(sink, found, again)
            if found:
                return found
            if not entries and not self._adopt(sink, limit):
                self._trim(NOTING)
                return []

    def _wanted(self, sink: str, handle: str, fields: Mapping[bytes, bytes]) -> Event | None:
        """Return the event of an entry, or None if it is not for this sink; then acknowledge or put it aside."""
        event = None
        if fields.get(_TO, sink.encode()) == sink.encode():
            try:
                event = _event(fields)
            except _DAMAGE as error:
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
        self._raw("XAUTOCLAIM", self._key, sink, CONSUMER, 0, "0", "COUNT", limit)
        return True

    def _read(self, sink: str, since: str, limit: int) -> list[Entry]:
        reply = self._raw("XREADGROUP", "GROUP", sink, CONSUMER, "COUNT", limit, "STREAMS", self._key, since)
        return [(handle.decode(), fields or {}) for _, entries in reply or [] for handle, fields in entries]

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

    def _trim(self, patience: float) -> None:
        """Remove the entries that every group has settled. Wait up to ``patience`` seconds until they are noted."""
        with self._lock:
            noting = self._noting
            if noting is None or not noting.is_alive():
                settled = self._settled()
                if self._on_delivered is None:
                    if settled:
                        self._remove(settled[-1][0])
                    return
                taken = self._taken(settled[-1][0] if settled else "0-0")
                if not settled and not taken:
                    return
                noting = threading.Thread(
                    target=self._note, args=(settled, taken), name="headway-events-note", daemon=True
                )
                noting.start()
                self._noting, self._noting_since = noting, time.monotonic()
            # The note may wait for a database, and sinks must not: each note is waited for only once.
            left = self._noting_since + patience - time.monotonic()
        noting.join(max(0.0, left))

    def _settled(self) -> list[Entry]:
        if not self._client.xlen(self._key):  # XINFO fails if the stream does not exist
            return []
        groups = self._client.xinfo_groups(self._key)
        if not groups:
            return []
        missing = self._jobs.keys() - {str(group["name"]) for group in groups}
        if missing:
            # The server lost the stream. These sinks were not served since, so its entries wait for them too.
            for sink in missing:
                self._subscribe(sink, again=True)
            return []
        if self._client.exists(EVENTS_HOLD()):
            return []  # sinks of other relays may not have subscribed again yet
        bounds = [self._unsettled(group) for group in groups]
        return self._range("-", f"({min(bounds, key=_position)}", TRIM)

    def _unsettled(self, group: Mapping[str, Any]) -> str:
        """Return the first entry id that the group may not have settled."""
        pending = self._client.xpending(self._key, group["name"])
        return str(pending["min"] if pending["pending"] else _after(group["last-delivered-id"]))

    def _taken(self, after: str) -> dict[str, list[Entry]]:
        """Return per sink the entries behind ``after`` that it has settled and `notes` does not have yet."""
        if self._notes is None or not self._client.xlen(self._key):
            return {}
        found = {}
        for group in self._client.xinfo_groups(self._key):
            sink = str(group["name"])
            if sink in self._jobs:
                first = max(after, self._noted.get(sink, after), key=_position)
                found[sink] = self._range(f"({first}", f"({self._unsettled(group)}", TRIM)
        return {sink: entries for sink, entries in found.items() if entries}

    def _note(self, settled: Sequence[Entry], taken: Mapping[str, Sequence[Entry]]) -> None:
        """Note deliveries, then remove settled entries. Runs in its own thread: the database may not answer."""
        assert self._on_delivered is not None
        try:
            for sink, entries in taken.items():
                assert self._notes is not None
                self._notes.note(sink, list(_readable(entries)))
                self._noted[sink] = entries[-1][0]
            if not settled:
                return
            self._on_delivered(list(_readable(settled)))
            still = self._settled()  # again: a sink that subscribed meanwhile waits for what it found
            if still:
                self._remove(min(settled[-1][0], still[-1][0], key=_position))
        except Exception as error:  # noqa: BLE001  # on any error the entries stay here and are noted later
            log.warning("delivered events stay in the stream until they are noted", key=self._key, error=str(error))

    def _remove(self, last: str) -> None:
        self._client.xtrim(self._key, minid=_after(last), approximate=False)


def _readable(entries: Sequence[Entry]) -> Iterator[Event]:
    for _, fields in entries:
        try:
            yield _event(fields)
        except _DAMAGE:
            continue  # it was put aside and logged


def _event(fields: Mapping[bytes, bytes]) -> Event:
    known = {name.decode(): value.decode() for name, value in fields.items()}
    return from_fields(known, datetime.fromtimestamp(float(known["at"]), UTC), json.loads(known["data"]))


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "backslashreplace")


def _lease_key(sink: str) -> str:
    return EVENTS_LEASE(sink=_digest(sink))


def _refusals_key(sink: str) -> str:
    return EVENTS_REFUSALS(sink=_digest(sink))


def _digest(sink: str) -> str:
    return hashlib.sha256(sink.encode()).hexdigest()[:16]


def _position(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _after(entry: str) -> str:
    milliseconds, number = _position(entry)
    return f"{milliseconds}-{number + 1}"
