"""The failed and the canceled registry against what was reported of them.

A notification names the key and never the member, so each one means *look*: windows from the highest score down until
everything in one is known, then the lowest window (``failure_ttl=-1`` is scored -1). Every addition that was announced
has to be explained by an entry that is new or has a new score. When one is not, or something was removed, the whole
registry is gone through by ZSCAN, which gives every member that is there from beginning to end, whatever is added,
removed or scored anew meanwhile; what is added meanwhile is announced again. No read is larger than a window.

Entries are compared by member and score. A score is in whole seconds: an entry that was removed and put back can
therefore look untouched, when its score says nothing (-1), or it was looked at just before. A removal makes such
entries doubtful, and doubtful entries are looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from headway.telemetry import Log
from headway.watcher.logic import (
    ADDITIONS,
    Report,
    cancellation,
    clean,
    clean_text,
    entry_name,
    failure,
    failure_without_result,
    fresh_failures,
    put_back_since,
    split_member,
    unreadable,
)
from headway.watcher.ports import Member, RedisProto, RqJobRecord
from headway.watcher.publisher import Publisher, event_id
from headway.watcher.store import Follow, ProcessedStore, Registry, Seen

log = Log("watcher")

#: An entry looked at this shortly before the newest one may have changed without its score showing it.
DOUBT_S = 5.0

#: An announcement this long after a look is of something that happened after it.
LATE_S = 2.0

#: How long a member that left its registry is remembered: it may be back. Also how long the outcome of a lost execution
#: that RQ gave up is awaited.
KEEP_S = 86_400.0

#: The whole registry is gone through at least this often, so that what left it is forgotten one day.
WALK_S = 86_400.0


@dataclass(slots=True)
class QueueContext:
    """What the views of one queue share: where to look, where to report, and whose outcome is awaited."""

    queue: str
    redis: RedisProto
    store: ProcessedStore
    publisher: Publisher
    #: Redis's clock.
    now: Callable[[], float]
    #: Called between two windows of anything long: takes what was announced, looks at it, and raises to stop.
    breathe: Callable[[], None]
    page_size: int
    baseline: float
    #: Whether events repeat arguments of the job.
    payload: bool = False
    follows: dict[str, Follow] = field(default_factory=dict)

    def publish(
        self,
        registry: Registry,
        reports: Sequence[Report],
        rows: Sequence[Seen],
        follow: Sequence[Follow] = (),
        unfollow: Sequence[str] = (),
    ) -> None:
        """Publish, then note it. Dying in between publishes again, with the same ids; the other order would lose."""
        if reports:
            self.publisher.publish(self.queue, [clean(report) for report in reports])
        self.store.mark(registry, rows, follow, unfollow)
        for member in unfollow:
            self.follows.pop(member, None)
        for one in follow:
            self.follows[one.member] = one

    def follow(self, member: str, kind: str, report: Report) -> Follow:
        """From now on, for what this report says."""
        return Follow(member, kind, event_id(self.queue, clean(report)), self.now())


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one entry comes to: how far it is known now, and what is to be reported."""

    seen: str
    reports: Sequence[Report] = ()
    follow: Sequence[Follow] = ()
    unfollow: Sequence[str] = ()


Judge = Callable[[QueueContext, RqJobRecord, float, Seen | None], Verdict]
Unknown = tuple[Member, Seen | None]


