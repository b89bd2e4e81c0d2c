"""What an entry of the failed or canceled registry means, and what is reported about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.watcher.ports import RedisProto, RqJobRecord
from headway.watcher.publisher import Publisher, event_id
from headway.watcher.reports import (
    Report,
    cancellation,
    clean,
    entry_name,
    failure,
    failure_without_result,
    fresh_failures,
    put_back_since,
    split_member,
)
from headway.watcher.store.contract import Follow, ProcessedStore, Registry, Seen


@dataclass(slots=True)
class QueueContext:
    """What the views of one queue share: connections, settings, and the executions whose outcome is awaited."""

    queue: str
    redis: RedisProto
    store: ProcessedStore
    publisher: Publisher
    #: Redis's clock.
    now: Callable[[], float]
    #: Called between two pages of a long read. It receives and reads announcements, and raises to stop.
    breathe: Callable[[], None]
    page_size: int
    #: When the queue was first watched.
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
        """Publish, then record. A crash in between publishes again with the same ids; the other order would lose events."""
        if reports:
            self.publisher.publish(self.queue, [clean(report) for report in reports])
        self.store.mark(registry, rows, follow, unfollow)
        for member in unfollow:
            self.follows.pop(member, None)
        for one in follow:
            self.follows[one.member] = one

    def follow(self, member: str, kind: str, report: Report) -> Follow:
        """Return the row that awaits the outcome of an execution, from now on."""
        return Follow(member, kind, event_id(self.queue, clean(report)), self.now())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of judging one entry: how far it is reported now, and what to report and to follow."""

    seen: str
    reports: Sequence[Report] = ()
    follow: Sequence[Follow] = ()
    unfollow: Sequence[str] = ()


Judge = Callable[[QueueContext, RqJobRecord, float, Seen | None], Verdict]


def judge_failed(context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
    """Report every failed execution since the last one reported, even if the job failed several times meanwhile."""
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
            continue  # reported when the lease expired, before RQ's clean-up found it
        report = replace(report, follows=earlier[0].event) if earlier else report
        if report.kind == "lost":
            # RQ has given the execution up, but a worker that was only paused may still finish it.
            follow += [context.follow(one.member, "lost", report) for one in earlier]
        reports.append(report)
    return Verdict(results[-1].id, reports, follow, unfollow)


def _judge_failed_without_result(
    context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None
) -> Verdict:
    if seen is not None and (seen.score == score or any(result.outcome == "failed" for result in record.results)):
        return Verdict(seen.seen)  # everything is reported
    identity = record.ended_at or entry_name(score)
    if seen is not None and seen.seen == identity:
        return Verdict(identity)
    return Verdict(identity, [failure_without_result(record, identity, context.now())])


def judge_canceled(context: QueueContext, record: RqJobRecord, score: float, seen: Seen | None) -> Verdict:
    """Report each cancellation once: it is identified by member and score, whatever happens to the job afterwards.

    If the job is running, its outcome is awaited.
    """
    if seen is not None and seen.score == score:
        return Verdict(seen.seen)
    if put_back_since(record, score):
        record = replace(record, running="")  # the current execution was not canceled
    elif record.status == "finished" and record.results and not record.running:
        record = replace(record, running=record.results[0].execution_id)  # it ran, and finished before it was read
    identity = entry_name(score)
    report = cancellation(record, identity, score, context.now())
    if not record.running:
        return Verdict(identity, [report])
    member = f"{record.job_id}:{record.running}"
    earlier = context.follows.get(member)
    report = replace(report, follows=earlier.event) if earlier else report
    return Verdict(identity, [report], [context.follow(member, "canceled", report)])


def _earlier(follows: Mapping[str, Follow], report: Report) -> list[Follow]:
    """Return the earlier reports about the same execution. RQ's clean-up names no execution: then the job decides."""
    if report.execution_id:
        follow = follows.get(f"{report.job_id}:{report.execution_id}")
        return [follow] if follow else []
    return [follow for member, follow in follows.items() if split_member(member)[0] == report.job_id]
