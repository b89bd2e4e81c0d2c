"""The items of a run that are neither done nor with a worker, read from the ledger page by page.

An item is in exactly one place: only in the ledger, here (``ready`` or a suspect), or out with a worker. ``held`` has
all items here or out, so that no item is handed out twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headway.errors import HeadwayError
from headway.ledger import Item, Job, JobInfo, Recorded

#: Maximum read-ahead, in items and in approximate bytes of payload.
MOST = 4000
BYTES = 8 * 2**20
#: Maximum payload characters of a batch.
BATCH_BYTES = 2**20
#: Interval for finding dead letters that were retried during the run, seconds.
FETCH_SECONDS = 5.0
#: Minimum seconds between two searches for due retries while many items are ready.
RETRY_SECONDS = 0.5


class Backlog:
    """The items waiting for a worker."""

    def __init__(self, job: Job, on_damaged: Callable[[Recorded], object]) -> None:
        """Create the backlog. ``on_damaged`` receives the ledger's record of damaged items."""
        self._job = job
        self._on_damaged = on_damaged
        self.ready: deque[Item] = deque()
        #: Items of which one killed its worker; each runs alone.
        self.suspects: deque[Item] = deque()
        #: Items of which one may have killed a whole slot; each runs while nothing else begins.
        self.slot_suspects: deque[Item] = deque()
        self.held: set[int] = set()
        #: When the next retry is due, on the monotonic clock; None if no item waits.
        self.next_due: float | None = 0.0
        #: Whether the run stops: items that come back are not run again.
        self._is_closed = False
        self._fetch_at = 0.0
        self._next_search = 0.0
        self._untouched_left = True
        self._cursor = -1
        self._page = MOST // 20  # until the size of items is known

    def refill(self, now: float) -> None:
        """Read items from the ledger: retries that are due, and untried items if few are ready."""
        are_many = len(self.ready) > self._page // 2
        if now >= self._fetch_at or (self.next_due is not None and now >= self.next_due):
            if not are_many:
                self._fetch_due(now, self._page + len(self.held))
            elif now >= self._next_search and len(self.ready) <= 2 * self._page:  # bounds the memory
                self._fetch_due(now, self._page // 4 + len(self.held) - len(self.ready))
        if self._untouched_left and not are_many:
            page = self._job.untouched(self._cursor, self._page, on_damaged=self._on_damaged)
            self._untouched_left = len(page) == self._page
            if page:
                self._cursor = page[-1].idx
                self._add(page)
                size = sum(len(item.payload or "") for item in page) / len(page)
                self._page = max(10, min(MOST, int(BYTES / max(size, 1))))

    def info(self) -> JobInfo | None:
        """Read the job's counts; None if other processes work on it too."""
        return self._job.info()

    def find_more(self, now: float) -> bool:
        """Return whether the ledger still has items to run at the end of the run.

        Dead letters may have been retried meanwhile. A database that was restored, or failed over to a lagging
        replica, no longer has the last records. So the search restarts at the first item.
        """
        before = self._job.info().remaining
        if not before:
            return False
        self._cursor, self._untouched_left = -1, True
        self._fetch_due(now, self._page + len(self.held))
        self.refill(now)
        if self.empty and self._job.info().remaining >= before:
            raise HeadwayError(
                f"{before:,} items of job {self._job.id} are neither done nor dead, and the ledger has none to run: its "
                "counters do not match its items.",
                hint="Was the database edited? Run the same command again: it recounts the items.",
            )
        return not self.empty

    def fetch_last_pass(self) -> bool:
        """Fetch dead letters for their final pass; return whether there are any."""
        self._add(self._job.last_pass(self._page, on_damaged=self._on_damaged))
        return bool(self.ready)

    def next_batch(self, count: int) -> list[Item]:
        """Remove up to ``count`` ready items, fewer if they are large."""
        items: list[Item] = []
        size = 0
        while len(items) < count and size < BATCH_BYTES:
            items.append(self.ready.popleft())
            size += len(items[-1].payload or "")
        return items

    def more_arrived(self) -> None:
        """Note that new items were registered."""
        self._untouched_left = True

    def due_at(self, moment: float) -> None:
        """Note that an item is due for a retry at ``moment``."""
        self.next_due = moment if self.next_due is None else min(self.next_due, moment)

    def put_back(self, items: Iterable[Item]) -> None:
        """Return items to the front of the queue: not begun, or to be run again."""
        self.ready.extendleft(reversed(list(items)))
        self._drop_if_closed()

    def suspect(self, items: Iterable[Item]) -> None:
        """Run each of these items alone, because one of them killed or disturbed the others."""
        self.suspects.extend(items)
        self._drop_if_closed()

    def close(self) -> None:
        """Drop all waiting items, now and when they come back. They stay in the ledger."""
        self._is_closed = True
        self._drop_if_closed()

    def _drop_if_closed(self) -> None:
        if self._is_closed:
            for waiting in (self.ready, self.suspects, self.slot_suspects):
                self.held.difference_update(item.idx for item in waiting)
                waiting.clear()

    @property
    def empty(self) -> bool:
        """Whether no item is here or out, untried or due for a retry."""
        return not self.held and not self._untouched_left and self.next_due is None

    def _fetch_due(self, now: float, most: int) -> None:
        """Put items whose retry is due in front, and note when the next one is.

        They go in front because the ready items may last for hours, and the wait of a retry is over.
        """
        self._fetch_at, self._next_search = now + FETCH_SECONDS, now + RETRY_SECONDS
        rows = self._job.due(most, within=10**8, on_damaged=self._on_damaged)
        self.next_due = now if len(rows) == most else None
        found = []
        for item, left in rows:
            if item.idx in self.held:
                continue
            if left > 0:
                self.next_due = now + left
                break
            found.append(item)
        self.ready.extendleft(reversed(found))
        self.held.update(item.idx for item in found)

    def _add(self, items: Sequence[Item]) -> None:
        self.ready.extend(items)
        self.held.update(item.idx for item in items)


#: Creates a pool's backlog, for a whole job or a slot's share.
MakeBacklog = Callable[[Job, Callable[[Recorded], object]], Backlog]
