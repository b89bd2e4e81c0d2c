"""`Cache`: what this process knows of one job, and the subscriptions that are told what changes in it.

It is brought up to date in three ways, in any order: by what the listener hears (`apply`), by a listing of everything
(`reconcile`), and by our own writes (`remember`). Of each key the highest version wins, and every subscription is offered
whatever is heard; it ignores what it has seen. A key that was touched while a listing was under way is newer than the
listing.

A store that was put back to an earlier moment is recognised by what the reader heard last (the backend's `Mark`) and by
the versions of its keys: the subscriptions end with `WentBack`, and everything known is replaced by what the store has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakSet

from headway.errors import HeadwayError
from headway.lifecycle import held_here
from headway.states.state import Key, State, replay_order
from headway.states.store import Change, JobGone, Mark, Snapshot, WentBack, job_gone
from headway.states.subscription import Subscription
from headway.telemetry import Log, metrics

log = Log("states")


class Cache:
    """Every method may be called from any thread. ``kind`` is the kind of store, as metrics name it."""

    def __init__(self, job_id: str, kind: str, *, tombstone: bool, clock: Callable[[], float]) -> None:
        self._job_id = job_id
        self._kind = kind
        self._clock = clock
        # Guards everything below; held for memory's work only, never while waiting for the backend. It may be taken
        # again within, by a signal handler that closes a subscription.
        self.lock = threading.RLock()
        self.states: dict[Key, State] = {}  # reading one is a single step of the interpreter: that needs no lock
        self.mark: Mark = None  # how far we have heard
        self._heard: dict[Key, int] = {}  # the last version the listener told, to notice gaps
        self._touched: set[Key] = set()  # written or heard of since the last listing began
        self._written: dict[Key, int] = {}  # the last version we wrote, to notice another writer
        self._under_way: dict[Key, tuple[int, float]] = {}  # our last write, until the listener tells it
        # Weak: a subscription that its reader dropped is closed by that. What waited in it is counted at the next tick.
        self.subscriptions: WeakSet[Subscription] = WeakSet()
        self.abandoned: deque[int] = deque()
        self._tombstone = tombstone
        self._gone: JobGone | None = None
        self._unheard = False  # nobody listens any more
        self._why: HeadwayError | None = None

    @property
    def gone(self) -> JobGone | None:
        """Why nothing is answered any more."""
        return self._gone

    @property
    def told_here(self) -> bool:
        """Whether this thread is in the midst of telling subscriptions: that is done with the lock in hand."""
        return held_here(self.lock)

    def current(self) -> list[State]:
        with self.lock:
            return list(self.states.values())

    # ---- subscriptions ---------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> None:
        with self.lock:  # no change can come between what is current and what happens
            subscription.start(self.states.values())
            if self._gone is not None:
                subscription.end(self._gone)
            elif self._tombstone:
                subscription.end(job_gone(self._job_id, marked=True))
            elif self._unheard:  # the listener ended while this one was on its way here: nobody would tell it anything
                subscription.end(self._why)
            else:
                self.subscriptions.add(subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        with self.lock:
            self.subscriptions.discard(subscription)

    def begin(self) -> None:
        """Somebody listens from now on."""
        with self.lock:
            self._unheard, self._why = False, None

    def end(self, why: HeadwayError | None, first: Callable[[], object] = lambda: None) -> None:
        """Nobody listens any more. What waits in the subscriptions can still be read; then they say why. The caller holds
        no lock. ``first`` comes before that: from there on somebody may `begin` again, whose subscriptions are not ended."""
        with self.lock:
            self._unheard, self._why = True, why
            ending = list(self.subscriptions)
            self.subscriptions.clear()
        try:
            first()
        finally:
            for subscription in ending:
                subscription.end(why)

    def lose(self, gone: JobGone) -> None:
        """The job is not there any more: say so to everybody who waits for it, and answer nothing from memory."""
        with self.lock:
            first, self._gone = self._gone is None, self._gone or gone
            self._clear()
            self._touched.clear()
        if first:
            log.critical("the job is gone; its subscriptions end", jobID=self._job_id, error=str(gone))
            self.end(gone)

    def count_abandoned(self) -> None:
        while self.abandoned:
            if waited := self.abandoned.popleft():
                metrics.count("headway_states_dropped", waited)

    # ---- what we wrote ---------------------------------------------------------------------

    def remember(self, stored: State) -> None:
        """Show our own write to our own readers at once; subscribers hear it from the listener, in its order."""
        with self.lock:
            self._touched.add(stored.key)
            before = self._written.get(stored.key)
            self._written[stored.key] = max(stored.version, before or 0)
            if stored.version > self._version(stored.key):
                self.states[stored.key] = stored
            if stored.version > self._heard.get(stored.key, 0):
                self._under_way[stored.key] = (stored.version, self._clock())
            elif before is None or stored.version > before:  # the listener was quicker than the answer to the write
                metrics.observe("headway_states_live_seconds", 0.0, store=self._kind)
        if before is not None and stored.version > before + 1:
            log.warning(
                "somebody else writes the states of this task too",
                jobID=stored.job_id, taskID=stored.task_id, tag=stored.tag, version=stored.version,
            )  # fmt: skip

    def _version(self, key: Key) -> int:
        cached = self.states.get(key)
        return 0 if cached is None else cached.version

    # ---- what was heard ---------------------------------------------------------------------

    def apply(self, changes: Iterable[Change]) -> None:
        with self.lock:
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
                metrics.count("headway_states_version_gaps", state.version - heard - 1, store=self._kind)
        if state.version > self._version(state.key):
            self.states[state.key] = state
        written, when = self._under_way.get(state.key, (0, 0.0))
        if written and state.version >= written:
            del self._under_way[state.key]
            if state.version == written:
                metrics.observe("headway_states_live_seconds", self._clock() - when, store=self._kind)
        for subscription in list(self.subscriptions):  # what one accepts may subscribe too
            subscription.offer(state)

    def _forget(self, key: Key) -> None:
        self.states.pop(key, None)
        self._heard.pop(key, None)
        self._written.pop(key, None)
        self._under_way.pop(key, None)
        for subscription in list(self.subscriptions):
            subscription.forget(key)

    def _clear(self) -> None:
        for known in (self.states, self._heard, self._written, self._under_way):
            known.clear()

    def begin_listing(self) -> None:
        with self.lock:
            self._touched.clear()

    def reconcile(self, snapshot: Snapshot) -> None:
        """Make the cache what the store says, keeping of each key the highest version, and tell what is new."""
        why: HeadwayError | None = None
        with self.lock:
            if not snapshot.continuous or self._contradicted_by(snapshot):
                why = WentBack(f"🔴 The store of the job {self._job_id!r} was put back to an earlier moment.")
                self._clear()
                self._touched.clear()
            elif snapshot.deleted:
                why = job_gone(self._job_id, marked=True)
            self._tombstone = snapshot.deleted
            ending = list(self.subscriptions) if why is not None else []
            if isinstance(why, WentBack):
                self.subscriptions.clear()  # they must not be offered what follows as if it came after what they heard
            for key in snapshot.recreated:
                self._forget(key)
            # What came after the listing began is newer than the listing, whether it was made or removed.
            current = {state.key for state in snapshot.states} | self._touched
            for key in [key for key in self.states if key not in current]:
                self._forget(key)
            known = (state for state in snapshot.states if state.key in self.states or state.key not in self._touched)
            listed = sorted(known, key=replay_order)
            for state in listed:  # all before the first is told: whoever is told may look at the others
                if state.version > self._version(state.key):
                    self.states[state.key] = state
            if not snapshot.resumes:  # else the listener reads the changes since the mark from the log, in their order
                for state in listed:
                    self._hear(state)
                self.mark = snapshot.mark
        if isinstance(why, WentBack):
            log.critical("the store went back in time; its subscriptions end", jobID=self._job_id)
        for subscription in ending:
            subscription.end(why)

    def _contradicted_by(self, snapshot: Snapshot) -> bool:
        """Whether the store has less of a key, or another event, than it had. A key that was written or heard of since
        the listing began does not count: the listing may be older."""
        for state in snapshot.states:
            known = self.states.get(state.key)
            if known is None or state.key in self._touched or state.key in snapshot.recreated:
                continue
            if (state.version, state.event_id) != (known.version, known.event_id) and state.version <= known.version:
                return True
        return False
