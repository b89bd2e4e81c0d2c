"""The failed and the canceled registry against what was reported of them.

A notification names the key and never the member, so each one means *look*: windows from the highest score down until
everything in one is known, the lowest window (``failure_ttl=-1`` is scored -1), and the whole registry window by
window when its size does not add up or something was removed. No read is larger than a window.

A score says when an entry expires, in whole seconds. An entry that was removed and put back can therefore look
untouched: when its score says nothing, or it was looked at just before. A removal makes such entries doubtful, and
doubtful entries are looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from headway.watcher.logic import (
    ADDITIONS,
    Report,
    cancellation,
    failure,
    failure_without_result,
    fresh_failures,
    split_member,
)
from headway.watcher.ports import Member, RedisProto, RqJobRecord
from headway.watcher.publisher import Publisher, event_id
from headway.watcher.store import Follow, ProcessedStore, Registry, Seen

#: An entry looked at this shortly before the newest one may have changed without its score showing it.
DOUBT_S = 5.0

#: How long a member that left its registry is remembered: it may be back, or a window may have missed it.
KEEP_S = 86_400.0

#: The whole registry is gone through at least this often, so that what left it is forgotten one day.
WALK_S = 86_400.0


@dataclass(slots=True)
class QueueContext:
    """What the views of one queue share: where to look, where to tell, and whose outcome is awaited."""

    queue: str
    redis: RedisProto
    store: ProcessedStore
    publisher: Publisher
    #: Redis's clock.
    now: Callable[[], float]
    page_size: int
    baseline: float
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
            self.publisher.publish(self.queue, reports)
        self.store.mark(registry, rows, follow, unfollow)
        for member in unfollow:
            self.follows.pop(member, None)
        for one in follow:
            self.follows[one.member] = one


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one entry comes to: how far it is known now, and what is to be reported."""

    seen: str
    reports: Sequence[Report] = ()
    follow: Sequence[Follow] = ()
    unfollow: Sequence[str] = ()


Judge = Callable[[QueueContext, RqJobRecord, float, Seen | None], Verdict]


