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
from collections.abc import Container, Iterator, Mapping, Sequence
from random import getrandbits
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headway.core.lifecycle import ForkGuard
from headway.core.retry import LaterLimit, RetryPolicy
from headway.errors import HeadwayError, RetryLater, StaleClaim
from headway.ledger import Done, Failed, Item, Job, Later, Outcome, Progress, describe, fingerprint
from headway.ledger.content import bounded_meta
from headway.run.worker.attempt import GiveUp, later_row

if TYPE_CHECKING:
    from headway.run.session import Session

PAGE = 500


class OpenItem:
    """An item to be worked on inside ``with item:``.

    Leaving the block records it as done. An exception records it as failed and is suppressed; `headway.RetryLater`
    postpones it. KeyboardInterrupt and similar exceptions leave it unchanged.
    """

    def __init__(self, job: OpenJob, item: Item) -> None:
        self._job = job
        self._item = item
        self._began = 0.0
        #: JSON stored with the item when it is done; cut if long.
        self.meta: object = None

    @property
    def index(self) -> int:
        return self._item.idx

    @property
    def key(self) -> str | None:
        return self._item.key

    @property
    def fingerprint(self) -> int | None:
        """Fingerprint of the payload."""
        return None if self._item.payload is None else fingerprint(self._item.payload)

    @property
    def payload(self) -> Any:
        return None if self._item.payload is None else json.loads(self._item.payload)

    @property
    def attempts(self) -> int:
        """Number of earlier failures."""
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
        """Record how the block ended; return whether to suppress its exception."""
        if error is None:
            self._job.record(Done(self._item.idx, bounded_meta(self.meta), None, seconds))
            return False
        if not isinstance(error, Exception) or isinstance(error, HeadwayError):
            return False  # not caused by the item
        if isinstance(error, RetryLater) and self._job.postpone(self.index, error, seconds):
            return True
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
    """The items that concurrent loops over one job share. Callers of `next` hold a lock."""

    def __init__(self, job: Job, entered: Mapping[int, int]) -> None:
        self._job = job
        self._cursor = -1
        self._untried = True
        self._ready = deque[Item]()
        #: Yielded, unrecorded items: index -> failures when yielded.
        self._yielded = dict(entered)

    def next(self) -> tuple[Item | None, float | None]:
        """Return the next item. Otherwise return None and the seconds until one is due, None if none will be."""
        delay = None if self._ready else self._refill()
        if not self._ready:
            return None, delay
        item = self._ready.popleft()
        self._yielded[item.idx] = item.attempts
        return item, None

    def recorded(self, outcome: Outcome) -> None:
        """Forget a yielded item. A failed one may have been yielded again already."""
        if not isinstance(outcome, Failed) or self._yielded.get(outcome.idx) == outcome.seen:
            self._yielded.pop(outcome.idx, None)

    def _refill(self) -> float | None:
        """Find items that can run now; return the seconds until the next one is due, or None."""
        delay = self._find()
        if not self._ready and delay is None and self._job.info().remaining > len(self._yielded):
            # The database was restored and lost records: run those items again.
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
    """The right to work on a job until it is closed. A thread renews the lease."""

    def __init__(self, session: Session, policy: RetryPolicy, later_limit: LaterLimit) -> None:
        """Start renewing the hold of ``session``. Closing this releases it."""
        self._later_limit = later_limit
        self._session, self._held, self._policy = session, session.held, policy
        self._job = self._held.job
        #: Until when the job waits, on the monotonic clock.
        self._waits_until = time.monotonic() + self._job.asked(self._held.hold.run).wait
        self._guard = ForkGuard("The job")
        self._stop = threading.Event()
        self._lost: StaleClaim | None = None
        self._closed = False
        #: Protects the number of running `remaining` loops, their shared items, and the items inside ``with item:``.
        self._sharing = threading.Lock()
        self._loops = 0
        self._entered: dict[int, int] = {}
        self._share = _Share(self._job, self._entered)
        self._renewing = threading.Thread(target=self._renew, name="headway-renew", daemon=True)
        self._renewing.start()

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that holds the job."""
        return self._guard.crossed

    def check(self) -> None:
        """Raise in a forked child, which would otherwise continue its parent's loop."""
        self._guard.check()

    @property
    def wait_left(self) -> float:
        """Seconds until the job may start items again (`headway.RetryLater` with ``scope="job"``)."""
        return max(0.0, self._waits_until - time.monotonic())

    def progress(self) -> Progress:
        """Return the counts of the job."""
        return self._job.progress()

    def remaining(self, *, wait: bool = True) -> Iterator[OpenItem]:
        """Yield the items that are neither done nor dead.

        Untried items come first, then failed ones when their retry is due. With ``wait=False`` the iteration ends
        instead of waiting. While the whole job waits, nothing is yielded.

        Concurrent loops in several threads share the items: each is yielded to one of them. A skipped item is yielded
        again by the first loop that starts after all current ones have ended.
        """
        with self._sharing:
            self._loops += 1
            if self._loops == 1:
                self._share = _Share(self._job, self._entered)
            share = self._share
        try:
            while True:
                self.check()  # in a forked child, a thread that does not exist there may hold the lock
                item, delay = None, self.wait_left or None
                if delay is None:
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
        """Note that ``with item:`` began, so that later loops skip the item."""
        self.check()
        self._entered[item.idx] = item.attempts

    def leave(self, item: Item) -> None:
        """Note that ``with item:`` ended."""
        self._entered.pop(item.idx, None)

    def numbers_among_equals(self, marks: Container[object]) -> dict[int, int]:
        """Return index -> number of earlier items with the same payload.

        Only payloads with fingerprints in ``marks`` are included.
        """
        counts, numbers = Counter[int | None](), {}
        for idx, _, mark in self._job.fingerprints():
            if mark in marks:
                numbers[idx] = counts[mark]
                counts[mark] += 1
        return numbers

    def postpone(self, idx: int, error: RetryLater, seconds: float) -> bool:
        """Record that the item asked to run later. Return False if the fields of ``error`` are invalid."""
        row = later_row(idx, seconds, error)
        if row is None:
            return False
        _, _, delay, reason, whole_job = row
        self.record(Later(idx, delay, reason, getrandbits(62), whole_job, seconds, limit=self._later_limit))
        if whole_job:
            self._waits_until = max(self._waits_until, time.monotonic() + delay)
        return True

    def record(self, outcome: Outcome) -> None:
        """Record one outcome."""
        self.record_many([outcome])

    def record_many(self, outcomes: Sequence[Outcome]) -> None:
        """Record outcomes in one transaction."""
        self.check()
        if self._lost is not None:
            raise self._lost
        self._job.record(outcomes, hold=self._held.hold, policy=self._policy)
        with self._sharing:
            for outcome in outcomes:
                self._share.recorded(outcome)

    def close(self, outcome: str = "interrupted") -> None:
        """Release the job. In a forked child this does nothing: the parent holds the job."""
        if self._closed or self._guard.crossed:
            return
        self._closed = True
        self._stop.set()
        if threading.current_thread() is not self._renewing:  # garbage collection may call this in the renewing thread
            self._renewing.join()
        try:
            self._job.finish(self._held.hold)
            finished = self._job.info().finished_at is not None
            self._session.release("finished" if finished else outcome)
            if finished:
                self._session.deliver()
        except StaleClaim:
            pass  # another process took over the job
        finally:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _renew(self) -> None:
        while not self._stop.wait(self._held.hold.lease / 3):
            try:
                self._held.renew(())
            except StaleClaim as error:
                self._lost = error
                return
            except HeadwayError:
                continue  # database busy or unreachable: the lease allows two more tries
