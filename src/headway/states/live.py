"""`LiveStore`: one job's states, stored in a backend and cached by one supervised listener.

    backend.listen ──▶ listener thread ──▶ cache ──▶ get_state, list_*
                                        └─▶ offer to every subscription

One thread per store listens, however many subscribers there are. A store that only writes has none.

A store belongs to one incarnation of its job. Every write carries the incarnation and every listing is compared with
it. If the job was deleted or re-created, every subscription and every call ends with `JobGone`.

A signal handler may raise anywhere in the main thread. Locks are therefore taken by ``with``, whose acquisition is
atomic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from uuid import uuid4

from headway.core.lifecycle import Flag, ForkGuard, refuse_within, undisturbed
from headway.core.retry import LISTENER, RetryPolicy, call
from headway.errors import HeadwayError, InvalidInput, StorageError, Unavailable
from headway.states.buffer import Overflow
from headway.states.cache import Cache
from headway.states.listening import ListenerSupervisor
from headway.states.state import Key, State, checked, checked_id, checked_task
from headway.states.store.contract import Backend, JobGone, JobRecord, job_gone
from headway.states.subscription import DEPTH, Subscription, called_from_within
from headway.telemetry import Field, Log, metrics

log = Log("states")

#: Default limit of `history`: more than a key can have versions.
HISTORY_LIMIT = 2**31 - 1


class LiveStore:
    """Implements `headway.states.store.contract.Store`. Created by `open_store`: one per job and process."""

    def __init__(
        self,
        backend: Backend,
        record: JobRecord,
        *,
        retry: RetryPolicy = LISTENER,
        max_concurrency: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise InvalidInput(f"max_concurrency must be at least 1 (got {max_concurrency}).")
        self._backend = backend
        self._record = record
        self._clock = clock
        self._writer = uuid4().hex[:12]  # identifies this process's writes to the backend
        self._guard = ForkGuard(f"The store of the job {record.job_id!r}")
        self._stop = Flag()
        self._closed = False
        self._slots = Slots(max_concurrency)
        self._key_locks: dict[Key, threading.RLock] = {}
        self._cache = Cache(record.job_id, backend.kind, tombstone=record.deleted, clock=clock)
        self._supervisor = ListenerSupervisor(
            backend, record, self._cache, retry=retry, stop=self._stop, clock=clock, usable=self._check_usable
        )
        if backend.listens_at_once:
            self._supervisor.start()

    @property
    def job_id(self) -> str:
        """The job whose states the store keeps."""
        return self._record.job_id

    @property
    def num_tasks(self) -> int:
        """The job's number of tasks, as decided when the job was made."""
        return self._record.num_tasks

    @property
    def record(self) -> JobRecord:
        """The job as it was when the store was opened."""
        return self._record

    @property
    def fresh(self) -> bool:
        """Whether the listener currently keeps the cache up to date."""
        return self._supervisor.fresh

    @property
    def subscribers(self) -> int:
        """The number of open subscriptions."""
        with self._cache.lock:
            return sum(not subscription.closed for subscription in self._cache.subscriptions)

    @property
    def patience(self) -> RetryPolicy:
        """The retry policy for calls while the store is unavailable."""
        return self._backend.write_policy

    def _check_usable(self) -> None:
        self._guard.check()
        if self._stop.is_set():
            raise HeadwayError(f"The store of the job {self.job_id!r} was closed.")
        if (gone := self._cache.gone) is not None:
            raise JobGone(str(gone))

    # ---- writing ---------------------------------------------------------------------

    def set_state(self, state: State) -> State:
        """Write a state and return it with the store's version and time."""
        self._check_usable()
        state = checked(state, self.num_tasks)
        if state.job_id != self.job_id:
            raise InvalidInput(f"This store belongs to the job {self.job_id!r}, not {state.job_id!r}.")
        facts: dict[str, Field] = {
            "jobID": state.job_id, "taskID": state.task_id, "tag": state.tag, "eventID": state.event_id,
        }  # fmt: skip
        began = self._clock()
        try:
            stored = self._write(state, facts)
        except (Unavailable, StorageError) as error:
            metrics.count("headway_states_writes", store=self._backend.kind, result="error")
            log.error("failed to write state", error=str(error), **facts)  # noqa: TRY400  (raised below with its cause)
            raise type(error)(f"🔴 The state could not be written: {error}", hint=error.hint) from error
        except JobGone as gone:
            self._supervisor.lose(gone)
            raise
        if (stored.status, stored.message, stored.payload) != (state.status, state.message, state.payload):
            log.warning("nothing was written: another state was stored under this event id", **facts)
        self._cache.remember(stored)
        metrics.observe("headway_states_write_seconds", self._clock() - began, store=self._backend.kind)
        metrics.count("headway_states_writes", store=self._backend.kind, result="ok")
        log.debug("state written", version=stored.version, **facts)
        return stored

    def _write(self, state: State, facts: dict[str, Field]) -> State:
        lock = self._key_locks.setdefault(state.key, threading.RLock())  # atomic: all threads get the same lock
        refuse_within(lock, f"The state {state.tag!r} of task {state.task_id}")
        with lock, self._slots.free():  # one writer per key at a time, to avoid conflicts in the backend
            return call(
                lambda: self._backend.write(state, self._record, self._writer),
                self._backend.write_policy,
                retry_on=Unavailable,
                stop=self._stop,
                on_retry=lambda attempt, wait, error: log.warning(
                    "the write of a state is retried", attempt=attempt, seconds=wait, error=str(error), **facts
                ),
            )

    # ---- reading ---------------------------------------------------------------------

    def get_state(self, task_id: int, tag: str) -> State:
        """Return the state of one key. If it was never reported, its status and version are 0."""
        task_id = checked_task(task_id, self.num_tasks)
        if type(tag) is not str:
            tag = checked_id(tag, "a tag")
        self._refresh_if_stale()
        state = self._cache.states.get((task_id, tag))
        return State(self.job_id, task_id, checked_id(tag, "a tag")) if state is None else state

    def list_states_for_tag(self, tag: str) -> list[State]:
        """Return the reported states of a tag."""
        return [state for state in self.list_all_states() if state.tag == tag]

    def list_all_states(self) -> list[State]:
        """Return every reported state of the job."""
        self._refresh_if_stale()
        return self._cache.current()

    def history(self, task_id: int, tag: str, *, after: int = 0, limit: int | None = None) -> list[State]:
        """Return every version of one key, oldest first. Requires a job created with ``history=True``.

        ``after`` and ``limit`` select one page: up to ``limit`` versions above ``after``.
        """
        self._check_usable()
        if limit is not None and limit < 1:
            raise InvalidInput(f"limit must be at least 1 (got {limit}).")
        task_id, tag = checked_task(task_id, self.num_tasks), checked_id(tag, "a tag")
        if not self._record.history:
            raise InvalidInput(
                f"The job {self.job_id!r} has no history.",
                hint="Only a job that was created with history=True has one.",
            )
        return self._backend.read_history(
            self.job_id, task_id, tag, after=after, limit=HISTORY_LIMIT if limit is None else limit
        )

    def _refresh_if_stale(self) -> None:
        self._check_usable()
        # An ``accepts`` callback may read while this thread holds the cache lock. The cache is then up to date, and a
        # listing here would deadlock.
        if self._supervisor.fresh or self._supervisor.start() or self._cache.locked_here:
            metrics.count("headway_states_reads", result="hit")
        else:
            metrics.count("headway_states_reads", result="miss")
            self._supervisor.refresh()

    # ---- subscribing ---------------------------------------------------------------------

    def subscribe(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "all",
        timeout: float | None = None,
    ) -> Subscription:
        """Subscribe to the states of the job: replay, sentinel, then changes."""
        self._check_usable()
        self._supervisor.start(again=True)
        self._refresh_if_stale()
        subscription = Subscription(
            accepts=accepts,
            depth=depth,
            overflow=overflow,
            timeout=timeout,
            on_close=self._cache.unsubscribe,
            abandoned=self._cache.abandoned,
            clock=self._clock,
        )
        self._cache.subscribe(subscription)
        return subscription

    # ---- the job ---------------------------------------------------------------------

    def mark_job_deleted(self) -> None:
        """Mark the job as deleted. It then rejects writes, and `purge` may remove it."""
        self._check_usable()
        self._backend.mark_deleted(self.job_id, self._record.incarnation)

    def delete_job(self) -> None:
        """Delete the job and all its states."""
        self._check_usable()
        self._backend.delete(self.job_id, self._record.incarnation)
        self._supervisor.lose(job_gone(self.job_id))

    def close(self) -> None:
        """Stop the listener, end all subscriptions and close the backend. May be repeated after an interruption.

        Called from a signal handler or an ``accepts`` callback, it does not wait. The store then rejects calls at once,
        and a thread finishes closing when the interrupted call has returned.
        """
        if self._guard.crossed or self._closed:
            return
        self._stop.set()
        if called_from_within():  # the interrupted call holds locks until we return
            threading.Thread(target=self._close, name=f"headway-states-close-{self.job_id}", daemon=True).start()
            return
        undisturbed(self._close)

    def _close(self) -> None:
        self._supervisor.stop(self._finish_close)

    def _finish_close(self) -> None:
        if self._closed:
            return
        self._cache.end(None)
        self._backend.close()
        self._closed = True


class Slots:
    """Limits concurrency to ``number``; None means unlimited.

    Locks instead of a semaphore: Python's is not atomic, and a signal handler that raises inside it would leak a slot.
    """

    def __init__(self, number: int | None) -> None:
        self._locks = [threading.Lock() for _ in range(number or 0)]
        self._turns = count()

    def free(self) -> AbstractContextManager[object]:
        """Return a free slot, or the next one in turn if all are in use."""
        if not self._locks:
            return nullcontext()
        turn = next(self._turns) % len(self._locks)
        return next((lock for lock in self._locks if not lock.locked()), self._locks[turn])
