"""The states of one job for all pages that show it, from a single subscription.

It uses `Manager.subscribe`, so it works with every store. The subscription first replays the current states and then
yields changes. It ends when the store was restored to an earlier point or the job was recreated; then a new one starts.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from headway.views.shape import Json, plain
from headway.views.states import masked_state, state_view

if TYPE_CHECKING:
    from headway.states import Manager
    from headway.states.subscription import Subscription

#: Maximum states sent per job: the most recently changed ones.
MOST: Final = 2000


def check_job(store: str, job: str) -> None:
    """Raise `NotFound` if the store has no states of the job."""
    from headway.states.state import checked_id
    from headway.states.store import open_backend
    from headway.states.store.contract import no_such_job

    with closing(open_backend(store, create=False)) as backend:
        if backend.find(checked_id(job, "a job id")) is None:
            raise no_such_job(job)


class Monitor:
    """Reads the current states of a job. Not thread-safe: call and `close` it from one thread at a time."""

    def __init__(self, store: str, job: str) -> None:
        self._store, self._job = store, job
        self._manager: Manager | None = None
        self._subscription: Subscription | None = None
        self._states: dict[str, Json] = {}

    def __call__(self) -> dict[str, Json]:
        """Return the current states by ``JOB/TASK/TAG``. After an error the next call subscribes again."""
        try:
            return self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Json]:
        subscription = self._subscription or self._open()
        for _ in range(10 * MOST):  # the next call reads the rest
            try:
                event = subscription.get(timeout=0)
            except TimeoutError:
                break
            if event.state is not None:
                view = plain(masked_state(state_view(event.state)))
                del view["payload"]  # may be large, and no page shows it
                key = f"{self._job}/{event.state.task_id}/{event.state.tag}"
                self._states.pop(key, None)  # reinserted at the end: ordered by last change
                self._states[key] = view
        while len(self._states) > MOST:
            del self._states[next(iter(self._states))]
        return dict(self._states)

    def _open(self) -> Subscription:
        from headway.states import Manager, open_store

        store, num_tasks = open_store(self._store, self._job)
        self._manager = Manager(self._job, 0, num_tasks, store)
        self._subscription = self._manager.subscribe()
        return self._subscription

    def close(self) -> None:
        """End the subscription and close the store."""
        manager, self._manager, self._subscription = self._manager, None, None
        self._states = {}
        if manager is not None:
            manager.close()
