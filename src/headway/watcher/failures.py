"""What stands failed in RQ's registries, by cause, and putting one cause back into its queue.

RQ keeps a failed job until its ``failure_ttl`` is over, with the traceback of its last run. Jobs that failed alike (type,
message without what differs from job to job, place in the user's code) are one cause. Nothing a job contains is
unpickled, and a record that makes no sense costs itself only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from headway.core.failure import normalise
from headway.errors import NotFound
from headway.watcher.logic import clean_text, exception_text, result_order, summary

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.config import Config
    from headway.watcher.ports import RqJobRecord

#: Failed jobs of a queue that are looked at, the newest in the registry first; hence also the most that are put back at once.
LOOKED_AT: Final = 1000
_PAGE = 200
_PLACE = re.compile(r'^ +File "(?P<file>[^"\n]+)", line \d+, in (?P<name>\S+)', re.MULTILINE)
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen ")


class FailedJob(NamedTuple):
    """One job, and when it failed (seconds)."""

    id: str
    at: float


@dataclass(frozen=True, slots=True)
class FailedCause:
    """Jobs of one RQ queue that failed alike."""

    #: Follows from what it is: the same cause has the same id at the next look.
    id: str
    queue: str
    type: str
    message: str
    frame: str
    #: The one that failed last first.
    jobs: tuple[FailedJob, ...]
    first_seen: datetime
    last_seen: datetime
    #: The text of the newest one, as it stands.
    error: str


@dataclass(frozen=True, slots=True)
class FailedJobs:
    """What the failed registries of the queues hold."""

    causes: tuple[FailedCause, ...]
    #: How many jobs there are, and how many of them were looked at.
    total: int
    looked_at: int


@dataclass(frozen=True, slots=True)
class Followed:
    """The RQ deployment that the watcher follows."""

    redis: str
    queues: tuple[str, ...]


def followed(config: Config, database: Database) -> Followed | None:
    """Which queues of which Redis: those that are configured, and those that a watcher noted in this database."""
    address = config.text("watch_redis")
    suffix = f"@{_number(address)}"
    noted = [str(name) for (name,) in database.all("SELECT queue FROM watchers ORDER BY queue LIMIT 100")]
    named = [name.removesuffix(suffix) for name in noted if name.endswith(suffix)]
    queues = tuple(dict.fromkeys([*config.texts("watch_queues"), *named]))
    return Followed(address, queues) if queues else None


def _number(address: str) -> int:
    parts = urlsplit(address)
    text = parse_qs(parts.query).get("db", [""])[-1] or (parts.path.strip("/") if parts.scheme != "unix" else "")
    return int(text) if text.isdecimal() else 0


def read_failures(followed: Followed) -> FailedJobs:
    """The causes, those with most jobs first. A Redis that does not answer within two seconds is `Unavailable`."""
    from headway.watcher.adapters import RqAdapter, connect

    redis, groups, total, looked_at = connect(followed.redis, timeout=2.0), dict[str, _Group](), 0, 0
    try:
        for queue in followed.queues:
            key = RqAdapter().registries(queue).failed
            members = [member for member, _ in redis.zrevrangebyscore(key, 0, LOOKED_AT)]
            total += redis.zcard(key)
            looked_at += len(members)
            for start in range(0, len(members), _PAGE):
                for record in redis.jobs(members[start : start + _PAGE], running=False):
                    _note(groups, queue, record)
    finally:
        redis.close()
    causes = sorted((group.cause() for group in groups.values()), key=lambda cause: (-len(cause.jobs), cause.id))
    return FailedJobs(tuple(causes), max(total, looked_at), looked_at)


@dataclass(slots=True)
class _Group:
    id: str
    queue: str
    type: str
    message: str
    frame: str
    jobs: list[tuple[float, str, str]]

    def cause(self) -> FailedCause:
        ordered = sorted(self.jobs, reverse=True)
        return FailedCause(
            self.id, self.queue, self.type, self.message, self.frame, tuple(FailedJob(job, at) for at, job, _ in ordered),
            datetime.fromtimestamp(ordered[-1][0], UTC), datetime.fromtimestamp(ordered[0][0], UTC), ordered[0][2],
        )  # fmt: skip


def _note(groups: dict[str, _Group], queue: str, record: RqJobRecord) -> None:
    failed = next((result for result in record.results if result.outcome == "failed"), None)
    text = "" if failed is None else exception_text(failed.exception)
    kind, line = summary(text)
    at = 0.0 if failed is None else result_order(failed.id)[0] / 1000
    line = clean_text(line) or ("RQ kept no result of it" if record.exists else "its record is gone")
    message = normalise(line.removeprefix(f"{kind}:").strip() if kind else line, record.job_id)
    kind = clean_text(kind).rpartition(".")[2] or "Job failed"
    frame = own_frame(text)
    id = sha256(f"{queue}\0{kind}\0{message}\0{frame}".encode("utf-8", "replace")).hexdigest()[:12]
    group = groups.setdefault(id, _Group(id, queue, kind, message, frame, []))
    group.jobs.append((min(at, 253_402_300_000.0), record.job_id, line))


def own_frame(text: str) -> str:
    """``module.py:function`` of the innermost place that is no library's; empty where there is none."""
    places = [found for found in _PLACE.finditer(text) if not _LIBRARY.search(found["file"])]
    return clean_text(f"{places[-1]['file'].rpartition('/')[2]}:{places[-1]['name']}", 120) if places else ""


def requeue(followed: Followed, cause: FailedCause, jobs: Sequence[FailedJob]) -> list[str]:
    """Put jobs of a cause back into their queue; those that RQ took back. One that somebody else put back, deleted or
    damaged meanwhile is left out.

    RQ takes a job out of the registry first and enqueues it then. Killed between the two it is in neither, and only its
    record stays. Jobs are put back one after another, so it is one job at the most.
    """
    from headway.watcher.adapters import requeue_failed

    return requeue_failed(followed.redis, cause.queue, [job.id for job in jobs])


def cause_of(found: FailedJobs, id: str) -> FailedCause:
    """The cause of that id, or an error that says that nothing was changed."""
    for cause in found.causes:
        if cause.id == id:
            return cause
    raise NotFound("No failed job of RQ has this cause any more.", hint="Nothing was changed; look again.")
