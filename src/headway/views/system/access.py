"""Who may use the web application, what they did, and what an action answers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from headway.telemetry import redact
from headway.views.shape import ABSENT, Absent, Json, document
from headway.views.system.records import facts

if TYPE_CHECKING:
    from headway._sql import Database, Value


class Token(NamedTuple):
    """What is kept of a token."""

    id: Annotated[str, "its public part"]
    name: Annotated[str, "whose it is"]
    role: Annotated[str, "viewer, operator, admin, or user: their own tasks only"]
    created_at: Annotated[datetime, "when it was made"]
    created_by: Annotated[str, "who made it"]
    expires_at: Annotated[datetime | None, "when it ends; null if it has no end"]
    revoked_at: Annotated[datetime | None, "when it was revoked"]


class Tokens(NamedTuple):
    """`headway token list`: the tokens, the oldest first."""

    tokens: Annotated[tuple[Token, ...], "the tokens"]

    def as_json(self) -> Json:
        return document(self)


class ActivityEntry(NamedTuple):
    """One thing somebody did."""

    no: Annotated[int, "its place in the trail; grows"]
    at: Annotated[datetime, "when"]
    actor: Annotated[str, "who"]
    action: Annotated[str, "what: retry, forget, queue.pause, task.cancel, login, ..."]
    job: Annotated[str, "the job's id; empty if it is about none"]
    detail: Annotated[Mapping[str, Any], "the facts of it, with the reason where one was given"]


class Activity(NamedTuple):
    """`/api/v1/activity`: who did what, the newest first. `headway audit` shows the same, the oldest first."""

    activity: Annotated[tuple[ActivityEntry, ...], "what was done"]
    next_before: Annotated[int | None, "`before` of the next page; null on the last"]

    def as_json(self) -> Json:
        return document(self)


class Acted(NamedTuple):
    """What an action did."""

    action: Annotated[str, "its name, as in the activity"]
    text: Annotated[str, "what it did, in a sentence"]
    touched: Annotated[int, "how many it changed"]
    command: Annotated[str | Absent, "what to run, when nothing that runs now does the work; secrets are masked"] = (
        ABSENT
    )

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
    """What was done after the entry ``before``, counted from the newest; one more is read, to know of a next page."""
    from headway.ledger.values import utc

    where: list[str] = ["true"]
    values: list[Value] = []
    for condition, wanted in (("job = ?", job), ("actor = ?", actor), ("seq < ?", before)):
        if wanted is not None:
            where.append(condition)
            values.append(wanted)
    rows = database.all(
        f"SELECT seq, at, actor, action, job, detail FROM audit WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?",
        (*values, limit + 1),
    )
    page = tuple(
        ActivityEntry(no, utc(at), redact(who), what, name, facts(detail))
        for no, at, who, what, name, detail in rows[:limit]
    )
    return Activity(page, page[-1].no if len(rows) > limit else None)
