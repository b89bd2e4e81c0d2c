"""`RegistryView`: finds new entries of the failed or canceled registry.

A notification names the key and never the member, so every notification makes the watcher read the registry. It reads
pages from the highest score down until one holds only known entries, then the lowest page (``failure_ttl=-1`` scores an
entry with -1). Every announced addition must be explained by an entry that is new or has a new score. If one is not, or
if something was removed, the whole registry is read by ZSCAN. ZSCAN returns every member that is present from its
beginning to its end, whatever is added, removed or rescored meanwhile; additions meanwhile are announced again. No read
is larger than a page.

Entries are compared by member and score. A score is in whole seconds. So an entry that was removed and put back may look
unchanged if its score is -1 or if it was read just before. A removal makes such entries doubtful, and doubtful entries
are read again (`Doubt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from headway.telemetry import Log
from headway.watcher.ports import Member, RqJobRecord
from headway.watcher.reports import ADDITIONS, clean_text, unreadable
from headway.watcher.store.contract import Registry, Seen
from headway.watcher.verdicts import Judge, QueueContext, Verdict

log = Log("watcher")

#: Seconds before the newest read entry within which an entry may have changed without a new score.
DOUBT_S = 5.0

#: Seconds after a read within which an announcement may be of a change that the read has already seen.
LATE_S = 2.0

#: Seconds for which a member that left its registry is remembered, because it may return. Also how long the outcome of
#: a lost execution that RQ gave up is awaited.
KEEP_S = 86_400.0

#: The whole registry is read at least once in this many seconds, so that members that left it can be forgotten.
WALK_S = 86_400.0

Unknown = tuple[Member, Seen | None]


class Doubt:
    """Tells which entries may have changed although their member and score are unchanged. Times are Redis's."""

    def __init__(self, newest: float) -> None:
        self._newest = newest  # when the newest known entry was read
        self._read_from = inf
        self._read_until = 0.0
        self.count = 0

    def read(self, at: float) -> None:
        """Record when entries were read."""
        self._newest = at

    def begin(self, now: float) -> None:
        """Doubt entries after a removal, until `clear`."""
        self._read_from = min(self._read_from, self._newest - DOUBT_S)
        self._read_until = now
        self.count += 1

    def clear(self) -> None:
        """End the doubt: the whole registry was read."""
        self._read_from = inf

    def covers(self, seen: Seen) -> bool:
        """Return whether an entry that looks unchanged has to be read again."""
        return (seen.score < 0 or seen.at >= self._read_from) and seen.at <= self._read_until


