"""The outbox in SQL: tables ``outbox``, ``sinks`` and ``deliveries``.

A row of ``deliveries`` settles one event for one sink: it took it, or refused it for good. A cursor would not do: on
PostgreSQL a lower number may be committed later. `SqlOutbox.tidy` moves the number below which all is settled
(``sinks.since``) and removes those rows; it does so only at a moment when no transaction that appends is open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from headway._lease import Lease, Owner, SqlLeases, has_ended, read_owner
from headway._sql import NOW, Database, Row, Tx, Value, marks, require_open
from headway.errors import Held, InvalidInput
from headway.events.envelope import Event, completion, from_fields, plain, whole
from headway.events.outbox import HISTORY, LEASE, Backlog, Refused
from headway.telemetry import Log, metrics, redact

log = Log("events")

#: Appending transactions share this lock of PostgreSQL; who gets it alone knows that none of them is open.
_APPENDING = "hashtext('headway.outbox')"
#: How an appending transaction takes it, for a statement that appends on its own: before the first number is given.
SHARE_APPENDING = f"SELECT pg_advisory_xact_lock_shared({_APPENDING})"

#: So long a new sink waits at a time for open transactions that append.
ALONE_MILLISECONDS = 100
#: A reason longer than this is cut.
REASON = 500

_LEASES = SqlLeases("sinks", "name")

# What a sink has not settled yet.
_WAITING = (
    "FROM sinks s JOIN outbox o ON o.seq > s.since AND (s.job IS NULL OR o.job = s.job) WHERE s.name = ? AND NOT EXISTS "
    "(SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = o.seq)"
)


def append(tx: Tx, event: Event) -> None:
    """Decide that ``event`` happened, in the transaction that makes it true. Deciding it again changes nothing.

    Data that JSON cannot hold is `InvalidInput`, and the transaction is the caller's to give up.
    """
    try:
        data = completion(event.data) if event.type == "job.completed" else plain(event.data)
    except ValueError as error:
        raise InvalidInput(f"The data of event {event.id!r} is not that of {event.type}: {error}.") from error
    if event.at.tzinfo is None:
        raise InvalidInput(f"The time of event {event.id!r} has no time zone.", hint="Use datetime.now(UTC).")
    if tx.engine == "postgresql":
        tx.execute(SHARE_APPENDING)
    tx.execute(
        "INSERT INTO outbox (id, type, at, source, job, version, data) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (whole(event.id), whole(event.type), event.at.timestamp(), whole(event.source), whole(event.job),
         event.version, json.dumps(data)),
    )  # fmt: skip


def append_all(database: Database, events: Sequence[Event]) -> None:
    """`append` for events that something outside decided. One that no database can hold costs only itself."""

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
        log.error("an event cannot be kept; its sinks are not told", event=event.type, job=event.job, error=str(error))  # noqa: TRY400  # the error is the fact, its trace is not


_NOBODY_WAITS = (
    "NOT EXISTS (SELECT 1 FROM sinks s WHERE s.since < outbox.seq AND (s.job IS NULL OR s.job = outbox.job) AND NOT EXISTS "
    "(SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = outbox.seq))"
)


def purge(tx: Tx, before: float) -> None:
    """Delete events older than ``before`` (Unix time) that no sink waits for, and what is left of sinks of one job
    whose events are gone."""
    tx.execute(f"DELETE FROM outbox WHERE at < ? AND {_NOBODY_WAITS}", (before,))
    tx.execute(
        "DELETE FROM sinks WHERE job IS NOT NULL AND at < ? AND NOT EXISTS "
        "(SELECT 1 FROM outbox o WHERE o.job = sinks.job AND o.source <> 'headway.queue')",  # its index has no tasks
        (before,),
    )


def purge_page(tx: Tx, source: str, before: float, *, after: int, limit: int) -> int | None:
    """`purge` for one who does it again and again: of the next ``limit`` events behind number ``after``, those of ``source``.
    Up to which number it looked; None when it has come to the end, or to events none of which is that old: a million newer
    ones are not read. What sinks still wait for is passed, not looked at again."""
    page = tx.all("SELECT seq, at FROM outbox WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit))
    if not any(at < before for _, at in page):
        return None
    last = int(page[-1][0])
    tx.execute(
        f"DELETE FROM outbox WHERE seq > ? AND seq <= ? AND at < ? AND source = ? AND {_NOBODY_WAITS}",
        (after, last, before, source),
    )
    return last if len(page) == limit else None


class SqlOutbox:
    """See the module. Safe to use from many threads, and from many processes with one database."""

    name = "database"

    def __init__(self, database: Database, *, lease: float = LEASE) -> None:
        self._database, self._lease = require_open(database), lease

    def subscribe(self, sink: str, job: str | None = None) -> None:
        if self._database.one("SELECT 1 FROM sinks WHERE name = ?", (sink,)) is not None:
            return

        def work(tx: Tx) -> None:
            if tx.engine == "postgresql":
                # Alone for a moment: no lower number is committed after this look. Whoever wants to append meanwhile waits
                # behind us, and a transaction of a caller's may last: so we wait a moment, and try again later.
                tx.execute(f"SET LOCAL lock_timeout = {ALONE_MILLISECONDS}")
                tx.execute(f"SELECT pg_advisory_xact_lock({_APPENDING})")
            now = tx.now()
            # Not by the newest old event: one that happened long ago may have been decided just now.
            tx.execute(
                "INSERT INTO sinks (name, job, at, since) SELECT ?, ?, ?, "
                "coalesce((SELECT min(seq) - 1 FROM outbox WHERE at >= ?), (SELECT max(seq) FROM outbox), 0) WHERE true "
                "ON CONFLICT (name) DO NOTHING",
                (sink, job, now, now - HISTORY),
            )

        self._database.run(work, operation="events.subscribe")

    def waits(self, sink: str) -> bool:
        return self._database.one(f"SELECT 1 {_WAITING} LIMIT 1", (sink,)) is not None

    def acquire(self, sink: str) -> Lease:
        owner = Owner.current()  # outside the transaction: repeated, it is the same acquisition
        found = self._database.run(lambda tx: _LEASES.acquire(tx, sink, owner, self._lease), operation="events.acquire")
        if isinstance(found, Held):
            raise found
        return found

    def renew(self, lease: Lease) -> None:
        self._database.run(lambda tx: _LEASES.renew(tx, lease), operation="events.renew")

    def release(self, lease: Lease) -> None:
        self._database.run(lambda tx: _LEASES.release(tx, lease), operation="events.release")

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        while True:
            rows = self._database.all(
                f"SELECT o.seq, o.id, o.type, o.at, o.source, o.job, o.version, o.data {_WAITING} ORDER BY o.seq LIMIT ?",
                (sink, limit),
            )
            found = []
            for row in rows:
                try:
                    # By its id, not its number: a database put back to an older backup gives the number to another event.
                    found.append((str(row[1]), _event(row)))
                except (ValueError, TypeError, OverflowError, OSError, RecursionError, InvalidInput) as error:
                    self._say_damaged(sink, row, error)
            if found or not rows:
                return found  # nothing but damaged rows is not the end of what waits: they are put aside now

    def _say_damaged(self, sink: str, row: Row, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        log.error("a row of the outbox is no event; it is put aside", sink=sink, eventID=str(row[1]), error=why)
        metrics.count("headway_events_refused", sink=sink)
        self._settle(sink, "seq", [row[0]], f"no event: {why}")  # its id may be no text

    def delivered(self, sink: str, handles: Sequence[str]) -> None:
        self._settle(sink, "id", handles, None)

    def count_refusal(self, sink: str, handle: str, *, seen: int, apart: float) -> int:
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
        self._settle(sink, "id", [handle], reason)

    def _settle(self, sink: str, column: str, which: Sequence[Value], reason: str | None) -> None:
        said = None if reason is None else redact(reason)[:REASON]

        def work(tx: Tx) -> None:
            # An event or the sink may have been deleted meanwhile: then there is nothing to settle.
            tx.execute(
                f"INSERT INTO deliveries (sink, seq, refused, at) SELECT s.name, o.seq, ?, {NOW[tx.engine]} "
                f"FROM sinks s, outbox o WHERE s.name = ? AND o.{column} IN ({marks(len(which))}) "
                "ON CONFLICT (sink, seq) DO NOTHING",
                (said, sink, *which),
            )
            if reason is not None:  # tried again some day, it has all its tries
                tx.execute("UPDATE sinks SET refusing = NULL WHERE name = ?", (sink,))

        self._database.run(work, operation="events.settle")

    def refused(self, sink: str | None = None) -> list[Refused]:
        where, parameters = ("AND d.sink = ?", (sink,)) if sink is not None else ("", ())
        rows = self._database.all(
            "SELECT d.sink, o.seq, o.id, o.type, o.job, d.refused, d.at FROM deliveries d JOIN outbox o ON o.seq = d.seq "
            f"WHERE d.refused IS NOT NULL {where} ORDER BY o.seq, d.sink",
            parameters,
        )
        return [Refused(name, str(seq), id, type, job, why, _utc(at)) for name, seq, id, type, job, why, at in rows]

    def retry(self, found: Refused) -> None:
        self._unsettle(found, None)

    def discard(self, found: Refused) -> None:
        self._unsettle(found, "discarded")

    def _unsettle(self, found: Refused, outcome: str | None) -> None:
        where = "WHERE sink = ? AND seq = ? AND refused IS NOT NULL"
        change = "DELETE FROM deliveries" if outcome is None else "UPDATE deliveries SET refused = NULL"
        self._database.run(
            lambda tx: tx.execute(f"{change} {where}", (found.sink, int(found.handle))), operation="events.refused"
        )

    def backlog(self, sink: str | None = None) -> list[Backlog]:
        where, parameters = ("WHERE name = ?", (sink,)) if sink is not None else ("", ())
        result = []
        with self._database.read() as tx:
            now = tx.now()
            sinks = tx.all(f"SELECT name, holder, lease_until FROM sinks {where} ORDER BY name", parameters)
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
        # Asked first, so that a deletion repeated after a lost answer still says that there was one.
        known = self._database.one("SELECT 1 FROM sinks WHERE name = ?", (sink,)) is not None
        self._database.run(
            lambda tx: tx.execute("DELETE FROM sinks WHERE name = ?", (sink,)), operation="events.forget"
        )
        return known

    def tidy(self, sink: str) -> None:
        def work(tx: Tx) -> None:
            if tx.engine == "postgresql":
                alone = tx.one(f"SELECT pg_try_advisory_xact_lock({_APPENDING})")
                if alone is None or not alone[0]:
                    return  # an event with a number we have passed may yet be committed
            row = tx.one(
                # What was put aside stays above the line: it may be wanted again.
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


def _utc(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)
