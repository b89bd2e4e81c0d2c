"""`Manager`: write the states of one task, and read those of the whole job.

A manager writes only its own task's states. For several states the lowest status wins; a task that has not reported
counts as 0.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self
from weakref import WeakSet

from headway.core.retry import call
from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.events import Json
from headway.states.buffer import Overflow
from headway.states.live import LiveStore
from headway.states.state import (
    BLACK,
    ERROR,
    FINISHED,
    GREEN,
    MESSAGE_LIMIT,
    NOT_STARTED,
    RED,
    STARTED,
    WARNING,
    YELLOW,
    State,
    StatusClass,
    checked_id,
    checked_num_tasks,
    checked_payload,
    checked_seconds,
    checked_status,
    checked_task,
    status_class,
    storable,
)
from headway.states.store.contract import Store, WentBack
from headway.states.subscription import DEPTH, Subscription
from headway.telemetry import Log, redact

log = Log("states")

#: Payload field in which an error or warning keeps the progress it replaced.
LAST_STATUS = "last_status"

#: Maximum length of an error or warning text, after the colored dot. A longer text keeps its beginning and end,
#: because searching megabytes for secrets would take seconds.
_TEXT_LIMIT = MESSAGE_LIMIT - 2


class TaskFailed(HeadwayError):
    """Raised by `Manager.wait_for` when a task reported an error."""

    exit_code = 3
    hint = "See the error: headway states JOB. To wait for a retry, use ignore_errors."


class WaitTimeout(HeadwayError, TimeoutError):
    """Raised by `Manager.wait_for` on timeout."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Status counts of a job or tag.

    ``state`` is the lowest state, which decides. A warning (-2) is lower than an error (-1), so ``worst_error`` shows
    separately whether a task failed.
    """

    state: State
    counts: Mapping[StatusClass, int]
    worst_error: State | None

    @property
    def finished(self) -> bool:
        """Whether every task has finished."""
        return self.state.status == FINISHED


class Manager:
    """Reads and writes the states of a job on behalf of the task ``task_index``.

    With ``expected_tags`` a task counts as not started until it has reported every one of these tags. Without it only
    reported states count.
    """

    def __init__(
        self, job_id: str, task_index: int, num_tasks: int, store: Store, *, expected_tags: Iterable[str] = ()
    ) -> None:
        job_id, num_tasks = checked_id(job_id, "a job id"), checked_num_tasks(num_tasks)
        task_index = checked_task(task_index, num_tasks)
        if (store.job_id, store.num_tasks) != (job_id, num_tasks):
            raise InvalidInput(
                f"The store belongs to {store.job_id!r} with {store.num_tasks} tasks, not {job_id!r} with {num_tasks}.",
                hint="Use the number of tasks that open_store returned: it is the one stored with the job.",
            )
        self._job_id = job_id
        self._task_index = task_index
        self._num_tasks = num_tasks
        self._store = store
        self._expected_tags = tuple(checked_id(tag, "a tag") for tag in expected_tags)
        self._progress: dict[str, int] = {}  # our last positive status per tag, for `_setback` in an outage
        self._subscriptions: WeakSet[Subscription] = WeakSet()

    @property
    def job_id(self) -> str:
        """The job that this task belongs to."""
        return self._job_id

    @property
    def task_index(self) -> int:
        """The number of this task, from 0."""
        return self._task_index

    @property
    def num_tasks(self) -> int:
        """The job's number of tasks."""
        return self._num_tasks

    # ---- writing ---------------------------------------------------------------------

    def set_state(
        self,
        state: State | str,
        *,
        status: int | None = None,
        message: str | None = None,
        payload: Mapping[str, Json] | None = None,
        event_id: str | None = None,
    ) -> State:
        """Write a state of this task and return it as stored. ``state`` is a `State` or a tag."""
        return self._write(self._own(state, status, message, payload, event_id))

    def set_started(
        self,
        state: State | str,
        *,
        message: str | None = None,
        payload: Mapping[str, Json] | None = None,
        event_id: str | None = None,
    ) -> State:
        """Write status 1. The default message is ``🟢 Started``."""
        own = self._own(state, STARTED, message, payload, event_id)
        return self._write(replace(own, message=own.message or f"{GREEN} Started"))

    def set_finished(
        self,
        state: State | str,
        *,
        message: str | None = None,
        payload: Mapping[str, Json] | None = None,
        event_id: str | None = None,
    ) -> State:
        """Write status 2147483647. The default message is ``⚫ Finished``."""
        own = self._own(state, FINISHED, message, payload, event_id)
        return self._write(replace(own, message=own.message or f"{BLACK} Finished"))

    def set_error(
        self,
        error: BaseException | str,
        state: State | str,
        *,
        payload: Mapping[str, Json] | None = None,
        event_id: str | None = None,
    ) -> State:
        """Write status -1, or the exception's own negative ``status_code``.

        The message is ``🔴`` and the error with secrets redacted. The payload keeps the previous progress as ``last_status``.
        """
        text = storable(f"{RED} {redact(_text_of(error) or type(error).__name__, _TEXT_LIMIT)}")
        return self._write(self._setback(self._own(state, _error_status(error), text, payload, event_id)))

    def set_warning(
        self,
        warning: str,
        state: State | str,
        *,
        payload: Mapping[str, Json] | None = None,
        event_id: str | None = None,
    ) -> State:
        """Write status -2 with ``🟡`` and the warning. The payload keeps the previous progress as ``last_status``."""
        text = storable(f"{YELLOW} {redact(warning, _TEXT_LIMIT)}")
        return self._write(self._setback(self._own(state, WARNING, text, payload, event_id)))

    def _write(self, state: State) -> State:
        stored = self._store.set_state(state)
        self._progress[stored.tag] = effective_status(stored)
        return stored

    def _own(
        self,
        state: State | str,
        status: int | None,
        message: str | None,
        payload: Mapping[str, Json] | None,
        event_id: str | None,
    ) -> State:
        if not isinstance(state, State):
            state = State(self._job_id, self._task_index, state)
        if state.job_id != self._job_id:
            raise InvalidInput(f"This manager belongs to the job {self._job_id!r}, not {state.job_id!r}.")
        if state.task_id != self._task_index or isinstance(state.task_id, bool):
            raise InvalidInput(
                f"This manager writes the states of task {self._task_index} only, not of task {state.task_id!r}.",
                hint="To signal another task, write a state of this task and let the other one subscribe.",
            )
        return replace(
            state,
            status=state.status if status is None else status,
            message=state.message if message is None else message,
            payload=state.payload if payload is None else payload,
            event_id=state.event_id if event_id is None else event_id,
        )

    def _setback(self, state: State) -> State:
        """Return ``state`` with the key's last positive status in its payload, so that progress is kept."""
        tag = checked_id(state.tag, "a tag")
        try:
            before = effective_status(self._store.get_state(self._task_index, tag))
        except Unavailable:  # use our own last write: no other manager writes this task
            before = self._progress[tag] if tag in self._progress else self._progress_at_last(tag)
        payload = checked_payload(state.payload) or {}
        if before <= 0 or LAST_STATUS in payload:
            return state
        return replace(state, payload={**payload, LAST_STATUS: before})

    def _progress_at_last(self, tag: str) -> int:
        """Read the stored progress, with a write's retries. Returns 0 in an outage, which the write will report."""
        if not isinstance(self._store, LiveStore):
            return NOT_STARTED
        try:
            state = call(
                lambda: self._store.get_state(self._task_index, tag), self._store.patience, retry_on=Unavailable
            )
        except Unavailable:
            return NOT_STARTED
        return effective_status(state)

    # ---- reading -----------------------------------------------------------------------------------

    def get_state(self, *, task_id: int | None = None, tag: str | None = None) -> State:
        """Return the lowest state of one key, of a tag, of a task, or of the whole job.

        Ties go to the lowest task, then tag. A state that was never reported has status 0, version 0 and no timestamp.
        """
        task_id, tag = self._checked_scope(task_id, tag)
        if task_id is not None and tag is not None:
            return self._store.get_state(task_id, tag)
        return min(self._view(task_id, tag), key=_rank)

    def summary(self, *, tag: str | None = None) -> Summary:
        """Return the status counts of the job or one tag, with the deciding state and the worst error."""
        _, tag = self._checked_scope(None, tag)
        view = self._view(None, tag)
        errors = [state for state in view if status_class(state.status) == "error"]
        counts: dict[StatusClass, int] = dict.fromkeys(("not_started", "running", "finished", "warning", "error"), 0)
        counts |= Counter(status_class(state.status) for state in view)
        return Summary(min(view, key=_rank), counts, min(errors, key=_rank, default=None))

    def _view(self, task_id: int | None, tag: str | None) -> list[State]:
        """Return the states in a scope, with a placeholder of status 0 for each missing report."""
        stored = self._store.list_all_states() if tag is None else self._store.list_states_for_tag(tag)
        present = [state for state in stored if task_id in (None, state.task_id)]
        tasks = range(self._num_tasks) if task_id is None else (task_id,)
        if tag is not None or self._expected_tags:
            known = {state.key for state in present}
            wanted = (tag,) if tag is not None else self._expected_tags
            missing = [(task, name) for task in tasks for name in wanted if (task, name) not in known]
        else:
            reported = {state.task_id for state in present}
            missing = [(task, "") for task in tasks if task not in reported]
        return present + [State(self._job_id, task, name) for task, name in missing]

    def _checked_scope(self, task_id: int | None, tag: str | None) -> tuple[int | None, str | None]:
        return (
            None if task_id is None else checked_task(task_id, self._num_tasks),
            None if tag is None else checked_id(tag, "a tag"),
        )

    def history(self, *, task_id: int, tag: str, after: int = 0, limit: int | None = None) -> list[State]:
        """Return every version of one key, oldest first. Requires a job created with ``history=True``.

        ``after`` and ``limit`` select one page: up to ``limit`` versions above ``after``.
        """
        return self._live_store("history").history(task_id, tag, after=after, limit=limit)

    # ---- subscribing -------------------------------------------------------------------

    def subscribe(
        self,
        *,
        task_id: int | None = None,
        tag: str | None = None,
        timeout: float | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "all",
    ) -> Subscription:
        """Subscribe to a task, a tag or the whole job: current states, oldest first, one sentinel, then every change.

        ``timeout`` is how many seconds iteration waits for an event before it raises TimeoutError. Up to ``depth`` events
        are buffered in memory. ``overflow`` decides what happens beyond that:

        - ``all`` buffers them in a temporary file, so that a slow reader gets every change.
        - ``latest`` keeps the newest state of each key. ``event.skipped`` counts the changes it replaces.
        - ``close`` ends the subscription with an error.
        """
        only_task, only_tag = self._checked_scope(task_id, tag)

        def accepts(state: State) -> bool:
            return only_task in (None, state.task_id) and only_tag in (None, state.tag)

        subscription = self._store.subscribe(accepts=accepts, timeout=timeout, depth=depth, overflow=overflow)
        self._subscriptions.add(subscription)
        return subscription

    def wait_for(
        self,
        tag: str,
        status: int = FINISHED,
        *,
        timeout: float | None = None,
        ignore_errors: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> Summary:
        """Wait until every task has reached ``status`` with ``tag``.

        A task with a warning keeps its previous progress. Raises:

        - `TaskFailed` as soon as a task reports an error. With ``ignore_errors`` it waits, as the task may be retried.
        - `WaitTimeout` after ``timeout`` seconds.
        - `JobGone` if the job is deleted, whatever its tasks had reached.
        """
        status, tag = checked_status(status), checked_id(tag, "a tag")
        if status <= 0:
            raise InvalidInput(f"status must be above 0 (got {status}): every task begins with 0.")
        limit = checked_seconds(timeout, "timeout")
        deadline = None if limit is None else clock() + limit
        while True:
            behind = set(range(self._num_tasks))
            try:
                with self.subscribe(tag=tag, depth=self._num_tasks + DEPTH, overflow="latest") as subscription:
                    while behind:
                        left = None if deadline is None else max(0.0, deadline - clock())
                        event = subscription.get(left)
                        if event.state is not None:
                            self._move(event.state, status, behind, ignore_errors=ignore_errors)
                    return self.summary(tag=tag)
            except WentBack:
                continue  # the store lost writes: start over with its current states
            except TimeoutError:
                raise self._too_late(tag, status, limit, behind) from None

    def _move(self, state: State, status: int, behind: set[int], *, ignore_errors: bool) -> None:
        if not ignore_errors and status_class(state.status) == "error":
            raise TaskFailed(f"Task {state.task_id} reported an error for {state.tag!r}: {state.message}")
        if effective_status(state) >= status:
            behind.discard(state.task_id)
        else:
            behind.add(state.task_id)  # the task may have restarted

    def _too_late(self, tag: str, status: int, timeout: float | None, behind: set[int]) -> WaitTimeout:
        shown = ", ".join(map(str, sorted(behind)[:10])) + (", ..." if len(behind) > 10 else "")
        return WaitTimeout(
            f"After {timeout:g} s {len(behind)} of {self._num_tasks} tasks have not reached {tag!r}: {shown}.",
            hint=f"See their states: headway states {self._job_id} --tag {tag}",
        )

    # ---- the job ---------------------------------------------------------------------

    def mark_job_deleted(self) -> bool:
        """Mark the job as deleted. Only task 0 does it; other tasks do nothing and return False."""
        if self._task_index == 0:
            self._live_store("mark_job_deleted").mark_job_deleted()
        return self._task_index == 0

    def delete_job(self) -> bool:
        """Delete the job and its states. Only task 0 does it; other tasks do nothing and return False."""
        if self._task_index == 0:
            self._live_store("delete_job").delete_job()
        return self._task_index == 0

    def _live_store(self, operation: str) -> LiveStore:
        if not isinstance(self._store, LiveStore):
            raise InvalidInput(f"A {type(self._store).__name__} does not support {operation}.")
        return self._store

    def close(self) -> None:
        """End this manager's subscriptions and close the store, which also ends those of other managers."""
        for subscription in list(self._subscriptions):
            subscription.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def effective_status(state: State) -> int:
    """Return a task's progress. An error or warning counts as the progress its payload kept."""
    kept = (state.payload or {}).get(LAST_STATUS)
    if state.status < 0 and isinstance(kept, int) and not isinstance(kept, bool):
        return kept
    return state.status


def _text_of(error: BaseException | str) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (an exception whose str() fails must still be reported)
        return ""


def _rank(state: State) -> tuple[int, int, str]:
    return (state.status, state.task_id, state.tag)


def _error_status(error: BaseException | str) -> int:
    try:
        code = getattr(error, "status_code", None)
    except Exception:  # noqa: BLE001  (a property of the caller's exception; see _text_of)
        code = None
    if isinstance(code, int) and not isinstance(code, bool) and -(2**31) <= int.__int__(code) < 0 and code != WARNING:
        return int.__int__(code)
    return ERROR
