"""`Barrier`: which tasks have not yet reached a status, for `Manager.wait_for`."""

from __future__ import annotations

from headway.errors import HeadwayError
from headway.states.state import State, status_class

#: Payload field in which an error or warning keeps the progress it replaced.
LAST_STATUS = "last_status"


class TaskFailed(HeadwayError):
    """Raised by `Manager.wait_for` when a task reported an error."""

    exit_code = 3
    hint = "See the error: headway states JOB. To wait for a retry, use ignore_errors."


class WaitTimeout(HeadwayError, TimeoutError):
    """Raised by `Manager.wait_for` on timeout."""


def effective_status(state: State) -> int:
    """Return a task's progress. An error or warning counts as the progress its payload kept."""
    kept = (state.payload or {}).get(LAST_STATUS)
    if state.status < 0 and isinstance(kept, int) and not isinstance(kept, bool):
        return kept
    return state.status


class Barrier:
    """The tasks of a job that are behind ``status`` with ``tag``. Done when none is."""

    def __init__(self, job_id: str, num_tasks: int, tag: str, status: int, *, ignore_errors: bool) -> None:
        self._job_id = job_id
        self._num_tasks = num_tasks
        self._tag = tag
        self._status = status
        self._ignore_errors = ignore_errors
        self._behind = set(range(num_tasks))

    @property
    def done(self) -> bool:
        """Whether every task has reached the status."""
        return not self._behind

    def reset(self) -> None:
        """Start over: every task is behind."""
        self._behind = set(range(self._num_tasks))

    def update(self, state: State) -> None:
        """Apply a task's state. Raises `TaskFailed` for an error, unless errors are ignored."""
        if not self._ignore_errors and status_class(state.status) == "error":
            raise TaskFailed(f"Task {state.task_id} reported an error for {state.tag!r}: {state.message}")
        if effective_status(state) >= self._status:
            self._behind.discard(state.task_id)
        else:
            self._behind.add(state.task_id)  # the task may have restarted

    def timed_out(self, timeout: float | None) -> WaitTimeout:
        """Return the error for a wait of ``timeout`` seconds. It names up to ten tasks that are behind."""
        shown = ", ".join(map(str, sorted(self._behind)[:10])) + (", ..." if len(self._behind) > 10 else "")
        return WaitTimeout(
            f"After {timeout:g} s {len(self._behind)} of {self._num_tasks} tasks have not reached {self._tag!r}: {shown}.",
            hint=f"See their states: headway states {self._job_id} --tag {self._tag}",
        )
