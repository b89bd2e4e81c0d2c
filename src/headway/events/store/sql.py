"""The outbox in SQL: tables ``outbox``, ``sinks`` and ``deliveries``.

A row of ``deliveries`` settles one event for one sink: delivered, or refused for good. A cursor per sink is not enough,
because on PostgreSQL a lower number may be committed after a higher one. `SqlOutbox.tidy` advances ``sinks.since``, below
which everything is settled, and removes those rows. It does so only while no appending transaction is open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from headway._lease import Lease, Owner, SqlLeases, has_ended, read_owner
from headway._sql import Database, Engine, Row, Tx, Value, marks, require_open
from headway.errors import Held, InvalidInput
from headway.events.envelope import Event, completion, from_fields, plain, whole
from headway.events.outbox import HISTORY, LEASE, Backlog, Refused
from headway.events.store import postgres, sqlite
from headway.telemetry import Log, metrics, redact

log = Log("events")

#: Characters kept of the reason for a refusal.
REASON = 500

_LEASES = SqlLeases("sinks", "name")


class CommitOrder(Protocol):
    """How appending transactions exclude readers that rely on numbers in commit order. One module per engine."""

    def begin_append(self, tx: Tx) -> None:
        """Mark the transaction as one that appends, before it draws a number."""

    def wait_for_appenders(self, tx: Tx) -> None:
        """Wait until no appending transaction is open, and hold off new ones until this transaction ends."""

    def is_quiet(self, tx: Tx) -> bool:
        """Return whether no appending transaction is open; then hold off new ones until this transaction ends."""


_ORDER: dict[Engine, CommitOrder] = {"sqlite": sqlite, "postgresql": postgres}

#: The events that a sink has not settled yet.
_WAITING = (
    "FROM sinks s JOIN outbox o ON o.seq > s.since AND (s.job IS NULL OR o.job = s.job) WHERE s.name = ? AND NOT EXISTS "
    "(SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = o.seq)"
)

#: Condition on rows of ``outbox``: no sink waits for the event.
_UNWANTED = (
    "NOT EXISTS (SELECT 1 FROM sinks s WHERE s.since < outbox.seq AND (s.job IS NULL OR s.job = outbox.job) AND NOT EXISTS "
    "(SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = outbox.seq))"
)


# ---- appending -------------------------------------------------------------------------------------------------------


def append(tx: Tx, event: Event) -> None:
    """Append an event in the transaction that makes it true. Appending the same id again changes nothing.

    Raises `InvalidInput` for data that JSON cannot hold; the caller then rolls its transaction back.
    """
    try:
        data = completion(event.data) if event.type == "job.completed" else plain(event.data)
    except ValueError as error:
        raise InvalidInput(f"The data of event {event.id!r} does not fit the type {event.type}: {error}.") from error
    if event.at.tzinfo is None:
        raise InvalidInput(f"The time of event {event.id!r} has no time zone.", hint="Use datetime.now(UTC).")
    _ORDER[tx.engine].begin_append(tx)
    tx.execute(
        "INSERT INTO outbox (id, type, at, source, job, version, data) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (whole(event.id), whole(event.type), event.at.timestamp(), whole(event.source), whole(event.job),
         event.version, json.dumps(data)),
    )  # fmt: skip


def append_all(database: Database, events: Sequence[Event]) -> None:
    """Append events that were decided outside the database. An event that cannot be stored is logged and skipped."""

    def together(tx: Tx) -> None:
        for event in events:
            append(tx, event)

    try:
        database.run(together, operation="events.append")
    except InvalidInput:
        for event in events:
            _append_alone(database, event)


def _append_alone(database: Database, event: Event) -> None:
    try:
        database.run(lambda tx: append(tx, event), operation="events.append")
    except InvalidInput as error:
        log.error("an event cannot be stored and is not delivered", event=event.type, job=event.job, error=str(error))  # noqa: TRY400  # the message is enough, the traceback is ours


# ---- retention -------------------------------------------------------------------------------------------------------


def purge(tx: Tx, before: float) -> None:
    """Delete events older than ``before`` (Unix time) that no sink waits for, and sinks of jobs without events."""
    tx.execute(f"DELETE FROM outbox WHERE at < ? AND {_UNWANTED}", (before,))
    tx.execute(
        # The condition on source makes the index of outbox usable, which leaves out the events of tasks.
        "DELETE FROM sinks WHERE job IS NOT NULL AND at < ? AND NOT EXISTS "
        "(SELECT 1 FROM outbox o WHERE o.job = sinks.job AND o.source <> 'headway.queue')",
        (before,),
    )


def purge_page(tx: Tx, source: str, before: float, *, after: int, limit: int) -> int | None:
    """Delete one page of the old events of ``source`` that no sink waits for.

    Reads the next ``limit`` events behind number ``after`` and returns the last number of the page. Returns None at the
    end, and at a page that has no event older than ``before``: a million newer events are not read.
    """
    page = tx.all("SELECT seq, at FROM outbox WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit))
    if not any(at < before for _, at in page):
        return None
    last = int(page[-1][0])
    tx.execute(
        f"DELETE FROM outbox WHERE seq > ? AND seq <= ? AND at < ? AND source = ? AND {_UNWANTED}",
        (after, last, before, source),
    )
    return last if len(page) == limit else None


# ---- the outbox ------------------------------------------------------------------------------------------------------


class SqlOutbox:
    """The outbox of one database (see `headway.events.outbox.Outbox`). Safe for many threads and processes."""

    name = "database"

    def __init__(self, database: Database, *, lease: float = LEASE) -> None:
        self._database, self._lease = require_open(database), lease

    def subscribe(self, sink: str, job: str | None = None) -> None:
        """Keep events for ``sink``. Raises after a moment when appending transactions stay open."""
        if self._database.one("SELECT 1 FROM sinks WHERE name = ?", (sink,)) is not None:
            return

        def work(tx: Tx) -> None:
            _ORDER[tx.engine].wait_for_appenders(tx)  # afterwards no number below max(seq) is committed
            now = tx.now()
            # The oldest recent event decides, not the newest old one: an event may have happened long before it was decided.
            tx.execute(
                "INSERT INTO sinks (name, job, at, since) SELECT ?, ?, ?, "
                "coalesce((SELECT min(seq) - 1 FROM outbox WHERE at >= ?), (SELECT max(seq) FROM outbox), 0) WHERE true "
                "ON CONFLICT (name) DO NOTHING",
                (sink, job, now, now - HISTORY),
            )

        self._database.run(work, operation="events.subscribe")

    def waits(self, sink: str) -> bool:
        """Return whether an event waits for the sink, by one query."""
        return self._database.one(f"SELECT 1 {_WAITING} LIMIT 1", (sink,)) is not None

    def acquire(self, sink: str) -> Lease:
        """Acquire the lease of the sink, or raise `Held`."""
        owner = Owner.current()  # outside the transaction: a repeated transaction is the same acquisition
        found = self._database.run(lambda tx: _LEASES.acquire(tx, sink, owner, self._lease), operation="events.acquire")
        if isinstance(found, Held):
            raise found
        return found

    def renew(self, lease: Lease) -> None:
        """Renew the lease, or raise `StaleClaim`."""
        self._database.run(lambda tx: _LEASES.renew(tx, lease), operation="events.renew")

    def release(self, lease: Lease) -> None:
        """Release the lease."""
        self._database.run(lambda tx: _LEASES.release(tx, lease), operation="events.release")

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        """Return the next events of the sink. Rows that cannot be read as events are logged and put aside."""
        while True:
            rows = self._database.all(
                f"SELECT o.seq, o.id, o.type, o.at, o.source, o.job, o.version, o.data {_WAITING} ORDER BY o.seq LIMIT ?",
                (sink, limit),
            )
            found = []
            for row in rows:
                try:
                    # The handle is the id: after a restore of an older backup another event has the same number.
                    found.append((str(row[1]), _event(row)))
                except (ValueError, TypeError, OverflowError, OSError, RecursionError, InvalidInput) as error:
                    self._put_damaged_aside(sink, row, error)
            if found or not rows:
                return found  # a page of damaged rows only is not the end: they are put aside, so read the next page

    def _put_damaged_aside(self, sink: str, row: Row, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        log.error("an outbox row is not a valid event and is put aside", sink=sink, eventID=str(row[1]), error=why)
        metrics.count("headway_events_refused", sink=sink)
        self._settle(sink, "seq", [row[0]], f"invalid event: {why}")  # by number: its id may not be text

    def delivered(self, sink: str, handles: Sequence[str]) -> None:
        """Record that the sink took these events."""
        self._settle(sink, "id", handles, None)

    def count_refusal(self, sink: str, handle: str, *, seen: int, apart: float) -> int:
        """Count one more refusal of this event by the sink and return the count (see `Outbox.count_refusal`)."""

        def work(tx: Tx) -> int:
            row = tx.one(
                "SELECT s.refusals, s.refused_at FROM sinks s JOIN outbox o ON o.seq = s.refusing "
                "WHERE s.name = ? AND o.id = ?",
                (sink, handle),
            )
            now = tx.now()
            count, at = row if row is not None else (0, now)
            if count in (0, seen) or not 0 <= now - at < apart:
                count += 1
                tx.execute(
                    "UPDATE sinks SET refusing = (SELECT seq FROM outbox WHERE id = ?), refusals = ?, refused_at = ? "
                    "WHERE name = ?",
                    (handle, count, now, sink),
                )
            return int(count)

        return self._database.run(work, operation="events.refusal")

    def put_aside(self, sink: str, handle: str, reason: str) -> None:
        """Settle the event as refused for good."""
        self._settle(sink, "id", [handle], reason)

    def _settle(self, sink: str, column: str, which: Sequence[Value], reason: str | None) -> None:
        refused = None if reason is None else redact(reason)[:REASON]

        def work(tx: Tx) -> None:
            # Selected from sinks and outbox: nothing is inserted for a sink or an event deleted meanwhile.
            tx.execute(
                f"INSERT INTO deliveries (sink, seq, refused, at) SELECT s.name, o.seq, ?, {tx.clock} "
                f"FROM sinks s, outbox o WHERE s.name = ? AND o.{column} IN ({marks(len(which))}) "
                "ON CONFLICT (sink, seq) DO NOTHING",
                (refused, sink, *which),
            )
            if reason is not None:  # a later retry of the event starts with all its tries
                tx.execute("UPDATE sinks SET refusing = NULL WHERE name = ?", (sink,))

        self._database.run(work, operation="events.settle")

    def refused(self, sink: str | None = None) -> list[Refused]:
        """Return the events that were put aside, oldest first."""
        rows = self._database.all(
            "SELECT d.sink, o.seq, o.id, o.type, o.job, d.refused, d.at FROM deliveries d JOIN outbox o ON o.seq = d.seq "
            "WHERE d.refused IS NOT NULL AND d.sink = coalesce(?, d.sink) ORDER BY o.seq, d.sink",
            (sink,),
        )
        return [
            Refused(name, str(seq), id, type, job, why, None if at is None else datetime.fromtimestamp(at, UTC))
            for name, seq, id, type, job, why, at in rows
        ]

    def retry(self, found: Refused) -> None:
        """Let the event wait for its sink again."""
        self._change_refused("DELETE FROM deliveries WHERE sink = ? AND seq = ? AND refused IS NOT NULL", found)

    def discard(self, found: Refused) -> None:
        """Settle the event without delivery."""
        self._change_refused(
            "UPDATE deliveries SET refused = NULL WHERE sink = ? AND seq = ? AND refused IS NOT NULL", found
        )

    def _change_refused(self, statement: str, found: Refused) -> None:
        self._database.run(
            lambda tx: tx.execute(statement, (found.sink, int(found.handle))), operation="events.refused"
        )

    def backlog(self, sink: str | None = None) -> list[Backlog]:
        """Return how far each known sink, or one of them, is behind."""
        result = []
        with self._database.read() as tx:
            now = tx.now()
            sinks = tx.all(
                "SELECT name, holder, lease_until FROM sinks WHERE name = coalesce(?, name) ORDER BY name", (sink,)
            )
            for name, holder, until in sinks:
                row = tx.one(f"SELECT count(*), min(o.at) {_WAITING}", (name,))
                aside = tx.one("SELECT count(*) FROM deliveries WHERE sink = ? AND refused IS NOT NULL", (name,))
                assert row is not None
                assert aside is not None
                owner = None if has_ended(holder, until, now) else read_owner(holder)
                age = None if row[1] is None else max(0.0, now - row[1])
                result.append(Backlog(name, row[0], age, aside[0], str(owner.owner) if owner else None))
        return result

    def forget(self, sink: str) -> bool:
        """Delete the sink and what waits for it. Return whether it existed."""
        # Read before the deletion: a deletion repeated after a lost reply would find no row.
        known = self._database.one("SELECT 1 FROM sinks WHERE name = ?", (sink,)) is not None
        self._database.run(
            lambda tx: tx.execute("DELETE FROM sinks WHERE name = ?", (sink,)), operation="events.forget"
        )
        return known

    def tidy(self, sink: str) -> None:
        """Advance ``since`` to the first event that is not delivered, and delete the deliveries below it."""

        def work(tx: Tx) -> None:
            if not _ORDER[tx.engine].is_quiet(tx):
                return  # a number below the new line may still be committed
            row = tx.one(
                # An event that was put aside stays above the line, so that it can be retried.
                "SELECT coalesce(min(o.seq) - 1, (SELECT max(seq) FROM outbox)) FROM sinks s JOIN outbox o "
                "ON o.seq > s.since AND (s.job IS NULL OR o.job = s.job) WHERE s.name = ? AND NOT EXISTS "
                "(SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = o.seq AND d.refused IS NULL)",
                (sink,),
            )
            if row is not None and row[0] is not None:
                tx.execute("UPDATE sinks SET since = ? WHERE name = ? AND since < ?", (row[0], sink, row[0]))
                tx.execute("DELETE FROM deliveries WHERE sink = ? AND seq <= ? AND refused IS NULL", (sink, row[0]))

        self._database.run(work, operation="events.tidy")


def _event(row: Row) -> Event:
    _, id, type, at, source, job, version, data = row
    fields = {"id": id, "type": type, "source": source, "job": job, "version": version}
    return from_fields(fields, datetime.fromtimestamp(at, UTC), json.loads(data))
