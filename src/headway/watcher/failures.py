"""The failed jobs in RQ's registries, grouped by cause, and requeueing the jobs of a cause.

RQ keeps a failed job for its ``failure_ttl``, with the traceback of its last run. Jobs that failed with the same type,
message (without parts that differ from job to job) and frame of the user's code have one cause. Nothing a job contains is
unpickled, and an invalid record affects only its own job.
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
from headway.watcher.reports import clean_text, exception_text, result_order, summary

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.config import Config
    from headway.watcher.ports import RqJobRecord

#: Maximum number of failed jobs read per queue, newest first. So it is also the maximum that is requeued at once.
READ_LIMIT: Final = 1000
_PAGE = 200
_FRAME = re.compile(r'^ +File "(?P<file>[^"\n]+)", line \d+, in (?P<name>\S+)', re.MULTILINE)
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen ")


class FailedJob(NamedTuple):
    """A failed job, and when it failed (seconds since 1970)."""

    id: str
    at: float


@dataclass(frozen=True, slots=True)
class FailedCause:
    """Jobs of one RQ queue that failed for the same cause."""

    #: Derived from the other fields: the same cause has the same id in every read.
    id: str
    queue: str
    type: str
    message: str
    frame: str
    #: Most recent failure first.
    jobs: tuple[FailedJob, ...]
    first_seen: datetime
    last_seen: datetime
    #: The message of the most recent failure.
    error: str


@dataclass(frozen=True, slots=True)
class FailedJobs:
    """The failed jobs of all followed queues."""

    causes: tuple[FailedCause, ...]
    #: The number of failed jobs, and the number that was read.
    total: int
    looked_at: int


@dataclass(frozen=True, slots=True)
class Followed:
    """The RQ deployment that the watcher watches."""

    redis: str
    queues: tuple[str, ...]


def followed(config: Config, database: Database) -> Followed | None:
    """Return the configured queues and those that a watcher has recorded in this database."""
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
    """Return the causes, largest first. Raises `Unavailable` if Redis does not answer within two seconds."""
    from headway.watcher.adapters import RqAdapter, connect

    redis, groups, total, looked_at = connect(followed.redis, timeout=2.0), dict[str, _Group](), 0, 0
    try:
        for queue in followed.queues:
            key = RqAdapter().registries(queue).failed
            members = [member for member, _ in redis.zrevrangebyscore(key, 0, READ_LIMIT)]
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
    """Return ``module.py:function`` of the innermost frame outside libraries, or an empty text."""
    frames = [found for found in _FRAME.finditer(text) if not _LIBRARY.search(found["file"])]
    return clean_text(f"{frames[-1]['file'].rpartition('/')[2]}:{frames[-1]['name']}", 120) if frames else ""


def requeue(followed: Followed, cause: FailedCause, jobs: Sequence[FailedJob]) -> list[str]:
    """Requeue jobs of a cause. Return those that RQ requeued, without jobs that are requeued, deleted or damaged already.

    RQ first removes a job from the registry and then enqueues it. A crash between the two leaves only its record. Jobs
    are requeued one by one, so this affects at most one job.
    """
    from headway.watcher.adapters import requeue_failed

    return requeue_failed(followed.redis, cause.queue, [job.id for job in jobs])


def cause_of(found: FailedJobs, id: str) -> FailedCause:
    """Return the cause with an id. Raises `NotFound`."""
    for cause in found.causes:
        if cause.id == id:
            return cause
    raise NotFound("No failed job of RQ has this cause now.", hint="Nothing was changed. Reload the causes.")
