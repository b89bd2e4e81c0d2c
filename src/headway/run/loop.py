"""A job held by a program that keeps its own loop.

with headway.open_job("ads-november", products) as job:
    for item in job.remaining():
        with item:
            make_ad(item.payload)
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headway.errors import HeadwayError, StaleClaim
from headway.ledger import Done, Failed, Hold, Item, Job, Ledger, Progress, describe, fingerprint
from headway.ledger.content import bounded_meta
from headway.lifecycle import ForkGuard
from headway.retry import RetryPolicy
from headway.run.attempt import GiveUp

PAGE = 500


class OpenItem:
    """An item to be worked on inside ``with item:``. Leaving the block records it as done; an exception records it as
    failed and is swallowed; KeyboardInterrupt and the like leave it as it was."""

    def __init__(self, job: OpenJob, item: Item) -> None:
        self._job = job
        self._item = item
        self._began = 0.0
        #: Kept with the item when it is done; JSON, cut if it is long.
        self.meta: object = None

    @property
    def index(self) -> int:
        return self._item.idx

    @property
    def key(self) -> str | None:
        return self._item.key

    @property
    def fingerprint(self) -> int | None:
        """Of the payload."""
        return None if self._item.payload is None else fingerprint(self._item.payload)

    @property
    def payload(self) -> Any:
        return None if self._item.payload is None else json.loads(self._item.payload)

    @property
    def attempts(self) -> int:
        """How often it has failed before."""
        return self._item.attempts

    def __enter__(self) -> Self:
        self._job.enter(self._item)
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return self._record(error, time.monotonic() - self._began)
        finally:
            self._job.leave(self._item)

    def _record(self, error: BaseException | None, seconds: float) -> bool:
        """Record how the block ended; return whether its exception is dealt with."""
        if error is None:
            self._job.record(Done(self._item.idx, bounded_meta(self.meta), None, seconds))
            return False
        if not isinstance(error, Exception) or isinstance(error, HeadwayError):
            return False  # not the item's fault
        self._job.record(
            Failed(
                self._item.idx,
                describe(error),
                seconds=seconds,
                seen=self._item.attempts,
                retryable=not issubclass(type(error), GiveUp),
            )
        )
        return True


class _Share:
    """The items that concurrent loops over one job share. Its owner holds a lock around `next`."""

    def __init__(self, job: Job, entered: Mapping[int, int]) -> None:
        self._job = job
        self._cursor = -1
        self._untried = True
        self._ready = deque[Item]()
        #: Items that were yielded and not recorded since: index -> failures at that time.
        self._yielded = dict(entered)

    def next(self) -> tuple[Item | None, float | None]:
        """Return the next item; or None and the seconds until one is due, None if none will be."""
        delay = None if self._ready else self._refill()
        if not self._ready:
            return None, delay
        item = self._ready.popleft()
        self._yielded[item.idx] = item.attempts
        return item, None

    def recorded(self, outcome: Done | Failed) -> None:
        """Forget that an item was yielded. A failed one may have been yielded anew before this is called."""
        if isinstance(outcome, Done) or self._yielded.get(outcome.idx) == outcome.seen:
            self._yielded.pop(outcome.idx, None)

    def _refill(self) -> float | None:
        """Find items that may run now; return the seconds until the next one is due, None if none is."""
        delay = self._find()
        if not self._ready and delay is None and self._job.info().remaining > len(self._yielded):
            # The ledger no longer has records that it had: the database was restored. They are made again.
            self._cursor, self._untried = -1, True
            delay = self._find()
        return delay

    def _find(self) -> float | None:
        while self._untried and not self._ready:
            page = self._job.untouched(self._cursor, PAGE)
            self._untried = bool(page)
            if page:
                self._cursor = page[-1].idx
                self._ready.extend(item for item in page if item.idx not in self._yielded)
        if self._ready:
            return None
        due = self._job.due(PAGE + len(self._yielded), within=10**8)
        due = [(item, left) for item, left in due if self._yielded.get(item.idx) != item.attempts]
        self._ready.extend(item for item, left in due if left <= 0)
        return due[0][1] if due else None


class OpenJob:
    """The right to work on a job until it is closed. A thread prolongs the lease while the program works."""

    def __init__(
        self, ledger: Ledger, job: Job, hold: Hold, policy: RetryPolicy, tell: Callable[[], None] = lambda: None
    ) -> None:
        """``tell`` delivers the events that wait, once the job has finished."""
        self._ledger, self._job, self._hold, self._policy, self._tell = ledger, job, hold, policy, tell
        self._guard = ForkGuard("The job")
        self._stop = threading.Event()
        self._lost: StaleClaim | None = None
        self._closed = False
        #: Loops over `remaining` that run now, what they share, and the items inside ``with item:``.
        self._sharing = threading.Lock()
        self._loops = 0
        self._entered: dict[int, int] = {}
        self._share = _Share(job, self._entered)
        self._renewing = threading.Thread(target=self._renew, name="headway-renew", daemon=True)
        self._renewing.start()

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that has the job."""
        return self._guard.crossed

    def check(self) -> None:
        """Raise in a forked child: it leaves ``with item:`` as its parent does, and goes on with the loop."""
        self._guard.check()

    def progress(self) -> Progress:
        return self._job.progress()

    def remaining(self, *, wait: bool = True) -> Iterator[OpenItem]:
        """Yield the items that are neither done nor dead.

        First come those never tried, then those that failed, each when its delay is over. With ``wait=False`` the
        iteration ends instead of waiting. Loops that run at the same time, in several threads, share the items: each is
        yielded to one of them. An item that a loop skips is yielded again by the first loop that starts after all of
        them ended.
        """
        with self._sharing:
            self._loops += 1
            if self._loops == 1:
                self._share = _Share(self._job, self._entered)
            share = self._share
        try:
            while True:
                self.check()  # in a forked child the lock may be held by a thread that it does not have
                with self._sharing:
                    item, delay = share.next()
                if item is not None:
                    yield OpenItem(self, item)
                elif delay is None or not wait:
                    return
                else:
                    self._stop.wait(min(delay, 1.0))
        finally:
            if not self._guard.crossed:
                with self._sharing:
                    self._loops -= 1

    def enter(self, item: Item) -> None:
        """Note that ``with item:`` began: no later loop gets the item before it is left."""
        self.check()
        self._entered[item.idx] = item.attempts

    def leave(self, item: Item) -> None:
        """Note that ``with item:`` was left."""
        self._entered.pop(item.idx, None)

    def numbers_among_equals(self, marks: Container[object]) -> dict[int, int]:
        """index -> how many items before it have the same payload; of the payloads that have one of these fingerprints."""
        counts, numbers = Counter[int | None](), {}
        for idx, _, mark in self._job.fingerprints():
            if mark in marks:
                numbers[idx] = counts[mark]
                counts[mark] += 1
        return numbers

    def record(self, outcome: Done | Failed) -> None:
        self.record_many([outcome])

    def record_many(self, outcomes: Sequence[Done | Failed]) -> None:
        """Several in one transaction."""
        self.check()
        if self._lost is not None:
            raise self._lost
        self._job.record(outcomes, hold=self._hold, policy=self._policy)
        with self._sharing:
            for outcome in outcomes:
                self._share.recorded(outcome)

    def close(self, outcome: str = "interrupted") -> None:
        """Release the job. In a forked child this does nothing: the job is its parent's."""
        if self._closed or self._guard.crossed:
            return
        self._closed = True
        self._stop.set()
        if threading.current_thread() is not self._renewing:  # whoever collects garbage may be that one
            self._renewing.join()
        try:
            self._job.finish(self._hold)
            finished = self._job.info().finished_at is not None
            self._ledger.release(self._hold, "finished" if finished else outcome)
            if finished:
                self._tell()
        except StaleClaim:
            pass  # taken over: it is not ours to release
        finally:
            self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _renew(self) -> None:
        while not self._stop.wait(self._hold.lease / 3):
            try:
                self._ledger.renew(self._hold)
            except StaleClaim as error:
                self._lost = error
                return
            except HeadwayError:
                continue  # busy or away: the lease has time for two more tries
