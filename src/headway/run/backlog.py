"""The items of a run that are neither done nor with a worker: read from the ledger a page at a time.

An item is always in exactly one place: in the ledger alone, here (``ready`` or a suspect), or out with a worker. ``held``
knows all that is not in the ledger alone, so that nothing is handed out twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headway.errors import HeadwayError
from headway.ledger import Item, Job, JobInfo, Recorded

#: Read ahead at most so many items, and at most about so many bytes of payload.
MOST = 4000
BYTES = 8 * 2**20
#: Dead letters that somebody gives another life while the run goes on are looked for so often.
LOOK_SECONDS = 5.0


class Backlog:
    def __init__(self, job: Job, on_damaged: Callable[[Recorded], object]) -> None:
        """``on_damaged`` gets what the ledger recorded of items that it could not hand out."""
        self._job = job
        self._on_damaged = on_damaged
        self.ready: deque[Item] = deque()
        #: Items one of which killed its worker; each is run alone.
        self.suspects: deque[Item] = deque()
        #: Items one of which may have killed a whole slot; each is run while nothing else begins.
        self.slot_suspects: deque[Item] = deque()
        self.held: set[int] = set()
        #: When the next item's wait for another try is over, by the monotonic clock; None if none waits.
        self.next_due: float | None = 0.0
        self._look_at = 0.0
        self._untouched_left = True
        self._cursor = -1
        self._page = MOST // 20  # until it is known how large items are

    def refill(self, now: float) -> None:
        """Have something ready, if the ledger has something."""
        if len(self.ready) > self._page // 2:
            return
        if now >= self._look_at or (self.next_due is not None and now >= self.next_due):
            self._take_due(now)
        if self._untouched_left:
            page = self._job.untouched(self._cursor, self._page, on_damaged=self._on_damaged)
            self._untouched_left = len(page) == self._page
            if page:
                self._cursor = page[-1].idx
                self._take(page)
                size = sum(len(item.payload or "") for item in page) / len(page)
                self._page = max(10, min(MOST, int(BYTES / max(size, 1))))

    def info(self) -> JobInfo | None:
        """Read the counts of the job; None if other processes work on it too."""
        return self._job.info()

    def look_again(self, now: float) -> bool:
        """Return whether the ledger has items to run although this run is through.

        Dead letters may have been retried meanwhile. A database that was restored, or failed over to a replica that
        lagged, no longer has the last records. So the search starts at the first item, and the ledger decides.
        """
        before = self._job.info().remaining
        if not before:
            return False
        self._cursor, self._untouched_left = -1, True
        self._take_due(now)
        self.refill(now)
        if self.empty and self._job.info().remaining >= before:
            raise HeadwayError(
                f"{before:,} items of job {self._job.id} are neither done nor dead, and the ledger has none to run: its "
                "counters do not match its items.",
                hint="Was the database changed by hand? Run the same command again: it counts the items anew.",
            )
        return not self.empty

    def take_last_pass(self) -> bool:
        """Take the dead letters that have not had their pass; whether there are any."""
        self._take(self._job.last_pass(self._page, on_damaged=self._on_damaged))
        return bool(self.ready)

    def more_arrived(self) -> None:
        """New items were registered."""
        self._untouched_left = True

    def due_at(self, moment: float) -> None:
        """An item waits until ``moment``."""
        self.next_due = moment if self.next_due is None else min(self.next_due, moment)

    def put_back(self, items: Iterable[Item]) -> None:
        """Items that a worker had and did not begin, or that must begin again."""
        self.ready.extendleft(reversed(list(items)))

    def settled(self, idx: int) -> None:
        """What became of the item is in the ledger."""
        self.held.discard(idx)

    def release(self) -> None:
        """Leave everything that is here to the ledger, which has it anyway."""
        for waiting in (self.ready, self.suspects, self.slot_suspects):
            self.held.difference_update(item.idx for item in waiting)
            waiting.clear()

    @property
    def empty(self) -> bool:
        """Nothing is here or out, and the ledger has nothing that will come to us by itself."""
        return not self.held and not self._untouched_left and self.next_due is None

    def _take_due(self, now: float) -> None:
        """Fetch items whose wait is over, and learn when the next one's is."""
        self._look_at = now + LOOK_SECONDS
        most = self._page + len(self.held)
        rows = self._job.due(most, within=10**8, on_damaged=self._on_damaged)
        self.next_due = now if len(rows) == most else None
        for item, left in rows:
            if item.idx in self.held:
                continue
            if left > 0:
                self.next_due = now + left
                return
            self._take([item])

    def _take(self, items: Sequence[Item]) -> None:
        self.ready.extend(items)
        self.held.update(item.idx for item in items)


#: How a pool makes its backlog: of a whole job, or of a slot's share of one.
MakeBacklog = Callable[[Job, Callable[[Recorded], object]], Backlog]
