"""Commit order of the outbox on SQLite: one transaction writes at a time, so numbers are committed in order."""

from __future__ import annotations

from headway._sql import Tx


def begin_append(tx: Tx) -> None:
    """Do nothing: the transaction holds the write lock."""


def wait_for_appenders(tx: Tx) -> None:
    """Do nothing: no other transaction that writes is open."""


def is_quiet(tx: Tx) -> bool:  # noqa: ARG001  # the signature of CommitOrder
    """Return True: no other transaction that writes is open."""
    return True
