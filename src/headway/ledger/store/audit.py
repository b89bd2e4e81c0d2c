"""The audit trail: who changed what, written in the transaction that changes it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headway._sql import Database, Row, Tx


def audit(tx: Tx, now: float, actor: str, action: str, job: str, detail: Mapping[str, object]) -> None:
    """Add an entry to the audit trail."""
    tx.execute(
        "INSERT INTO audit (at, actor, action, job, detail) VALUES (?, ?, ?, ?, ?)",
        (now, actor, action, job, json.dumps(detail, ensure_ascii=False)),
    )


def entries(database: Database, job: str | None) -> list[Row]:
    """Return (at, actor, action, job, detail) of one job or of all, oldest first."""
    where, parameters = ("WHERE job = ?", (job,)) if job else ("", ())
    return database.all(f"SELECT at, actor, action, job, detail FROM audit {where} ORDER BY seq", parameters)


def current_user() -> str:
    """Return the operating system's user name."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        return "unknown"
