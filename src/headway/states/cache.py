"""`Cache`: the in-memory copy of one job's states, and the subscriptions to its changes.

Three sources update it, in any order: the listener (`apply`), a full listing (`reconcile`) and this process's own
writes (`remember`). The highest version of each key wins. Every change is offered to every subscription, which ignores
versions it has already seen. A key that was touched during a listing is newer than the listing.

The cache detects a store that was restored to an earlier moment. It compares the last change it applied (the backend's
`Mark`) and the versions of the keys. Subscriptions then end with `WentBack`, and the cache reloads from the store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakSet

from headway.core.lifecycle import held_here
from headway.errors import HeadwayError
from headway.states.state import Key, State, replay_order
from headway.states.store.contract import Change, JobGone, Mark, Snapshot, WentBack, job_gone
from headway.states.subscription import Subscription
from headway.telemetry import Log, metrics

log = Log("states")


class DeliveryTracker:
    """Compares the versions that this process wrote with those that its listener delivered.

    It measures the time from a write to its delivery, counts missed versions, and detects a second writer of a key. Not
    thread-safe: the cache's lock serializes all calls.
    """

    def __init__(self, kind: str, clock: Callable[[], float]) -> None:
        self._kind = kind
        self._clock = clock
        self._delivered: dict[Key, int] = {}  # last version per key from the listener
        self._written: dict[Key, int] = {}  # last version per key from our writes
        self._in_flight: dict[Key, tuple[int, float]] = {}  # our last write (version, time), until it is delivered

    def wrote(self, stored: State) -> bool:
        """Record a write of this process. Return whether another process wrote the key since our previous write."""
        before = self._written.get(stored.key)
        self._written[stored.key] = max(stored.version, before or 0)
        if stored.version > self._delivered.get(stored.key, 0):
            self._in_flight[stored.key] = (stored.version, self._clock())
        elif before is None or stored.version > before:  # the listener delivered it before the write returned
            metrics.observe("headway_states_live_seconds", 0.0, store=self._kind)
        return before is not None and stored.version > before + 1

    def delivered(self, state: State) -> None:
        """Record a state from the listener."""
        last = self._delivered.get(state.key, 0)
        if state.version > last:
            self._delivered[state.key] = state.version
            if last and state.version > last + 1:
                metrics.count("headway_states_version_gaps", state.version - last - 1, store=self._kind)
        written, when = self._in_flight.get(state.key, (0, 0.0))
        if written and state.version >= written:
            del self._in_flight[state.key]
            if state.version == written:
                metrics.observe("headway_states_live_seconds", self._clock() - when, store=self._kind)

    def forget(self, key: Key) -> None:
        """Forget a removed key, whose versions start again at 1."""
        for known in (self._delivered, self._written, self._in_flight):
            known.pop(key, None)

    def clear(self) -> None:
        """Forget all keys."""
        for known in (self._delivered, self._written, self._in_flight):
            known.clear()


class Cache:
    """In-memory states of one job. Thread-safe. ``kind`` is the kind of store, as named in metrics."""

    def __init__(self, job_id: str, kind: str, *, tombstone: bool, clock: Callable[[], float]) -> None:
        self._job_id = job_id
        # Guards everything below. Held only for in-memory work, never while waiting for the backend. It is reentrant
        # because a signal handler may close a subscription while this thread holds it.
        self.lock = threading.RLock()
        self.states: dict[Key, State] = {}  # a single lookup is atomic and needs no lock
        self.mark: Mark = None  # position up to which changes have been applied
        self._touched: set[Key] = set()  # keys written or delivered since the last listing began
        self._deliveries = DeliveryTracker(kind, clock)
        # Weak: dropping a subscription closes it. Its unread events are counted at the next tick.
        self.subscriptions: WeakSet[Subscription] = WeakSet()
        self.abandoned: deque[int] = deque()
        self._tombstone = tombstone
        self._gone: JobGone | None = None
        self._stopped = False  # whether the listener has stopped
        self._why: HeadwayError | None = None  # why it has stopped

    @property
    def gone(self) -> JobGone | None:
        """The error to raise from every call once the job is gone, else None."""
        return self._gone

    @property
    def locked_here(self) -> bool:
        """Whether this thread holds the lock, because it is delivering to subscriptions."""
        return held_here(self.lock)

    def current(self) -> list[State]:
        """Return all cached states."""
        with self.lock:
            return list(self.states.values())

    # ---- subscriptions ---------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> None:
        """Start a subscription with the current states and register it, or end it if the job or listener is gone."""
        with self.lock:  # so that no change falls between the replay and the first live event
            subscription.start(self.states.values())
            if self._gone is not None:
                subscription.end(self._gone)
            elif self._tombstone:
                subscription.end(job_gone(self._job_id, marked=True))
            elif self._stopped:  # the listener stopped before this subscription was registered
                subscription.end(self._why)
            else:
                self.subscriptions.add(subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a subscription. Does nothing if it is not registered."""
        with self.lock:
            self.subscriptions.discard(subscription)

    def begin(self) -> None:
        """Mark the cache as kept up to date by a listener."""
        with self.lock:
            self._stopped, self._why = False, None

    def end(self, why: HeadwayError | None, first: Callable[[], object] = lambda: None) -> None:
        """Mark the listener as stopped and end all subscriptions with ``why``.

        Subscribers can still read the events already buffered. The caller must not hold the lock. ``first`` runs before
        the subscriptions end. After it a new listener may `begin`, and subscriptions made since are not ended.
        """
        with self.lock:
            self._stopped, self._why = True, why
            ending = list(self.subscriptions)
            self.subscriptions.clear()
        try:
            first()
        finally:
            for subscription in ending:
                subscription.end(why)

    def lose(self, gone: JobGone) -> None:
        """Record that the job is gone: end all subscriptions and clear the cache."""
        with self.lock:
            first, self._gone = self._gone is None, self._gone or gone
            self._clear()
        if first:
            log.critical("the job is gone; its subscriptions end", jobID=self._job_id, error=str(gone))
            self.end(gone)

    def count_abandoned(self) -> None:
        """Count the unread events of subscriptions that were garbage-collected."""
        while self.abandoned:
            if waited := self.abandoned.popleft():
                metrics.count("headway_states_dropped", waited)

    # ---- own writes ------------------------------------------------------------------------

    def remember(self, stored: State) -> None:
        """Make our own write visible to readers at once. Subscribers receive it from the listener, in order."""
        with self.lock:
            self._touched.add(stored.key)
            if stored.version > self._version(stored.key):
                self.states[stored.key] = stored
            second_writer = self._deliveries.wrote(stored)
        if second_writer:
            log.warning(
                "another process writes the states of this task too",
                jobID=stored.job_id, taskID=stored.task_id, tag=stored.tag, version=stored.version,
            )  # fmt: skip

    def _version(self, key: Key) -> int:
        cached = self.states.get(key)
        return 0 if cached is None else cached.version

    # ---- changes from the listener ----------------------------------------------------------

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes from the listener and offer them to the subscriptions."""
        with self.lock:
            for change in changes:
                self._touched.add(change.key)
                if change.state is None:
                    self._forget(change.key)
                else:
                    self._deliver(change.state)

    def _deliver(self, state: State) -> None:
        self._deliveries.delivered(state)
        if state.version > self._version(state.key):
            self.states[state.key] = state
        for subscription in list(self.subscriptions):  # a copy: an ``accepts`` callback may subscribe
            subscription.offer(state)

    def _forget(self, key: Key) -> None:
        self.states.pop(key, None)
        self._deliveries.forget(key)
        for subscription in list(self.subscriptions):
            subscription.forget(key)

    def _clear(self) -> None:
        self.states.clear()
        self._deliveries.clear()
        self._touched.clear()

    def begin_listing(self) -> None:
        """Start tracking the keys that are touched during a listing."""
        with self.lock:
            self._touched.clear()

    def reconcile(self, snapshot: Snapshot) -> None:
        """Update the cache from a listing and publish the differences. The highest version of each key wins."""
        why: HeadwayError | None = None
        with self.lock:
            if not snapshot.continuous or self._contradicted_by(snapshot):
                why = WentBack(f"🔴 The store of the job {self._job_id!r} was restored to an earlier moment.")
                self._clear()
            elif snapshot.deleted:
                why = job_gone(self._job_id, marked=True)
            self._tombstone = snapshot.deleted
            ending = list(self.subscriptions) if why is not None else []
            if isinstance(why, WentBack):
                self.subscriptions.clear()  # later states do not continue what they have received
            for key in snapshot.recreated:
                self._forget(key)
            # A key touched since the listing began is newer than the listing, whether it was written or removed.
            current = {state.key for state in snapshot.states} | self._touched
            for key in [key for key in self.states if key not in current]:
                self._forget(key)
            known = (state for state in snapshot.states if state.key in self.states or state.key not in self._touched)
            listed = sorted(known, key=replay_order)
            for state in listed:  # update all before notifying: a subscriber may read other keys
                if state.version > self._version(state.key):
                    self.states[state.key] = state
            if not snapshot.resumes:  # else the listener replays the log from the mark, in order
                for state in listed:
                    self._deliver(state)
                self.mark = snapshot.mark
        if isinstance(why, WentBack):
            log.critical("the store was restored to an earlier moment; its subscriptions end", jobID=self._job_id)
        for subscription in ending:
            subscription.end(why)

    def _contradicted_by(self, snapshot: Snapshot) -> bool:
        """Return whether the listing has an older version, or another event with the same version, for any cached key.

        Keys touched since the listing began are ignored, because the listing may be older.
        """
        for state in snapshot.states:
            known = self.states.get(state.key)
            if known is None or state.key in self._touched or state.key in snapshot.recreated:
                continue
            if (state.version, state.event_id) != (known.version, known.event_id) and state.version <= known.version:
                return True
        return False
