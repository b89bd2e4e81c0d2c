"""The states of a job's tasks, and the state of the whole job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from headway.errors import InvalidInput
from headway.telemetry import redact
from headway.views.jobs.items import masked
from headway.views.shape import ABSENT, Absent, Json, document, plain

if TYPE_CHECKING:
    from headway import states
    from headway.states.store.contract import JobRecord


#: Bytes of messages and payloads after which a page of states ends.
PAGE_BYTES = 1_000_000


class State(NamedTuple):
    """The state of one task for one tag."""

    job_id: Annotated[str, "the job's id"]
    task_id: Annotated[int, "the task, from 0"]
    tag: Annotated[str, "the stream of work; empty for the task as a whole"]
    status: Annotated[int, "0 not started, 1 started, 2147483647 finished, -1 error, -2 warning, or a number of yours"]
    message: Annotated[str, "what it said"]
    timestamp: Annotated[datetime | None, "when it was written; null if it never was"]
    version: Annotated[int, "counts the writes of this task and tag"]
    event_id: Annotated[str, "the identity of the write"]
    payload: Annotated[Any, "what it carries; null to a role without the right to payloads"]
    schema_version: Annotated[int, "the version of this shape"]


class States(NamedTuple):
    """`headway states`: the states of a job."""

    job: Annotated[str, "the job's id"]
    num_tasks: Annotated[int, "how many tasks it has"]
    state: Annotated[State, "the one that decides: the lowest"]
    counts: Annotated[Mapping[str, int], "tasks by what their lowest state means"]
    worst_error: Annotated[State | None, "the error of a task, if one reported any"]
    states: Annotated[tuple[State, ...], "the newest of each task and tag, by task and tag"]
    next_after: Annotated[str | Absent | None, "`after` of the next page, null on the last; only from a server"] = (
        ABSENT
    )

    def as_json(self) -> Json:
        return document(self)


class StateEvent(NamedTuple):
    """`headway states JOB --follow`: one line per event."""

    event: Annotated[
        Literal["replay", "replay_complete", "change", "went_back"],
        "whether it stood already, or changed; or that the store went back in time, and all is said again",
    ]
    state: Annotated[State | None, "the state; null at the end of the replay"]
    skipped: Annotated[int | Absent, "changes of it that were left out because the reader is too slow"] = ABSENT

    def as_json(self) -> Json:
        return document(self)


class StatesJob(NamedTuple):
    """A job that has states."""

    job: Annotated[str, "its id"]
    num_tasks: Annotated[int, "how many tasks it has"]
    created_at: Annotated[datetime | None, "when it was made"]
    deleted: Annotated[bool, "whether it is marked as deleted"]
    history: Annotated[bool, "whether every state is kept, not only the newest"]


class StatesJobs(NamedTuple):
    """`headway states jobs`: the jobs that have states."""

    jobs: Annotated[tuple[StatesJob, ...], "the jobs"]

    def as_json(self) -> Json:
        return document(self)


def read_states(
    manager: states.Manager,
    *,
    task_id: int | None = None,
    tag: str | None = None,
    after: str | None = None,
    limit: int | None = None,
) -> States:
    """Read the current states, narrowed to a task or a tag.

    With ``limit`` the answer is a page of at most that many states and about `PAGE_BYTES`, by task and tag. ``after`` is
    `next_after` of the page before. Counts and the deciding state are always those of all states.
    """
    last = None if after is None else _key_of(after)
    with manager.subscribe(task_id=task_id, tag=tag) as subscription:
        current = []
        while (state := subscription.get().state) is not None:
            current.append(state)
    summary = manager.summary(tag=tag)
    found = sorted((state for state in current if last is None or state.key > last), key=lambda state: state.key)
    page = found if limit is None else _first_page(found, limit)
    is_last = len(page) == len(found)
    return States(
        job=manager.job_id,
        num_tasks=manager.num_tasks,
        state=state_view(manager.get_state(task_id=task_id, tag=tag)),
        counts={str(name): count for name, count in summary.counts.items()},
        worst_error=None if summary.worst_error is None else state_view(summary.worst_error),
        states=tuple(state_view(state) for state in page),
        next_after=ABSENT if limit is None else None if is_last else f"{page[-1].task_id}/{page[-1].tag}",
    )


def _first_page(found: list[states.State], limit: int) -> list[states.State]:
    """Return the first states: at most ``limit``, and none that begins beyond `PAGE_BYTES`."""
    size = 0
    for index, state in enumerate(found[:limit]):
        if size > PAGE_BYTES:
            return found[:index]
        size += len(state.message) + len(json.dumps(plain(state.payload)))
    return found[:limit]


def _key_of(cursor: str) -> tuple[int, str]:
    task, slash, tag = cursor.partition("/")
    if not slash or not task.isascii() or not task.isdecimal() or len(task) > 10:
        raise InvalidInput(f"{cursor[:40]!r} is not the end of a page.", hint="Use next_after of the page before.")
    return int(task), tag


def read_states_jobs(url: str) -> StatesJobs:
    from headway.states import list_jobs

    return StatesJobs(tuple(_job(record) for record in list_jobs(url)))


def event_view(event: states.StateEvent) -> StateEvent:
    if event.state is None:
        return StateEvent("replay_complete", None)
    kind: Literal["replay", "change"] = "replay" if event.replay else "change"
    return StateEvent(kind, state_view(event.state), event.skipped or ABSENT)


def state_view(state: states.State) -> State:
    return State(
        state.job_id, state.task_id, state.tag, state.status, state.message, state.timestamp, state.version,
        state.event_id, state.payload, state.schema_version,
    )  # fmt: skip


def masked_states(found: States, *, payload: bool = True) -> States:
    """Return the states without secrets in messages and payloads; without ``payload`` every payload is None."""

    def mask(state: State) -> State:
        return masked_state(state, payload=payload)

    worst = None if found.worst_error is None else mask(found.worst_error)
    return found._replace(state=mask(found.state), worst_error=worst, states=tuple(mask(one) for one in found.states))


def masked_state(state: State, *, payload: bool = True) -> State:
    return state._replace(message=redact(state.message), payload=masked(state.payload) if payload else None)


def _job(record: JobRecord) -> StatesJob:
    return StatesJob(record.job_id, record.num_tasks, record.created_at, record.deleted, record.history)