class RegistryView:
    """One registry of finished business. `pending` and `walk_at` say what there is to do."""

    def __init__(self, name: Registry, key: str, context: QueueContext, judge: Judge) -> None:
        self.name = name
        self._key = key
        self._context = context
        self._judge = judge
        self.pending = False
        self.walk_at: float | None = None
        self._removed = False
        self._live = 0
        self._newest = context.store.newest(name)
        #: Entries looked at between these two moments are doubtful.
        self._doubt_from = inf
        self._doubt_since = 0.0
        self._walked_at = 0.0
        self._walk_not_before = 0.0
        self.reported = 0
        self._doubt()  # whatever happened while no watcher ran happened without a hint

    def hint(self, command: str) -> None:
        """Something happened to the key. A removal alone tells nobody anything; it is remembered for the next look."""
        if command in ADDITIONS:
            self.pending = True
        else:
            self._removed = True
            self._doubt()

    def diff(self) -> None:
        """Report what is new. What changes meanwhile hints again, so the next round sees it."""
        self.pending = False
        size = self._context.page_size
        first = self._window(0)
        if len(first) < size:  # that was all of it
            self._report(first)
            self._live, self._removed, self.walk_at = len(first), False, None
            self._doubt_from = inf
            return
        depth, page = 0, first
        while page and self._unknown(page):
            depth += 1
            page = self._window(depth)
        for number in reversed(range(depth)):  # the deepest is the oldest
            self._report(first if depth == 1 else self._window(number))
        self._report(self._context.redis.zrange(self._key, 0, size))
        if self._removed or self._context.redis.zcard(self._key) != self._live:
            # A large registry in turmoil is not walked again at once, but after ten times as long as it took.
            self.walk_at = max(self._context.now(), self._walk_not_before)

    def walk(self) -> None:
        """Go through all of it, window by window, from the lowest rank: new entries join behind us."""
        began, count = self._context.now(), 0
        self.walk_at, self._removed = None, False
        while page := self._context.redis.zrange(self._key, count, self._context.page_size):
            self._report(page)
            self._context.store.found(self.name, [member for member, _ in page], began)
            count += len(page)
            if len(page) < self._context.page_size:
                break
        self._context.store.prune(self.name, began - KEEP_S)
        self._live, self._walked_at = count, began
        self._doubt_from = inf
        ended = self._context.now()
        self._walk_not_before = ended + max(1.0, 10 * (ended - began))

    def sweep(self) -> None:
        """The look that no notification asked for: some commands (DEL, RENAME, FLUSHDB) are silent. It costs one
        command when nothing changed."""
        if self._context.now() - self._walked_at >= WALK_S:
            self.walk()
        elif self._live < self._context.page_size:
            self.diff()
        elif self._removed or self._context.redis.zcard(self._key) != self._live:
            self.walk()

    def _doubt(self) -> None:
        """From now on, until all of it was gone through."""
        self._doubt_from = min(self._doubt_from, self._newest - DOUBT_S)
        self._doubt_since = self._context.now()

    def _window(self, number: int) -> list[Member]:
        size = self._context.page_size
        return self._context.redis.zrevrangebyscore(self._key, number * size, size)

    def _unknown(self, page: Sequence[Member]) -> list[tuple[Member, Seen | None]]:
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

    def _report(self, page: Sequence[Member]) -> None:
        unknown = self._unknown(page)
        if not unknown:
            return
        looked_at = self._context.now()
        records = self._context.redis.jobs([member for (member, _), _ in unknown], running=self.name == "canceled")
        verdicts = [
            self._judge(self._context, record, score, seen)
            for record, ((_, score), seen) in zip(records, unknown, strict=True)
        ]
        reports = [report for verdict in verdicts for report in verdict.reports]
        self._context.publish(
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
        self._live += sum(seen is None for _, seen in unknown)
        self.reported += len(reports)


def judge_failed(context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
    """Every failed execution since the last one reported is reported, even if the job failed several times meanwhile."""
    results = fresh_failures(record, seen.seen if seen else None, context.baseline)
    if not results:
        return _judge_failed_without_result(context, record, score, seen)
    reports, unfollow = [], []
    for result in results:
        report = failure(record, result)
        earlier = _earlier(context.follows, report)
        unfollow += [follow.member for follow in earlier]
        if report.kind == "lost" and any(follow.kind == "lost" for follow in earlier):
            continue  # RQ's clean-up has found out what was reported when the lease lapsed
        reports.append(replace(report, follows=earlier[0].event) if earlier else report)
    return Verdict(results[-1].id, reports, unfollow=unfollow)


def _judge_failed_without_result(
    context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None
) -> Verdict:
    if seen is not None and (seen.score == score or any(result.outcome == "failed" for result in record.results)):
        return Verdict(seen.seen)  # it was looked at again and there is nothing new
    identity = record.ended_at or f"score {score:.0f}"
    if seen is not None and seen.seen == identity:
        return Verdict(identity)
    return Verdict(identity, [failure_without_result(record, identity, context.now())])


def judge_canceled(context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
    """A cancellation is one per time the job was put into the queue. If it runs, its outcome is awaited."""
    if record.status == "finished" and record.results and not record.running:
        record = replace(record, running=record.results[0].execution_id)  # it ran, and finished before we looked
    identity = record.enqueued_at or record.created_at or f"score {score:.0f}"
    if seen is not None and (seen.seen == identity or (not record.exists and seen.score == score)):
        return Verdict(seen.seen)
    report = cancellation(record, identity, score, context.now())
    if not record.running:
        return Verdict(identity, [report])
    member = f"{record.job_id}:{record.running}"
    earlier = context.follows.get(member)
    report = replace(report, follows=earlier.event) if earlier else report
    return Verdict(identity, [report], [Follow(member, "canceled", event_id(context.queue, report))])


def _earlier(follows: Mapping[str, Follow], report: Report) -> list[Follow]:
    """What was reported of this execution before. RQ's clean-up knows no execution: then it is the job that counts."""
    if report.execution_id:
        follow = follows.get(f"{report.job_id}:{report.execution_id}")
        return [follow] if follow else []
    return [follow for member, follow in follows.items() if split_member(member)[0] == report.job_id]
