"""`LiveStore`: one job's states, kept by a backend and held in memory by one supervised listener.

    backend.listen ──▶ listener thread ──▶ cache ──▶ get_state, list_*
                                        └─▶ offer to every subscription

One thread per store listens, whatever the number of subscribers; a store that only writes has none. It connects, *then*
lists, then applies changes; at every reconnect it does the same again, so what happened in between is never missed, and
versions keep it from being told twice. While the listener is not connected the cache is stale: reads then go to the
backend, or fail; they never answer from a cache that nobody keeps.

A store belongs to the incarnation of the job it was opened for. Every write carries it, and every listing is compared
with it: once the job is another one, or none, every subscription ends with `JobGone` and so does every call. A store that
was put back to an earlier moment is recognised by what the reader heard last (the backend's `Mark`) and by the versions
of its keys: the subscriptions end with `WentBack`, and everything known is replaced by what the store has.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from uuid import uuid4
from weakref import WeakSet

from headway.errors import HeadwayError, InvalidInput, StorageError, Unavailable
from headway.lifecycle import ForkGuard
from headway.retry import LISTENER, RetryPolicy, call
from headway.states.state import Key, State, checked, checked_id, checked_task, replay_order
from headway.states.store import (
    Backend,
    Change,
    JobGone,
    JobRecord,
    Listener,
    Mark,
    Relist,
    Snapshot,
    WentBack,
    job_gone,
)
from headway.states.subscription import DEPTH, Overflow, Subscription
from headway.telemetry import Field, Log, metrics

log = Log("states")

#: A listener that has said nothing for so long is taken for dead, whatever its socket says.
SILENCE_SECONDS = 10.0


class LiveStore:
    """See `headway.states.store.Store`. Made by `open_store`; one per job and process, shared by all its managers."""

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
        self._writer = uuid4().hex[:12]  # by which the backend tells our writes from other processes'
        self._guard = ForkGuard(f"The store of the job {record.job_id!r}")
        self._stop = threading.Event()
        self._slots = nullcontext() if max_concurrency is None else threading.BoundedSemaphore(max_concurrency)
        self._starting = threading.Lock()
        # One listing at a time: an older one must not be applied after a newer one.
        self._listing = threading.Lock()
        # Guards everything below; held for memory's work only, never while waiting for the backend.
        self._lock = threading.Lock()
        self._cache: dict[Key, State] = {}
        self._mark: Mark = None  # how far we have heard
        self._heard: dict[Key, int] = {}  # the last version the listener told, to notice gaps
        self._touched: set[Key] = set()  # written or heard of since the last listing began
        self._written: dict[Key, int] = {}  # the last version we wrote, to notice another writer
        self._under_way: dict[Key, tuple[int, float]] = {}  # our last write, until the listener tells it
        self._key_locks: dict[Key, threading.Lock] = {}
        # Weak: a subscription that its reader dropped is closed by that. What waited in it is counted at the next tick.
        self._subscriptions: WeakSet[Subscription] = WeakSet()
        self._abandoned: deque[int] = deque()
        self._listener: Listener | None = None
        self._fresh_until = 0.0
        self._gave_up: HeadwayError | None = None
        self._gone: JobGone | None = None
        self._tombstone = record.deleted
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
        """Whether the cache is being kept up to date right now."""
        return self._clock() < self._fresh_until

    @property
    def subscribers(self) -> int:
        """How many subscriptions there are."""
        with self._lock:
            return sum(not subscription.closed for subscription in self._subscriptions)

    @property
    def patience(self) -> RetryPolicy:
        """How a call that finds the store away is tried again."""
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
            # Two writers of one key take turns here, so that neither loses time to a conflict in the backend.
            with self._lock_of(state.key), self._slots:
                stored = call(
                    lambda: self._backend.write(state, self._record, self._writer),
                    self._backend.write_policy,
                    retry_on=Unavailable,
                    stop=self._stop,
                    on_retry=lambda attempt, wait, error: log.warning(
                        "🟡 the state is written again",
                        attempt=attempt,
                        seconds=wait,
                        error=str(error),
                        **facts,
                    ),
                )
        except (Unavailable, StorageError) as error:
            metrics.count("headway_states_writes", store=self._backend.kind, result="error")
            log.error("🔴 failed to write state", error=str(error), **facts)  # noqa: TRY400  (it is raised, whole)
            raise type(error)(f"🔴 The state could not be written: {error}", hint=error.hint) from error
        except JobGone as gone:
            self._lose(gone)
            raise
        if (stored.status, stored.message, stored.payload) != (state.status, state.message, state.payload):
            log.warning("🟡 nothing was written: another state was stored under this event id", **facts)
        self._remember(stored)
        metrics.observe("headway_states_write_seconds", self._clock() - began, store=self._backend.kind)
        metrics.count("headway_states_writes", store=self._backend.kind, result="ok")
        log.debug("state written", version=stored.version, **facts)
        return stored

    def _lock_of(self, key: Key) -> threading.Lock:
        with self._lock:
            return self._key_locks.setdefault(key, threading.Lock())

    def _remember(self, stored: State) -> None:
        """Show our own write to our own readers at once; subscribers hear it from the listener, in its order."""
        with self._lock:
            self._touched.add(stored.key)
            before = self._written.get(stored.key)
            self._written[stored.key] = max(stored.version, before or 0)
            if stored.version > self._version(stored.key):
                self._cache[stored.key] = stored
            if stored.version > self._heard.get(stored.key, 0):
                self._under_way[stored.key] = (stored.version, self._clock())
            elif before is None or stored.version > before:  # the listener was quicker than the answer to the write
                metrics.observe("headway_states_live_seconds", 0.0, store=self._backend.kind)
        if before is not None and stored.version > before + 1:
            log.warning(
                "🟡 somebody else writes the states of this task too",
                jobID=stored.job_id, taskID=stored.task_id, tag=stored.tag, version=stored.version,
            )  # fmt: skip

    def _version(self, key: Key) -> int:
        cached = self._cache.get(key)
        return 0 if cached is None else cached.version

    # ---- reading ---------------------------------------------------------------------

    def get_state(self, task_id: int, tag: str) -> State:
        task_id = checked_task(task_id, self.num_tasks)
        if type(tag) is not str:
            tag = checked_id(tag, "a tag")
        self._refresh_if_stale()
        state = self._cache.get((task_id, tag))  # one step of the interpreter: no lock needed
        return State(self.job_id, task_id, tag) if state is None else state

    def list_states_for_tag(self, tag: str) -> list[State]:
        return [state for state in self.list_all_states() if state.tag == tag]

    def list_all_states(self) -> list[State]:
        self._refresh_if_stale()
        with self._lock:
            return list(self._cache.values())

    def history(self, task_id: int, tag: str) -> list[State]:
        """Every version of one key, oldest first. Only for a job made with ``history=True``."""
        self._usable()
        task_id, tag = checked_task(task_id, self.num_tasks), checked_id(tag, "a tag")
        if not self._record.history:
            raise InvalidInput(
                f"The job {self.job_id!r} keeps no history.",
                hint="It is decided when the job is made: history=True.",
            )
        return self._backend.read_history(self.job_id, task_id, tag)

    def _refresh_if_stale(self) -> None:
        self._usable()
        if self._thread is None:
            self._ensure_listening()
        if self.fresh:
            metrics.count("headway_states_reads", result="hit")
            return
        metrics.count("headway_states_reads", result="miss")
        with self._listing:
            if not self.fresh:
                self._list(lambda since: self._backend.read_all(self._record, since))

    def _usable(self) -> None:
        self._guard.check()
        if self._stop.is_set():
            raise HeadwayError(f"The store of the job {self.job_id!r} was closed.")
        if self._gone is not None:
            raise JobGone(str(self._gone))

    # ---- subscribing ---------------------------------------------------------------------

    def subscribe(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "latest",
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
            on_close=self._unsubscribe,
            abandoned=self._abandoned,
            clock=self._clock,
        )
        with self._lock:  # no change can come between what is current and what happens
            subscription.start(self._cache.values())
            if self._gone is not None:
                subscription.end(self._gone)
            elif self._tombstone:
                subscription.end(job_gone(self.job_id, marked=True))
            else:
                self._subscriptions.add(subscription)
        return subscription

    def _unsubscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions.discard(subscription)

    def _end_subscriptions(self, why: HeadwayError | None) -> None:
        """What waits in them can still be read; then they say why. The caller holds no lock."""
        with self._lock:
            ending = list(self._subscriptions)
            self._subscriptions.clear()
        for subscription in ending:
            subscription.end(why)

    # ---- the job ---------------------------------------------------------------------

    def mark_job_deleted(self) -> None:
        """Leave a tombstone: nothing more is written, and `purge` may remove the job."""
        self._usable()
        self._backend.mark_deleted(self.job_id, self._record.incarnation)

    def delete_job(self) -> None:
        """Remove the job and all its states."""
        self._usable()
        self._backend.delete(self.job_id, self._record.incarnation)
        self._lose(job_gone(self.job_id))

    def close(self) -> None:
        if self._guard.crossed or self._stop.is_set():
            return
        self._stop.set()
        self._await_listener()
        self._end_subscriptions(None)
        self._backend.close()

    def _await_listener(self) -> None:
        thread = self._thread
        deadline = self._clock() + SILENCE_SECONDS
        while thread is not None and thread.is_alive() and self._clock() < deadline:
            if (listener := self._listener) is not None:
                listener.wake()  # again and again: it may have been about to wait when it was woken
            thread.join(0.02)

    # ---- the listener ---------------------------------------------------------------------

    def _ensure_listening(self, *, again: bool = False) -> None:
        """Begin to listen, or begin ``again`` after having given up.

        It connects and lists in the caller's thread, so that whoever reads next finds everything; then it supervises.
        """
        with self._starting:
            if self._thread is None or (again and self._gave_up is not None):
                self._usable()
                self._listener = self._connect()
                self._gave_up = None
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
                break  # the subscriptions were told
            except Exception as error:  # noqa: BLE001  (a listener that died silently would leave a lying cache)
                self._disconnect()
                if self._stop.is_set():
                    break
                failures += 1
                metrics.count("headway_states_listener_reconnects", store=self._backend.kind)
                if self._retry.exhausted(failures):
                    self._give_up(error, failures)
                    break
                wait = self._retry.delay(failures)
                log.warning(
                    "🟡 the listener lost its store and will connect again",
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
            self._apply(changes)
            self._mark = listener.mark
        self._fresh_until = self._clock() + SILENCE_SECONDS
        while self._abandoned:
            if waited := self._abandoned.popleft():
                metrics.count("headway_states_dropped", waited)

    def _list(self, read: Callable[[Mark], Snapshot]) -> None:
        with self._lock:
            self._touched.clear()
        try:
            snapshot = read(self._mark)
            if snapshot.incarnation != self._record.incarnation:
                raise job_gone(self.job_id, remade=bool(snapshot.incarnation))
        except JobGone as gone:
            self._lose(gone)
            raise
        self._reconcile(snapshot)

    def _lose(self, gone: JobGone) -> None:
        """The job is not there any more: say so to everybody who waits for it, and answer nothing from memory."""
        with self._lock:
            first, self._gone = self._gone is None, self._gone or gone
            self._fresh_until = 0.0
            self._clear()
            self._touched.clear()
        if first:
            log.critical("🔴 the job is gone; its subscriptions end", jobID=self.job_id, error=str(gone))
            self._end_subscriptions(gone)

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
        self._gave_up = why
        log.critical("🔴 the listener gave up", jobID=self.job_id, attempt=failures, error=str(error))
        self._end_subscriptions(why)

    # ---- what was heard ---------------------------------------------------------------------

    def _apply(self, changes: Iterable[Change]) -> None:
        with self._lock:
            for change in changes:
                self._touched.add(change.key)
                if change.state is None:
                    self._forget(change.key)
                else:
                    self._hear(change.state)

    def _hear(self, state: State) -> None:
        heard = self._heard.get(state.key, 0)
        if state.version > heard:
            self._heard[state.key] = state.version
            if heard and state.version > heard + 1:
                metrics.count("headway_states_version_gaps", state.version - heard - 1, store=self._backend.kind)
        if state.version > self._version(state.key):
            self._cache[state.key] = state
        written, when = self._under_way.get(state.key, (0, 0.0))
        if written and state.version >= written:
            del self._under_way[state.key]
            if state.version == written:
                metrics.observe("headway_states_live_seconds", self._clock() - when, store=self._backend.kind)
        for subscription in self._subscriptions:
            subscription.offer(state)

    def _forget(self, key: Key) -> None:
        self._cache.pop(key, None)
        self._heard.pop(key, None)
        self._written.pop(key, None)
        self._under_way.pop(key, None)
        for subscription in self._subscriptions:
            subscription.forget(key)

    def _clear(self) -> None:
        for known in (self._cache, self._heard, self._written, self._under_way):
            known.clear()

    def _reconcile(self, snapshot: Snapshot) -> None:
        """Make the cache what the store says, keeping of each key the highest version, and tell what is new."""
        why: HeadwayError | None = None
        with self._lock:
            if not snapshot.continuous or self._contradicted_by(snapshot):
                why = WentBack(f"🔴 The store of the job {self.job_id!r} was put back to an earlier moment.")
                self._clear()
                self._touched.clear()
            elif snapshot.deleted:
                why = job_gone(self.job_id, marked=True)
            self._tombstone = snapshot.deleted
            ending = list(self._subscriptions) if why is not None else []
            if isinstance(why, WentBack):
                self._subscriptions.clear()  # they must not be offered what follows as if it came after what they heard
            for key in snapshot.recreated:
                self._forget(key)
            # What came after the listing began is newer than the listing, whether it was made or removed.
            current = {state.key for state in snapshot.states} | self._touched
            for key in [key for key in self._cache if key not in current]:
                self._forget(key)
            for state in sorted(snapshot.states, key=replay_order):
                if state.key in self._cache or state.key not in self._touched:
                    self._hear(state)
            self._mark = snapshot.mark
        if isinstance(why, WentBack):
            log.critical("🔴 the store went back in time; its subscriptions end", jobID=self.job_id)
        for subscription in ending:
            subscription.end(why)

    def _contradicted_by(self, snapshot: Snapshot) -> bool:
        """Whether the store has less of a key, or another event, than it had. A key that was written or heard of since
        the listing began does not count: the listing may be older."""
        for state in snapshot.states:
            known = self._cache.get(state.key)
            if known is None or state.key in self._touched or state.key in snapshot.recreated:
                continue
            if (state.version, state.event_id) != (known.version, known.event_id) and state.version <= known.version:
                return True
        return False