class RegistryView:
    """One registry of finished business. `pending` and `walk_at` say what there is to do."""

    def __init__(self, name: Registry, key: str, context: QueueContext, judge: Judge) -> None:
        self.name = name
        self._key = key
        self._context = context
        self._judge = judge
        self.pending = False
        #: It is being looked at: what is announced meanwhile is looked at afterwards.
        self.looking = False
        self.walk_at: float | None = None
        self._removed = False
        #: Announced additions less the entries that explain them. Entries can be found before they are announced.
        self._unexplained = 0
        self._size = 0
        self._newest = context.store.newest(name)
        #: Entries looked at between these two moments are doubtful.
        self._doubt_from = inf
        self._doubt_since = 0.0
        self._doubts = 0
        self._looked_at = 0.0
        self._walked_at = 0.0
        self._walk_not_before = 0.0
        self.reported = 0
        self._doubt()  # whatever happened while no watcher ran happened without a hint

    def hint(self, command: str) -> None:
        """Something happened to the key. A removal alone tells nobody anything; it is remembered for the next look."""
        if command in ADDITIONS:
            self.pending = True
            if self._unexplained < 0 and self._context.now() - self._looked_at > LATE_S:
                self._unexplained = 0
            self._unexplained += 1
        else:
            self._removed = True
            self._doubt()

    def diff(self) -> None:
        """Report what is new. What changes meanwhile hints again, so the next round sees it."""
        self.pending, self.looking = False, True
        try:
            self._diff()
        finally:
            self.looking = False

    def _diff(self) -> None:
        size, redis = self._context.page_size, self._context.redis
        first = self._window(0)
        if len(first) < size:  # that was all of it
            self._report(self._unknown(first))
            self._size, self._removed, self._unexplained, self.walk_at = len(first), False, 0, None
            self._doubt_from = inf
            return
        unknown = self._unknown(first)
        if unknown and self._unknown(self._window(1)):
            self._ascend(self._depth())
        else:
            self._report(unknown)
        rank = 0
        while self._report(self._unknown(redis.zrange(self._key, rank, size))):
            rank += size - 1
            self._context.breathe()
        self._size = redis.zcard(self._key)
        if self._removed or self._unexplained > 0:
            # A large registry in turmoil is not walked again at once; see `_walk`.
            self.walk_at = max(self._context.now(), self._walk_not_before)

    def _depth(self) -> int:
        """The rank, counted from the lowest score, of the window above which something is unknown.

        The size is read first: what joins on top while we go down only makes that rank too low, never too high.
        """
        size, total, depth = self._context.page_size, self._context.redis.zcard(self._key), 1
        while self._unknown(self._window(depth)):
            depth += 1
            self._context.breathe()
        return max(0, total - depth * size)

    def _ascend(self, rank: int) -> None:
        """Report from this rank to the top, the oldest first. Ranks counted from below do not move when something
        joins on top. Each window begins with the last member of the one before: if that is missing, something was
        removed below and a part may have been skipped."""
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
        """Go through all of it. With ``prune`` forget what left it long ago."""
        self.looking = True
        try:
            self._walk(prune=prune)
        finally:
            self.looking = False

    def _walk(self, *, prune: bool) -> None:
        now, size = self._context.now, self._context.page_size
        began, spent, cursor, new = now(), 0.0, -1, 0
        doubts = self._doubts
        # What was announced up to now is there to be found, or gone.
        self.walk_at, self._removed, self._unexplained = None, False, 0
        while cursor != 0:
            since = now()
            cursor, page = self._context.redis.zscan(self._key, max(cursor, 0), size)
            # A window may be somewhat larger than asked for, and name a member twice.
            entries = list(dict(page).items())
            for start in range(0, len(entries), size):
                part = entries[start : start + size]
                unknown = self._unknown(part)
                if prune:
                    self._context.store.found(self.name, [member for member, _ in part], began)
                spent += now() - since
                found = self._report(unknown)
                new += found
                self._unexplained += found  # it may have been announced before, so it explains nothing from now on
                since = now()
            if self.pending:  # what was just announced does not wait until we are through
                self.pending = False
                self._diff()
            self._context.breathe()
        if prune:
            self._prune(began)
            self._walked_at = began
        self._unexplained = max(self._unexplained, 0)
        self._size = self._context.redis.zcard(self._key)
        if self._doubts == doubts:
            self._doubt_from = inf
        # One that found something may have missed something, and is repeated soon. One that was asked for by what was
        # announced, and found nothing, takes at most a tenth of the time. One that nothing asked for says nothing about
        # what will be announced.
        self._walk_not_before = now() + max(1.0, spent if new or prune else 10 * spent)

    def _prune(self, began: float) -> None:
        """Forget what left the registry long ago, unless RQ still keeps results: the job may fail again, and what was
        reported of it must not be reported again then."""
        store, size = self._context.store, self._context.page_size
        while stale := store.stale(self.name, began - KEEP_S, size):
            kept = self._context.redis.have_results(stale) if self.name == "failed" else [False] * len(stale)
            store.found(self.name, [member for member, keep in zip(stale, kept, strict=True) if keep], began)
            store.forget(self.name, [member for member, keep in zip(stale, kept, strict=True) if not keep])
            self._context.breathe()

    def sweep(self, *, touched: bool, unheard: bool) -> None:
        """The look that no notification asked for: some commands (DEL, RENAME, FLUSHDB) are silent. ``touched``:
        something was changed since the last one; ``unheard``: and nothing was announced."""
        if self._context.now() - self._walked_at >= WALK_S:
            self.walk(prune=True)
        elif touched and self._size < self._context.page_size:
            self.diff()
        elif touched and (unheard or self._removed or self._context.redis.zcard(self._key) != self._size):
            self.walk()

    def _doubt(self) -> None:
        """From now on, until all of it was gone through."""
        self._doubt_from = min(self._doubt_from, self._newest - DOUBT_S)
        self._doubt_since = self._context.now()
        self._doubts += 1

    def _window(self, number: int) -> list[Member]:
        size = self._context.page_size
        return self._context.redis.zrevrangebyscore(self._key, number * size, size)

    def _unknown(self, page: Sequence[Member]) -> list[Unknown]:
        known = self._context.store.look(self.name, [member for member, _ in page])
        return [
            ((member, score), known.get(member))
            for member, score in page
            if self._needs_a_look(score, known.get(member))
        ]

    def _needs_a_look(self, score: float, seen: Seen | None) -> bool:
        if seen is None or seen.score != score:
            return True
        could_hide = score < 0 or seen.at >= self._doubt_from
        return could_hide and seen.at <= self._doubt_since

    def _report(self, unknown: Sequence[Unknown]) -> int:
        """Look these up and report what there is to report; how many of them are new or scored anew."""
        if not unknown:
            return 0
        context, looked_at = self._context, self._context.now()
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
                Seen(member, score, verdict.seen, looked_at)
                for verdict, ((member, score), _) in zip(verdicts, unknown, strict=True)
            ],
            [follow for verdict in verdicts for follow in verdict.follow],
            [member for verdict in verdicts for member in verdict.unfollow],
        )
        self._newest = looked_at
        self._looked_at = context.now()
        new = sum(seen is None or seen.score != score for (_, score), seen in unknown)
        self._unexplained -= new
        self.reported += len(reports)
        return new

    def _verdict(self, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
        try:
            return self._judge(self._context, record, score, seen)
        except Exception as error:  # noqa: BLE001 - a record may hold anything; it costs the job's own event only
            log.warning("a job's record makes no sense", job=clean_text(record.job_id), error=type(error).__name__)
            if seen is not None and seen.score == score:
                return Verdict(seen.seen)
            report = unreadable(
                record.job_id, "canceled" if self.name == "canceled" else "failed", score, self._context.now()
            )
            return Verdict(report.identity, [report])


def judge_failed(context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
    """Every failed execution since the last one reported is reported, even if the job failed several times meanwhile."""
    results = fresh_failures(record, seen.seen if seen else None, context.baseline)
    if not results:
        return _judge_failed_without_result(context, record, score, seen)
    reports: list[Report] = []
    follow: list[Follow] = []
    unfollow: list[str] = []
    for result in results:
        report = failure(record, result)
        earlier = _earlier(context.follows, report)
        if report.kind != "lost":
            unfollow += [one.member for one in earlier]
        elif any(one.kind == "lost" for one in earlier):
            continue  # RQ's clean-up has found out what was reported when the lease lapsed
        report = replace(report, follows=earlier[0].event) if earlier else report
        if report.kind == "lost":
            # RQ gave the execution up; a worker that was only paused may finish it all the same.
            follow += [context.follow(one.member, "lost", report) for one in earlier]
        reports.append(report)
    return Verdict(results[-1].id, reports, follow, unfollow)


def _judge_failed_without_result(
    context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None
) -> Verdict:
    if seen is not None and (seen.score == score or any(result.outcome == "failed" for result in record.results)):
        return Verdict(seen.seen)  # it was looked at again and there is nothing new
    identity = record.ended_at or entry_name(score)
    if seen is not None and seen.seen == identity:
        return Verdict(identity)
    return Verdict(identity, [failure_without_result(record, identity, context.now())])


def judge_canceled(context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
    """A cancellation is one entry, by member and score: what became of the job afterwards (enqueued again, running)
    does not make it another one. If it runs, its outcome is awaited."""
    if seen is not None and seen.score == score:
        return Verdict(seen.seen)
    if put_back_since(record, score):
        record = replace(record, running="")  # what runs now was not canceled
    elif record.status == "finished" and record.results and not record.running:
        record = replace(record, running=record.results[0].execution_id)  # it ran, and finished before we looked
    identity = entry_name(score)
    report = cancellation(record, identity, score, context.now())
    if not record.running:
        return Verdict(identity, [report])
    member = f"{record.job_id}:{record.running}"
    earlier = context.follows.get(member)
    report = replace(report, follows=earlier.event) if earlier else report
    return Verdict(identity, [report], [context.follow(member, "canceled", report)])


def _earlier(follows: Mapping[str, Follow], report: Report) -> list[Follow]:
    """What was reported of this execution before. RQ's clean-up knows no execution: then it is the job that counts."""
    if report.execution_id:
        follow = follows.get(f"{report.job_id}:{report.execution_id}")
        return [follow] if follow else []
    return [follow for member, follow in follows.items() if split_member(member)[0] == report.job_id]
