"""`LiveStore`: one job's states, stored in a backend and cached by one supervised listener.

    backend.listen ──▶ listener thread ──▶ cache ──▶ get_state, list_*
                                        └─▶ offer to every subscription

One thread per store listens, however many subscribers there are. A store that only writes has none. The listener
connects, *then* lists, then applies changes. Every reconnect repeats this, so no change is missed; versions prevent
duplicates. While the listener is disconnected the cache is stale. Reads then go to the backend or fail.

A store belongs to one incarnation of its job. Every write carries the incarnation and every listing is compared with
it. If the job was deleted or re-created, every subscription and every call ends with `JobGone`.

A signal handler may raise anywhere in the main thread. Locks are therefore taken by ``with``, whose acquisition is
atomic. Work that must not stop halfway (a listing, ending the subscriptions) runs `undisturbed`.
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
from headway.states.cache import Cache
from headway.states.state import Key, State, checked, checked_id, checked_task
from headway.states.store.contract import Backend, JobGone, JobRecord, Listener, Mark, Relist, Snapshot, job_gone
from headway.states.subscription import DEPTH, Overflow, Subscription, called_from_within
from headway.telemetry import Field, Log, metrics

log = Log("states")

#: Default limit of `history`: more than a key can have versions.
HISTORY_LIMIT = 2**31 - 1
#: A listener that is silent for this long counts as dead, whatever its socket reports.
SILENCE_SECONDS = 10.0


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
            raise InvalidInput(f"max_concurrency={max_concurrency} would let nothing through.")
        self._backend = backend
        self._record = record
        self._retry = retry
        self._clock = clock
        self._writer = uuid4().hex[:12]  # identifies this process's writes to the backend
        self._guard = ForkGuard(f"The store of the job {record.job_id!r}")
        self._stop = Flag()
        self._closed = False
        self._slots = Slots(max_concurrency)
        self._starting = threading.Lock()
        # Serializes listings: an older one must not be applied after a newer one.
        self._listing = threading.Lock()
        self._key_locks: dict[Key, threading.RLock] = {}
        self._cache = Cache(record.job_id, backend.kind, tombstone=record.deleted, clock=clock)
        self._listener: Listener | None = None
        self._fresh_until = 0.0
        self._gave_up: HeadwayError | None = None
        self._thread: threading.Thread | None = None
        if backend.listens_at_once:
            self._ensure_listening()

    @property
    def job_id(self) -> str:
        return self._record.job_id

    @property
    def num_tasks(self) -> int:
        return self._record.num_tasks

    @property
    def record(self) -> JobRecord:
        return self._record

    @property
    def fresh(self) -> bool:
        """Whether the listener currently keeps the cache up to date."""
        return self._clock() < self._fresh_until

    @property
    def subscribers(self) -> int:
        """Number of open subscriptions."""
        with self._cache.lock:
            return sum(not subscription.closed for subscription in self._cache.subscriptions)

    @property
    def patience(self) -> RetryPolicy:
        """The retry policy for calls while the store is unavailable."""
        return self._backend.write_policy

    # ---- writing ---------------------------------------------------------------------

    def set_state(self, state: State) -> State:
        self._usable()
        state = checked(state, self.num_tasks)
        if state.job_id != self.job_id:
            raise InvalidInput(f"This store keeps the job {self.job_id!r}, not {state.job_id!r}.")
        facts: dict[str, Field] = {
            "jobID": state.job_id,
            "taskID": state.task_id,
            "tag": state.tag,
            "eventID": state.event_id,
        }
        began = self._clock()
        try:
            # Serialize writers of the same key, to avoid conflicts in the backend.
            with self._lock_of(state.key), self._slots.free():
                stored = call(
                    lambda: self._backend.write(state, self._record, self._writer),
                    self._backend.write_policy,
                    retry_on=Unavailable,
                    stop=self._stop,
                    on_retry=lambda attempt, wait, error: log.warning(
                        "the state is written again",
                        attempt=attempt,
                        seconds=wait,
                        error=str(error),
                        **facts,
                    ),
                )
        except (Unavailable, StorageError) as error:
            metrics.count("headway_states_writes", store=self._backend.kind, result="error")
            log.error("failed to write state", error=str(error), **facts)  # noqa: TRY400  (raised below with its cause)
            raise type(error)(f"🔴 The state could not be written: {error}", hint=error.hint) from error
        except JobGone as gone:
            self._lose(gone)
            raise
        if (stored.status, stored.message, stored.payload) != (state.status, state.message, state.payload):
            log.warning("nothing was written: another state was stored under this event id", **facts)
        self._cache.remember(stored)
        metrics.observe("headway_states_write_seconds", self._clock() - began, store=self._backend.kind)
        metrics.count("headway_states_writes", store=self._backend.kind, result="ok")
        log.debug("state written", version=stored.version, **facts)
        return stored

    def _lock_of(self, key: Key) -> threading.RLock:
        lock = self._key_locks.setdefault(key, threading.RLock())  # atomic: all threads get the same lock
        refuse_within(lock, f"The state {key[1]!r} of task {key[0]}")
        return lock

    # ---- reading ---------------------------------------------------------------------

    def get_state(self, task_id: int, tag: str) -> State:
        task_id = checked_task(task_id, self.num_tasks)
        if type(tag) is not str:
            tag = checked_id(tag, "a tag")
        self._refresh_if_stale()
        state = self._cache.states.get((task_id, tag))
        return State(self.job_id, task_id, checked_id(tag, "a tag")) if state is None else state

    def list_states_for_tag(self, tag: str) -> list[State]:
        return [state for state in self.list_all_states() if state.tag == tag]

    def list_all_states(self) -> list[State]:
        self._refresh_if_stale()
        return self._cache.current()

    def history(self, task_id: int, tag: str, *, after: int = 0, limit: int | None = None) -> list[State]:
        """Return every version of one key, oldest first. Requires a job created with ``history=True``.

        ``after`` and ``limit`` select one page: up to ``limit`` versions above ``after``.
        """
        self._usable()
        if limit is not None and limit < 1:
            raise InvalidInput(f"limit must be at least 1 (got {limit}).")
        task_id, tag = checked_task(task_id, self.num_tasks), checked_id(tag, "a tag")
        if not self._record.history:
            raise InvalidInput(
                f"The job {self.job_id!r} keeps no history.",
                hint="It is decided when the job is made: history=True.",
            )
        return self._backend.read_history(
            self.job_id, task_id, tag, after=after, limit=HISTORY_LIMIT if limit is None else limit
        )

    def _refresh_if_stale(self) -> None:
        self._usable()
        if self._thread is None:
            self._ensure_listening()
        # An ``accepts`` callback may read while this thread holds the cache lock. The cache is then up to date, and a
        # listing here would deadlock.
        if self.fresh or self._cache.told_here:
            metrics.count("headway_states_reads", result="hit")
            return
        metrics.count("headway_states_reads", result="miss")
        undisturbed(self._refresh)

    def _refresh(self) -> None:
        with self._listing:
            if not self.fresh:
                self._list(lambda since: self._backend.read_all(self._record, since))

    def _usable(self) -> None:
        self._guard.check()
        if self._stop.is_set():
            raise HeadwayError(f"The store of the job {self.job_id!r} was closed.")
        if (gone := self._cache.gone) is not None:
            raise JobGone(str(gone))

    # ---- subscribing ---------------------------------------------------------------------

    def subscribe(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "all",
        timeout: float | None = None,
    ) -> Subscription:
        self._usable()
        self._ensure_listening(again=True)
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
        self._usable()
        self._backend.mark_deleted(self.job_id, self._record.incarnation)

    def delete_job(self) -> None:
        """Delete the job and all its states."""
        self._usable()
        self._backend.delete(self.job_id, self._record.incarnation)
        self._lose(job_gone(self.job_id))

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
        self._await_listener()
        with self._starting:  # wait for a listener that is just starting
            if self._closed:
                return
            self._cache.end(None)
            self._backend.close()
            self._closed = True

    def _await_listener(self) -> None:
        thread = self._thread
        deadline = self._clock() + SILENCE_SECONDS
        while thread is not None and thread.is_alive() and self._clock() < deadline:
            if (listener := self._listener) is not None:
                listener.wake()  # repeatedly: it may not have been waiting yet
            thread.join(0.02)

    # ---- the listener ---------------------------------------------------------------------

    def _ensure_listening(self, *, again: bool = False) -> None:
        """Start listening, or with ``again`` restart after the listener gave up.

        It connects and lists in the caller's thread, so that the next read finds all states. Then the thread takes over.
        """
        if self._thread is None or (again and self._gave_up is not None):
            undisturbed(self._begin_listening)

    def _begin_listening(self) -> None:
        with self._starting:
            if self._thread is None or self._gave_up is not None:
                self._usable()
                self._listener = self._connect()
                self._gave_up = None
                self._cache.begin()
                self._thread = threading.Thread(target=self._run, name=f"headway-states-{self.job_id}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                if self._listener is None:
                    self._listener = self._connect()
                    log.info("listening again", jobID=self.job_id, attempt=failures)
                self._tick(self._listener)
                failures = 0
            except JobGone:
                break  # the subscriptions have ended already
            except Exception as error:  # noqa: BLE001  (a listener that died silently would leave a stale cache)
                self._disconnect()
                if self._stop.is_set():
                    break
                failures += 1
                metrics.count("headway_states_listener_reconnects", store=self._backend.kind)
                if self._retry.exhausted(failures):
                    self._give_up(error, failures)
                    return  # a new subscriber may have started another listener: do not close that one
                wait = self._retry.delay(failures)
                log.warning(
                    "the listener lost its store and will connect again",
                    jobID=self.job_id, attempt=failures, seconds=round(wait, 3), error=str(error),
                )  # fmt: skip
                self._stop.wait(wait)
        self._disconnect()

    def _connect(self) -> Listener:
        try:
            listener = self._backend.listen(self._record)
        except JobGone as gone:
            self._lose(gone)
            raise
        try:
            with self._listing:
                self._list(listener.snapshot)
        except BaseException:
            listener.close()
            raise
        self._fresh_until = self._clock() + SILENCE_SECONDS
        return listener

    def _tick(self, listener: Listener) -> None:
        try:
            changes = listener.changes()
        except Relist:
            with self._listing:
                self._list(listener.snapshot)
        except JobGone as gone:
            self._lose(gone)
            raise
        else:
            self._cache.apply(changes)
            self._cache.mark = listener.mark
        self._fresh_until = self._clock() + SILENCE_SECONDS
        self._cache.count_abandoned()

    def _list(self, read: Callable[[Mark], Snapshot]) -> None:
        self._cache.begin_listing()
        try:
            snapshot = read(self._cache.mark)
            if snapshot.incarnation != self._record.incarnation:
                raise job_gone(self.job_id, remade=bool(snapshot.incarnation))
        except JobGone as gone:
            self._lose(gone)
            raise
        self._cache.reconcile(snapshot)

    def _lose(self, gone: JobGone) -> None:
        self._fresh_until = 0.0
        undisturbed(lambda: self._cache.lose(gone))

    def _disconnect(self) -> None:
        self._fresh_until = 0.0
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _give_up(self, error: Exception, failures: int) -> None:
        why = Unavailable(
            f"🔴 The store of the job {self.job_id!r} cannot be listened to any more: {error}",
            hint="Subscribe again when it can be reached; reads go to it directly until then.",
        )

        def say() -> None:
            self._gave_up = why  # from here on a new subscriber starts another listener
            log.critical("the listener gave up", jobID=self.job_id, attempt=failures, error=str(error))

        self._cache.end(why, say)


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
