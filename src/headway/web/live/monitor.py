"""The states of a job as a page shows them: followed by one subscription, however many pages show them.

It is the library's own way to follow states (`Manager.subscribe`), so it is the same for every store: what stands is said
first, then what changes, and a store that went back or a job that was made again ends the subscription, and a new one begins.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from headway.views.shape import Json, plain
from headway.views.states import masked_state, state_view

if TYPE_CHECKING:
    from headway.states import Manager
    from headway.states.subscription import Subscription

#: States of a job that are sent: those that changed last.
MOST: Final = 2000


def check_job(store: str, job: str) -> None:
    """Raise `NotFound` if no states of the job are kept."""
    from headway.states.state import checked_id
    from headway.states.store import open_backend
    from headway.states.store.contract import no_such_job

    with closing(open_backend(store, create=False)) as backend:
        if backend.find(checked_id(job, "a job id")) is None:
            raise no_such_job(job)


class Monitor:
    """Call it once a second, in a thread; `close` it in the same or when no call is under way."""

    def __init__(self, store: str, job: str) -> None:
        self._store, self._job = store, job
        self._manager: Manager | None = None
        self._subscription: Subscription | None = None
        self._states: dict[str, Json] = {}

    def __call__(self) -> dict[str, Json]:
        """What stands now, by ``JOB/TASK/TAG``. It ends within the limits of the store's own calls; after an error the next
        call begins anew."""
        try:
            return self._look()
        except BaseException:
            self.close()
            raise

    def _look(self) -> dict[str, Json]:
        subscription = self._subscription or self._open()
        for _ in range(10 * MOST):  # who writes faster than this is read on in the next call
            try:
                event = subscription.get(timeout=0)
            except TimeoutError:
                break
            if event.state is not None:
                view = plain(masked_state(state_view(event.state)))
                del view["payload"]  # it may be large, and a page shows none
                key = f"{self._job}/{event.state.task_id}/{event.state.tag}"
                self._states.pop(key, None)  # the one that changed last is last
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
        manager, self._manager, self._subscription = self._manager, None, None
        self._states = {}
        if manager is not None:
            manager.close()
