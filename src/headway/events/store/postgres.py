"""Commit order of the outbox on PostgreSQL, where a lower number may be committed later than a higher one."""

from __future__ import annotations

from headway._sql import Tx

#: The advisory lock of the outbox. Appending transactions share it, so its exclusive owner knows that none is open.
_LOCK = "hashtext('headway.outbox')"

#: Take the lock as an appender. Statements that append by themselves run this before they draw their first number.
SHARE_APPENDING = f"SELECT pg_advisory_xact_lock_shared({_LOCK})"

#: Milliseconds that `wait_for_appenders` waits. Appenders queue behind it meanwhile, so the relay retries later instead.
ALONE_MILLISECONDS = 100


def begin_append(tx: Tx) -> None:
    """Mark the transaction as one that appends."""
    tx.execute(SHARE_APPENDING)


def wait_for_appenders(tx: Tx) -> None:
    """Wait until no appending transaction is open, and hold off new ones until this transaction ends."""
    tx.execute(f"SET LOCAL lock_timeout = {ALONE_MILLISECONDS}")
    tx.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")


def is_quiet(tx: Tx) -> bool:
    """Return whether no appending transaction is open; then hold off new ones until this transaction ends."""
    row = tx.one(f"SELECT pg_try_advisory_xact_lock({_LOCK})")
    return bool(row and row[0])
