"""The health of a store and its surroundings."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.core.text import duration, plural
from headway.errors import HeadwayError, Refused
from headway.telemetry import redact
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database, Tx
    from headway.config import Config
    from headway.ledger import Ledger

#: A larger write-ahead log was not checkpointed for long: some reader keeps it open.
WAL_BYTES = 64 * 1024 * 1024
#: With less free space a run may soon fail.
FREE_BYTES = 64 * 1024 * 1024
#: Maximum difference between the clocks of this machine and of the database, in seconds.
SKEW_SECONDS = 2.0
#: Earlier versions of SQLite may lose a checkpoint when several processes write. A job has one writer, so this is only
#: a remark.
SQLITE_WITHOUT_WAL_BUG = (3, 51, 3)

Verdict = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """The result of one check."""

    check: Annotated[str, "what was looked at"]
    verdict: Annotated[Verdict, "how it is"]
    text: Annotated[str, "what was found"]
    hint: Annotated[str, "what to do about it; empty if there is nothing to do"] = ""


class Health(NamedTuple):
    """`headway doctor`: the store and its surroundings."""

    healthy: Annotated[bool, "whether nothing failed"]
    findings: Annotated[tuple[Finding, ...], "what was looked at, in an order in which a failure explains the next"]

    def as_json(self) -> Json:
        return document(self)


class _Undo(Exception):
    """Rolls back the test of writing."""


def health(findings: list[Finding]) -> Health:
    return Health(all(finding.verdict != "fail" for finding in findings), tuple(findings))


def examine(address: str | None, *, version: str) -> Iterator[Finding]:
    """Yield the findings, ordered so that the first failure explains later ones."""
    from headway._sql import sqlite_path
    from headway.config import Config
    from headway.ledger.ledger import Ledger

    yield Finding("version", "ok", f"headway {version}, Python {python_version()}, {_sqlite_version()}")
    try:
        config = Config(cli={"database": address})
        url = config.text("database")
        yield Finding("config", "ok", "the settings can be read")
        path = sqlite_path(url)
        if path is not None:
            yield from _modes(path)
        ledger = Ledger.open(url, create=False)
    except HeadwayError as error:
        yield Finding("store", "fail", str(error), error.hint)
        return
    with ledger:
        store = ledger.database
        yield Finding("store", "ok", f"{store.name}, {store.size() / 1e6:,.1f} MB")
        yield _checked("writable", "a transaction can be written", lambda: _try_to_write(store))
        yield Finding("schema", "ok", f"version {store.schema_version()}")
        yield _checked("integrity", "no damage found", store.verify)
        if path is not None:
            yield from _space(path)
        yield from _clock(ledger)
        yield from _held(ledger)
        yield from _unserved(store)
    yield from _redis_server(config)


def _redis_server(config: Config) -> Iterator[Finding]:
    """Check the queue's Redis, if configured. An unsafe configuration is a warning, because the queue runs on it."""
    from headway import _redis
    from headway.queue.settings import connection_settings

    try:
        settings = connection_settings(config)
        address = settings["redis"]
        if address is None or settings["mode"] == "database":
            return
        try:
            with _redis.connect(address, role="queue", timeout=1.0, connect_timeout=1.0) as client:
                found = _redis.preflight(client, role="queue", where=address, durable=True)
        except _redis.failures() as error:
            raise _redis.translate(error, address) from error
    except Refused as error:
        yield Finding("redis", "warn", str(error), error.hint)
    except HeadwayError as error:
        yield Finding("redis", "fail", str(error), error.hint)
    else:
        version = ".".join(map(str, found.version))
        yield Finding(
            "redis", "ok", f"{_redis.shown_address(address)}, version {version}, deletes no keys for lack of memory"
        )


def _unserved(store: Database) -> Iterator[Finding]:
    """Report waiting tasks of kinds that no online worker runs."""
    from headway.queue.store.workers import online_workers, unserved_by, waiting_kinds

    with store.read() as tx:
        online, waiting = online_workers(tx), waiting_kinds(tx)
    why, hint = "no worker is online", "Start a worker: headway worker --app MODULE:NAME"
    if online:
        why = "no online worker runs them"
        hint = "Start a worker of the application that has their handler, or cancel them: headway task cancel ID"
    for each in unserved_by(online, waiting):
        what = f"{plural(each.tasks, 'task')} of kind {each.kind} in the queue {each.queue}"
        yield Finding("tasks", "warn", f"{what}: {why}", hint)


def _checked(check: str, well: str, look: Callable[[], None]) -> Finding:
    try:
        look()
    except HeadwayError as error:
        return Finding(check, "fail", str(error), error.hint)
    return Finding(check, "ok", well)


def _sqlite_version() -> str:
    found = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < SQLITE_WITHOUT_WAL_BUG:
        return f"SQLite {found} (before 3.51.3: let only one process write at a time, as headway run does)"
    return f"SQLite {found}"


def _modes(path: Path) -> Iterator[Finding]:
    """Check the file modes before the store is opened, because opening corrects the database's own mode."""
    open_to_others = []
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(OSError):  # another check reports a missing file
            if stat.S_IMODE(name.stat().st_mode) & 0o077:
                open_to_others.append(name.name)
    if open_to_others:
        names = ", ".join(open_to_others)
        yield Finding("mode", "warn", f"others can read {names}", f"Close it: chmod 600 {names}")
    elif path.exists():
        yield Finding("mode", "ok", "only its owner can read it")


def _try_to_write(store: Database) -> None:
    def work(tx: Tx) -> None:
        tx.execute("INSERT INTO audit (at, actor, action, job, detail) VALUES (0, 'headway', 'doctor', '', '{}')")
        raise _Undo

    with suppress(_Undo):
        store.run(work, operation="doctor")


def _space(path: Path) -> Iterator[Finding]:
    wal = Path(f"{path}-wal")
    size = wal.stat().st_size if wal.exists() else 0
    hint = "Some program keeps an old reading of the database open; end it." if size > WAL_BYTES else ""
    yield Finding("wal", "warn" if hint else "ok", f"write-ahead log of {size / 1e6:,.1f} MB", hint)
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    hint = "Free some space: a run stops when there is none." if free < FREE_BYTES else ""
    yield Finding("disk", "warn" if hint else "ok", f"{free / 1e9:,.1f} GB free", hint)


def _clock(ledger: Ledger) -> Iterator[Finding]:
    skew = ledger.database.now() - time.time()
    if abs(skew) > SKEW_SECONDS:
        yield Finding("clock", "warn", f"the database's clock differs by {skew:+.1f} s", "Check NTP on both machines.")
        return
    ahead = max(((info.updated_at - datetime.now(UTC)).total_seconds() for info in ledger.jobs()), default=0.0)
    if ahead > SKEW_SECONDS:
        yield Finding("clock", "warn", f"a job was changed {duration(ahead)} in the future: the clock was set back")
    else:
        yield Finding("clock", "ok", f"this machine and the database agree to {abs(skew):.1f} s")


def _held(ledger: Ledger) -> Iterator[Finding]:
    for info in ledger.jobs():
        if info.holder is None:
            continue
        who = f"process {info.holder['pid']} on {info.holder['host']}"
        if info.held:
            yield Finding("job", "ok", f"{info.id} is being run by {who}")
        else:
            hint = f"Continue it: {redact(info.command)}" if info.command else "Run it again: it continues."
            yield Finding("job", "warn", f"{info.id}: {who} died while running it; nothing is lost", hint)
