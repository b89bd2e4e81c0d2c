"""Tokens of the web application, the audit trail as activity, and the result of an action."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from headway.telemetry import redact
from headway.views.shape import ABSENT, Absent, Json, document
from headway.views.system.records import facts

if TYPE_CHECKING:
    from headway._sql import Database


class Token(NamedTuple):
    """A token, without its secret part."""

    id: Annotated[str, "its public part"]
    name: Annotated[str, "its owner"]
    role: Annotated[str, "viewer, operator, admin, or user: their own tasks only"]
    created_at: Annotated[datetime, "when it was created"]
    created_by: Annotated[str, "who created it"]
    expires_at: Annotated[datetime | None, "when it expires; null: never"]
    revoked_at: Annotated[datetime | None, "when it was revoked"]


class Tokens(NamedTuple):
    """`headway token list`: the tokens, oldest first."""

    tokens: Annotated[tuple[Token, ...], "the tokens"]

    def as_json(self) -> Json:
        return document(self)


class ActivityEntry(NamedTuple):
    """An entry of the audit trail."""

    no: Annotated[int, "its number; grows"]
    at: Annotated[datetime, "when"]
    actor: Annotated[str, "who"]
    action: Annotated[str, "retry, forget, queue.pause, task.cancel, login, ..."]
    job: Annotated[str, "the job's id, or empty"]
    detail: Annotated[Mapping[str, Any], "details, with the reason if one was given"]


class Activity(NamedTuple):
    """`/api/v1/activity`: who did what, newest first. `headway audit` shows the same, oldest first."""

    activity: Annotated[tuple[ActivityEntry, ...], "the entries"]
    next_before: Annotated[int | None, "`before` of the next page; null on the last"]

    def as_json(self) -> Json:
        return document(self)


class Acted(NamedTuple):
    """The result of an action."""

    action: Annotated[str, "the action, as in the activity"]
    text: Annotated[str, "the result in a sentence"]
    touched: Annotated[int, "number of changed objects"]
    command: Annotated[str | Absent, "command to run, if no running process does the work; secrets are masked"] = ABSENT

    def as_json(self) -> Json:
        return document(self)


def read_activity(
    database: Database,
    *,
    job: str | None = None,
    actor: str | None = None,
    before: int | None = None,
    limit: int = 50,
) -> Activity:
    """Read a page of the audit trail, newest first. ``before`` is `next_before` of the previous page."""
    from headway.ledger.store.queries import statistics
    from headway.ledger.values import utc

    with database.read() as tx:
        rows = statistics.activity(tx, job=job, actor=actor, before=before, limit=limit + 1)
    page = tuple(
        ActivityEntry(no, utc(at), redact(who), what, name, facts(detail))
        for no, at, who, what, name, detail in rows[:limit]
    )
    return Activity(page, page[-1].no if len(rows) > limit else None)