class RegistryView:
    """The failed or the canceled registry of a queue. `pending` and `walk_at` say what is due."""

    def __init__(self, name: Registry, key: str, context: QueueContext, judge: Judge) -> None:
        self.name = name
        self._key = key
        self._context = context
        self._judge = judge
        self.pending = False
        #: Whether a read is running. Announcements meanwhile are read afterwards.
        self.reading = False
        self.walk_at: float | None = None
        self._removed = False
        #: Announced additions minus the entries that explain them. An entry may be found before it is announced.
        self._unexplained = 0
        self._size = 0
        self._doubt = Doubt(context.store.newest(name))
        self._read_at = 0.0
        self._walked_at = 0.0
        self._walk_not_before = 0.0
        self.reported = 0
        self._doubt.begin(context.now())  # changes while no watcher ran were not announced

    def hint(self, command: str) -> None:
        """Note a command that changed the registry. An addition is read soon; a removal only affects the next read."""
        if command in ADDITIONS:
            self.pending = True
            if self._unexplained < 0 and self._context.now() - self._read_at > LATE_S:
                self._unexplained = 0
            self._unexplained += 1
        else:
            self._removed = True
            self._doubt.begin(self._context.now())

    def diff(self) -> None:
        """Report new entries. Changes meanwhile are announced again, so the next round sees them."""
        self.pending, self.reading = False, True
        try:
            self._diff()
        finally:
            self.reading = False

    def _diff(self) -> None:
        size, redis = self._context.page_size, self._context.redis
        first = self._page(0)
        if len(first) < size:  # the whole registry fits in a page
            self._report(self._unknown(first))
            self._size, self._removed, self._unexplained, self.walk_at = len(first), False, 0, None
            self._doubt.clear()
            return
        unknown = self._unknown(first)
        if unknown and self._unknown(self._page(1)):
            self._ascend(self._depth())
        else:
            self._report(unknown)
        rank = 0
        while self._report(self._unknown(redis.zrange(self._key, rank, size))):
            rank += size - 1
            self._context.breathe()
        self._size = redis.zcard(self._key)
        if self._removed or self._unexplained > 0:
            # A large registry that changes all the time is not read again at once; see `_walk`.
            self.walk_at = max(self._context.now(), self._walk_not_before)

    def _depth(self) -> int:
        """Return the rank, from the lowest score, of the page above which entries are unknown.

        The size is read first: entries that join on top meanwhile can only make the rank too low.
        """
        size, total, depth = self._context.page_size, self._context.redis.zcard(self._key), 1
        while self._unknown(self._page(depth)):
            depth += 1
            self._context.breathe()
        return max(0, total - depth * size)

    def _ascend(self, rank: int) -> None:
        """Report from this rank to the top, oldest first.

        Ranks from below do not move when entries join on top. Each page begins with the last member of the previous one.
        If that member is missing, an entry below was removed and entries may have been skipped.
        """
        size, last = self._context.page_size, ""
        while page := self._context.redis.zrange(self._key, rank, size):
            if last and last not in dict(page):
                self._removed = True
            self._report(self._unknown(page))
            if len(page) < size:
                break
            last, rank = page[-1][0], rank + size - 1
            self._context.breathe()

    def walk(self, *, prune: bool = False) -> None:
        """Read the whole registry. With ``prune``, forget members that left it long ago."""
        self.reading = True
        try:
            self._walk(prune=prune)
        finally:
            self.reading = False

    def _walk(self, *, prune: bool) -> None:
        now, size = self._context.now, self._context.page_size
        began, spent, cursor, new = now(), 0.0, -1, 0
        doubts = self._doubt.count
        # Every change announced so far is found by this walk, or was removed again.
        self.walk_at, self._removed, self._unexplained = None, False, 0
        while cursor != 0:
            since = now()
            cursor, page = self._context.redis.zscan(self._key, max(cursor, 0), size)
            # A page may be larger than requested and contain a member twice.
            entries = list(dict(page).items())
            for start in range(0, len(entries), size):
                part = entries[start : start + size]
                unknown = self._unknown(part)
                if prune:
                    self._context.store.found(self.name, [member for member, _ in part], began)
                spent += now() - since
                found = self._report(unknown)
                new += found
                self._unexplained += found  # announced before the walk, so it explains no later announcement
                since = now()
            if self.pending:  # read new entries without waiting for the end of the walk
                self.pending = False
                self._diff()
            self._context.breathe()
        if prune:
            self._prune(began)
            self._walked_at = began
        self._unexplained = max(self._unexplained, 0)
        self._size = self._context.redis.zcard(self._key)
        if self._doubt.count == doubts:
            self._doubt.clear()
        # A walk that found entries may have missed some, so the next one may follow soon. After announced walks that
        # found nothing, walking takes at most a tenth of the time.
        self._walk_not_before = now() + max(1.0, spent if new or prune else 10 * spent)

    def _prune(self, began: float) -> None:
        """Forget members that left the registry long ago.

        A job whose results RQ still keeps is not forgotten. If it fails again, its old failures must not be reported
        again.
        """
        store, size = self._context.store, self._context.page_size
        while stale := store.stale(self.name, began - KEEP_S, size):
            kept = self._context.redis.have_results(stale) if self.name == "failed" else [False] * len(stale)
            store.found(self.name, [member for member, keep in zip(stale, kept, strict=True) if keep], began)
            store.forget(self.name, [member for member, keep in zip(stale, kept, strict=True) if not keep])
            self._context.breathe()

    def sweep(self, *, touched: bool, unheard: bool) -> None:
        """Read the registry without a notification, because some commands (DEL, RENAME, FLUSHDB) cause none.
        ``touched``: a key changed since the last sweep. ``unheard``: no notification arrived for that change."""
        if self._context.now() - self._walked_at >= WALK_S:
            self.walk(prune=True)
        elif touched and self._size < self._context.page_size:
            self.diff()
        elif touched and (unheard or self._removed or self._context.redis.zcard(self._key) != self._size):
            self.walk()

    def _page(self, number: int) -> list[Member]:
        size = self._context.page_size
        return self._context.redis.zrevrangebyscore(self._key, number * size, size)

    def _unknown(self, page: Sequence[Member]) -> list[Unknown]:
        known = self._context.store.look(self.name, [member for member, _ in page])
        return [
            ((member, score), known.get(member)) for member, score in page if self._is_new(score, known.get(member))
        ]

    def _is_new(self, score: float, seen: Seen | None) -> bool:
        return seen is None or seen.score != score or self._doubt.covers(seen)

    def _report(self, unknown: Sequence[Unknown]) -> int:
        """Read these jobs and report what is new. Return how many entries are new or have a new score."""
        if not unknown:
            return 0
        context, read_at = self._context, self._context.now()
        records = context.redis.jobs(
            [member for (member, _), _ in unknown], running=self.name == "canceled", payload=context.payload
        )
        verdicts = [
            self._verdict(record, score, seen) for record, ((_, score), seen) in zip(records, unknown, strict=True)
        ]
        reports = [report for verdict in verdicts for report in verdict.reports]
        context.publish(
            self.name,
            reports,
            [
                Seen(member, score, verdict.seen, read_at)
                for verdict, ((member, score), _) in zip(verdicts, unknown, strict=True)
            ],
            [follow for verdict in verdicts for follow in verdict.follow],
            [member for verdict in verdicts for member in verdict.unfollow],
        )
        self._doubt.read(read_at)
        self._read_at = context.now()
        new = sum(seen is None or seen.score != score for (_, score), seen in unknown)
        self._unexplained -= new
        self.reported += len(reports)
        return new

    def _verdict(self, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
        try:
            return self._judge(self._context, record, score, seen)
        except Exception as error:  # noqa: BLE001  (a record may hold anything; other jobs must still be reported)
            log.warning("the record of a job is invalid", job=clean_text(record.job_id), error=type(error).__name__)
            if seen is not None and seen.score == score:
                return Verdict(seen.seen)
            report = unreadable(
                record.job_id, "canceled" if self.name == "canceled" else "failed", score, self._context.now()
            )
            return Verdict(report.identity, [report])
