"""`ListenerSupervisor`: runs one job's listener in a thread, and reconnects it.

The listener connects, *then* lists, then applies changes. Every reconnect repeats this, so no change is missed; versions
prevent duplicates. While the listener is disconnected the cache is stale, and reads list the job from the backend.

A signal handler may raise anywhere in the main thread. Work that must not stop halfway (connecting, listing, ending the
subscriptions) therefore runs `undisturbed`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from headway.core.lifecycle import Flag, undisturbed
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, Unavailable
from headway.states.cache import Cache
from headway.states.store.contract import Backend, JobGone, JobRecord, Listener, Mark, Relist, Snapshot, job_gone
from headway.telemetry import Log, metrics

log = Log("states")

#: A listener that is silent for this many seconds counts as dead, whatever its socket reports.
SILENCE_SECONDS = 10.0


class ListenerSupervisor:
    """Keeps the cache of one job up to date. ``usable`` raises if the store was closed or its job is gone."""

    def __init__(
        self,
        backend: Backend,
        record: JobRecord,
        cache: Cache,
        *,
        retry: RetryPolicy,
        stop: Flag,
        clock: Callable[[], float],
        usable: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._record = record
        self._cache = cache
        self._retry = retry
        self._stop = stop
        self._clock = clock
        self._usable = usable
        self._starting = threading.Lock()
        # Serializes listings: an older one must not be applied after a newer one.
        self._listing = threading.Lock()
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._fresh_until = 0.0
        self._gave_up: HeadwayError | None = None

    @property
    def fresh(self) -> bool:
        """Whether the listener currently keeps the cache up to date."""
        return self._clock() < self._fresh_until

    def start(self, *, again: bool = False) -> bool:
        """Start the listener unless it runs. With ``again``, restart it if it gave up. Return whether the cache is fresh.

        It connects and lists in the caller's thread, so that the next read finds all states. Then the thread takes over.
        """
        if self._thread is None or (again and self._gave_up is not None):
            undisturbed(self._start)
        return self.fresh

    def _start(self) -> None:
        with self._starting:
            if self._thread is None or self._gave_up is not None:
                self._usable()
                self._listener = self._connect()
                self._gave_up = None
                self._cache.begin()
                name = f"headway-states-{self._record.job_id}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def refresh(self) -> None:
        """List the job from the backend, unless the cache has become fresh meanwhile."""
        undisturbed(self._refresh)

    def _refresh(self) -> None:
        with self._listing:
            if not self.fresh:
                self._list(lambda since: self._backend.read_all(self._record, since))

    def stop(self, finish: Callable[[], object]) -> None:
        """Wait for the listener to end, then run ``finish`` while no listener can start. The stop flag must be set."""
        thread, deadline = self._thread, self._clock() + SILENCE_SECONDS
        while thread is not None and thread.is_alive() and self._clock() < deadline:
            if (listener := self._listener) is not None:
                listener.wake()  # repeatedly: it may not have been waiting yet
            thread.join(0.02)
        with self._starting:
            finish()

    def lose(self, gone: JobGone) -> None:
        """End everything that depends on the job, because it is gone."""
        self._fresh_until = 0.0
        undisturbed(lambda: self._cache.lose(gone))

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                if self._listener is None:
                    self._listener = self._connect()
                    log.info("the listener is connected again", jobID=self._record.job_id, attempt=failures)
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
                    "the listener lost its store and will reconnect",
                    jobID=self._record.job_id, attempt=failures, seconds=round(wait, 3), error=str(error),
                )  # fmt: skip
                self._stop.wait(wait)
        self._disconnect()

    def _connect(self) -> Listener:
        try:
            listener = self._backend.listen(self._record)
        except JobGone as gone:
            self.lose(gone)
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
            self.lose(gone)
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
                raise job_gone(self._record.job_id, remade=bool(snapshot.incarnation))
        except JobGone as gone:
            self.lose(gone)
            raise
        self._cache.reconcile(snapshot)

    def _disconnect(self) -> None:
        self._fresh_until = 0.0
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _give_up(self, error: Exception, failures: int) -> None:
        why = Unavailable(
            f"🔴 The listener of the job {self._record.job_id!r} gave up: {error}",
            hint="Subscribe again when the store can be reached; reads go to it directly until then.",
        )

        def record() -> None:
            self._gave_up = why  # from here on a new subscriber starts another listener
            log.critical("the listener gave up", jobID=self._record.job_id, attempt=failures, error=str(error))

        self._cache.end(why, record)
