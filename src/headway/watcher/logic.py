"""What a registry, a job's record and a message mean. Pure functions: no connection, no clock."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from math import isfinite
from typing import Literal

from headway.events import Json
from headway.telemetry import redact
from headway.watcher.ports import ResultRecord, RqJobRecord

#: failed: its code raised, or RQ ended it at its timeout. killed: the process that ran it died (a signal, memory).
#: lost: the worker is gone, its lease on the execution lapsed. stuck: runs longer than it may. canceled and stopped:
#: somebody asked for it. The other two are later outcomes of a job that was reported canceled, stuck or lost.
Kind = Literal["failed", "killed", "lost", "stuck", "canceled", "stopped", "finished", "retried", "gone"]

#: user: a person asked for it. system: nobody did.
ErrorKind = Literal["user", "system"]

CANCELED_MESSAGE = "Job canceled"

#: Commands that only add to a sorted set or change a score; whatever else happens to a registry may have removed.
ADDITIONS = frozenset({"zadd", "zincr"})

#: RQ ends a job itself at its timeout; only after this many seconds more is it stuck.
TIMEOUT_GRACE_S = 5.0

_MESSAGE_LIMIT = 500
#: Read of a message before secrets are taken out of it and it is cut; more would only cost time.
_MESSAGE_READ = 4_096
#: Kept of either end of a stored exception; the traceback's head and its last exception are there.
_EXCEPTION_END = 512 * 1024
_EXCEPTION_LIMIT = 16 * 1024 * 1024
_PAYLOAD_LIMIT = 1024 * 1024
_TEXT_LIMIT = 1_000
#: Two of these and the queue's name are an event's id, and PostgreSQL indexes 2,704 bytes. No less than a text of ASCII.
_NAME_BYTES = 1_010
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
#: Where the traceback of the exception that counts begins: at the start, or after what links it to an earlier one.
_TRACEBACK = re.compile(
    r"(?:\A|(?:direct cause of the following exception:|another exception occurred:)[ |]*\n[ |]*\n)"
    r"(?P<margin>[ |]*)(?P<group>\+ Exception Group )?Traceback \(most recent call last\):\n"
)
_FRAME = re.compile(r' +File ".*", line \d+')
# Neither this one nor `_MARGIN` looks beyond its line: what a job says may be half a million empty ones.
_SUBEXCEPTION = re.compile(r"^[|+ -]*\+-+ (?:\d+|\.\.\.) -+\n", re.MULTILINE)
_GROUP_END = re.compile(r"^[|+ -]*\+-+\s*\Z", re.MULTILINE)
_MARGIN = re.compile(r"^ *\| ?", re.MULTILINE)
_ERROR_TYPE = re.compile(r"^([^\W\d][\w.<>]*)(?::|$)")


@dataclass(frozen=True, slots=True)
class Report:
    """One fact about a job, ready to be told."""

    job_id: str
    kind: Kind
    error_kind: ErrorKind
    message: str
    #: What makes it this fact and no other: with the job it is the event's id.
    identity: str
    at: datetime
    error_type: str = ""
    execution_id: str = ""
    worker: str = ""
    enqueued_at: str = ""
    started_at: str = ""
    ended_at: str = ""
    #: It was asked to end while it ran, so it may still end otherwise.
    running: bool = False
    #: Id of the earlier event about the same execution.
    follows: str = ""
    payload: bytes = b""


# ---------------------------------------------------------------------------------------------------------------------
# Settings of the server


def notifies(flags: str) -> bool:
    """Whether ``notify-keyspace-events`` tells changes of sorted sets by key. The server reorders the letters, so
    they are a set: K, and z or everything (A)."""
    return "K" in flags and ("z" in flags or "A" in flags)


def channel(db: int, key: str) -> str:
    return f"__keyspace@{db}__:{key}"


def pattern(db: int, key: str) -> str:
    """The pattern that matches this key's channel and no other: a queue may be called ``q[1]`` or ``jobs*``."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", channel(db, key))


# ---------------------------------------------------------------------------------------------------------------------
# What happened to a job


def result_order(result_id: str) -> tuple[int, int]:
    """A stream id as a pair that compares; (0, 0) for what is none."""
    milliseconds, _, number = result_id.partition("-")
    return (int(milliseconds), int(number)) if milliseconds.isdigit() and number.isdigit() else (0, 0)


def fresh_failures(record: RqJobRecord, seen: str | None, baseline: float) -> list[ResultRecord]:
    """The failed executions that were not reported yet, oldest first.

    Of a job met for the first time those since ``baseline`` (when the watcher first ran, seconds) count, and its
    newest in any case: it is why the job is in the registry.
    """
    failed = [result for result in record.results if result.outcome == "failed"]
    if seen is None:
        first = (int(baseline * 1000), 0)
        fresh = [result for result in failed if result_order(result.id) >= first] or failed[:1]
    else:
        last, kept = result_order(seen), {result_order(result.id) for result in record.results}
        if last not in kept and min(kept, default=last) < last:
            last = (0, 0)  # older ones are there and it is not: a job of this name was made again, by a clock set back
        fresh = [result for result in failed if result_order(result.id) > last]
    return fresh[::-1]


def failure(record: RqJobRecord, result: ResultRecord) -> Report:
    text = exception_text(result.exception)
    kind, error_kind = _kind(text, stopped=record.status == "stopped" and result is record.results[0])
    error_type, message = summary(text)
    return Report(
        job_id=record.job_id,
        kind=kind,
        error_kind=error_kind,
        message=message or "Job failed",
        identity=result.execution_id or result.id,
        at=_time(result_order(result.id)[0] / 1000),
        error_type=error_type,
        execution_id=result.execution_id,
        worker=result.worker,
        enqueued_at=record.enqueued_at,
        # The job's own times are those of its latest execution, the result's those of the one it is about.
        started_at=result.started_at,
        ended_at=result.ended_at,
        payload=record.payload,
    )


def failure_without_result(record: RqJobRecord, identity: str, now: float) -> Report:
    """A job in the failed registry of which RQ kept no result (``failure_ttl=0``, or deleted meanwhile)."""
    return Report(
        job_id=record.job_id,
        kind="stopped" if record.status == "stopped" else "failed",
        error_kind="user" if record.status == "stopped" else "system",
        message="Job failed; RQ kept no result of it" if record.exists else "Job failed; its record is gone",
        identity=identity,
        at=datetime.fromtimestamp(now, UTC),
        worker=record.worker,
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
        payload=record.payload,
    )


def unreadable(job_id: str, kind: Literal["failed", "canceled"], score: float, now: float) -> Report:
    """A job whose record makes no sense: that it failed or was canceled is known all the same."""
    return Report(
        job_id=job_id,
        kind=kind,
        error_kind="user" if kind == "canceled" else "system",
        message=f"Job {kind}; its record makes no sense",
        identity=entry_name(score),
        at=_time(now),
    )


def cancellation(record: RqJobRecord, identity: str, score: float, now: float) -> Report:
    return Report(
        job_id=record.job_id,
        kind="canceled",
        error_kind="user",
        message=CANCELED_MESSAGE,
        identity=identity,
        # RQ scores a cancellation by its time; a registry filled by other means may hold anything.
        at=datetime.fromtimestamp(score if 0 < score < now + 86_400 else now, UTC),
        execution_id=record.running,
        worker=record.worker if record.running else "",
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        running=bool(record.running),
        payload=record.payload,
    )


def overrun(record: RqJobRecord, execution_id: str, created_at: float, limit: float, now: float) -> Report:
    """It runs longer than it may and is still in the started registry."""
    message = f"Job has been running for {now - created_at:.0f} s, more than the {limit:.0f} s it may take"
    return _unfinished(record, "stuck", message, execution_id=execution_id, created_at=created_at, now=now)


def loss(record: RqJobRecord, execution_id: str, created_at: float, now: float) -> Report:
    """The lease on the execution lapsed: no worker has given a sign of life for it."""
    message = "Worker lost: the lease on the execution lapsed without a heartbeat"
    return _unfinished(record, "lost", message, execution_id=execution_id, created_at=created_at, now=now)


def _unfinished(
    record: RqJobRecord, kind: Kind, message: str, *, execution_id: str, created_at: float, now: float
) -> Report:
    return Report(
        job_id=record.job_id,
        kind=kind,
        error_kind="system",
        message=message,
        identity=execution_id,
        at=datetime.fromtimestamp(now, UTC),
        execution_id=execution_id,
        worker=record.worker,
        enqueued_at=record.enqueued_at,
        started_at=moment(created_at),
        running=kind == "stuck",
        payload=record.payload,
    )


def sequel(record: RqJobRecord, execution_id: str, kind: Kind, *, earlier: str, event: str, now: float) -> Report:
    """What became of an execution that was told of as ``earlier`` by ``event``."""
    words = {
        "finished": "Job finished",
        "retried": "Job was put back for another try",
        "gone": "Job ended and left no record",
        "lost": "Worker lost",
    }
    return Report(
        job_id=record.job_id,
        kind=kind,
        error_kind="user" if earlier == "canceled" else "system",
        message=f"{words[kind]} after it was reported {earlier}",
        identity=execution_id,
        at=datetime.fromtimestamp(now, UTC),
        execution_id=execution_id,
        worker=record.worker,
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        ended_at=record.ended_at if kind == "finished" else "",
        follows=event,
        payload=record.payload,
    )


def moment(seconds: float) -> str:
    """A time as RQ writes it into a job."""
    return _time(seconds).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _time(seconds: float) -> datetime:
    """A time that a stranger wrote; one that no calendar has is the nearest it has."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECOND), UTC)


def entry_name(score: float) -> str:
    """What tells two entries of one member apart."""
    return f"score {score:.17g}"


def put_back_since(record: RqJobRecord, score: float) -> bool:
    """Whether a canceled job was enqueued again after its cancellation, which is scored by its second."""
    try:
        return datetime.fromisoformat(record.enqueued_at).timestamp() >= score + 1
    except (ValueError, OverflowError):
        return False


def _kind(text: str, *, stopped: bool) -> tuple[Kind, ErrorKind]:
    if stopped or text.startswith("Job stopped by user"):
        return "stopped", "user"
    if abandoned(text):
        return "lost", "system"
    if text.startswith("Work-horse terminated unexpectedly"):
        return "killed", "system"
    return "failed", "system"


def abandoned(text: str) -> bool:
    """Whether RQ's own clean-up wrote this: it found the lease lapsed, and knows no execution."""
    return text.startswith("Moved to ") and "due to AbandonedJobError" in text


def outcome(
    record: RqJobRecord, execution_id: str, *, execution_exists: bool, listed: bool, lost: bool
) -> Literal["open", "reported", "abandoned", "finished", "retried", "gone", "lost"]:
    """What became of an execution that was reported canceled, stuck or lost.

    ``open``: not decided yet. ``reported``: a registry shows it. ``abandoned``: it was ``lost`` and RQ gave it up, but
    its worker may come back. ``lost``: it ended without leaving a word. ``listed``: it is in the started registry, so
    whatever the job's record says is about another execution.
    """
    for result in record.results:
        if result.execution_id == execution_id:
            answers: Mapping[str, Literal["finished", "reported", "retried"]] = {
                "successful": "finished",
                "failed": "reported",
                "retried": "retried",
            }
            return answers[result.outcome]
    if not record.exists:
        return "gone"
    if listed:
        return "open"
    if record.status in ("failed", "stopped"):
        return "abandoned" if lost else "reported"
    if record.status == "canceled":
        return "open" if execution_exists else "lost"
    if record.status == "started" and record.running in ("", execution_id):
        return "open"  # it runs, or its lease lapsed and nobody cleaned up yet
    return "finished" if record.status == "finished" else "retried"


def stuck_after(stuck_timeout: float, job_timeout: float) -> float:
    """Seconds a job may run before it is called stuck: never less than RQ itself allows it."""
    return max(stuck_timeout, job_timeout + TIMEOUT_GRACE_S) if job_timeout > 0 else stuck_timeout


def split_member(member: str) -> tuple[str, str]:
    """``job_id:execution_id`` of the started registry."""
    job_id, _, execution_id = member.rpartition(":")
    return (job_id, execution_id) if job_id else (execution_id, "")


# ---------------------------------------------------------------------------------------------------------------------
# Reading what RQ stored


def exception_text(stored: bytes) -> str:
    """The stored exception, of a very long one its two ends.

    A stream that swells beyond reason or is damaged yields what was readable.
    """
    inflate = zlib.decompressobj()
    head, tail, total = b"", b"", 0
    try:
        data = base64.b64decode(stored)
        while data and total < _EXCEPTION_LIMIT:
            piece = inflate.decompress(data, 65_536)
            total += len(piece)
            if total <= _EXCEPTION_END:
                head += piece
            else:
                tail = (tail + piece)[-_EXCEPTION_END:]
            data = inflate.unconsumed_tail
    except (binascii.Error, zlib.error):
        pass
    return (head + tail).decode("utf-8", "replace")


def summary(text: str) -> tuple[str, str]:
    """(type, one redacted line) of a traceback or of a sentence RQ wrote itself."""
    beginnings = list(_TRACEBACK.finditer(text))
    if not beginnings and not _FRAME.match(text):
        return "", _one_line(text)
    rest = text[beginnings[-1].end() :] if beginnings else text
    if beginnings and beginnings[-1]["group"]:
        return _group_summary(rest)
    line = _one_line(_exception(rest))
    found = _ERROR_TYPE.match(line)
    return (found.group(1) if found else ""), line


def _exception(rest: str) -> str:
    """What follows the frames of a traceback. Frames are indented, an exception's first line is not."""
    lines = rest.split("\n")
    for number, line in enumerate(lines):
        if not line.startswith("  "):
            return "\n".join(lines[number:])
    return ""


def _group_summary(rest: str) -> tuple[str, str]:
    """An exception group says what it is and how many it holds; what they are is said by their own lines."""
    own, *parts = _SUBEXCEPTION.split(rest)
    line = _one_line(_exception(_without_margin(own)))
    found = _ERROR_TYPE.match(line)
    members = [_one_line(_first_exception(_without_margin(part))) for part in parts]
    shown = "; ".join(member for member in members if member)
    return (found.group(1) if found else ""), f"{line}: {shown}"[:_MESSAGE_LIMIT] if shown else line


def _first_exception(part: str) -> str:
    """The exception's line of one member of a group, with or without a traceback before it."""
    lines = part.lstrip("\n").split("\n")
    if lines[0].endswith("Traceback (most recent call last):"):
        lines = _exception("\n".join(lines[1:])).split("\n")
    return lines[0]


def _without_margin(text: str) -> str:
    """Without the bars that an exception group draws along its members."""
    return _MARGIN.sub("", _GROUP_END.sub("", text))


def _one_line(text: str) -> str:
    return redact(" ".join(text[:_MESSAGE_READ].split()))[:_MESSAGE_LIMIT]


#: Half a character, and the one that PostgreSQL cannot keep.
_HALF_OR_NUL = re.compile("[\ud800-\udfff\0]")


def clean_text(text: str, limit: int = _TEXT_LIMIT) -> str:
    """A text that every receiver can read: valid Unicode, no NUL, not endless. A long one keeps what tells it apart."""
    raw = text.encode("utf-8", "surrogatepass")
    text = _HALF_OR_NUL.sub("\ufffd", text)
    if len(text) <= limit:
        return text
    return f"{text[: limit - 17]}\u2026{sha256(raw).hexdigest()[:16]}"


def _clean_name(text: str) -> str:
    """The same for what an event is known by, which the outbox has in an index: that holds so many bytes, not characters."""
    name = clean_text(text)
    whole = name.encode()
    if len(whole) <= _NAME_BYTES:
        return name
    return f"{whole[: _NAME_BYTES - 20].decode('utf-8', 'ignore')}\u2026{sha256(whole).hexdigest()[:16]}"


def clean(report: Report) -> Report:
    """The same report in texts that can be published, whatever the job contained."""
    return replace(
        report,
        job_id=_clean_name(report.job_id),
        message=clean_text(report.message),
        identity=_clean_name(report.identity),
        error_type=clean_text(report.error_type),
        execution_id=clean_text(report.execution_id),
        worker=clean_text(report.worker),
        enqueued_at=clean_text(report.enqueued_at),
        started_at=clean_text(report.started_at),
        ended_at=clean_text(report.ended_at),
        follows=clean_text(report.follows, 4 * _TEXT_LIMIT),
    )


def payload_fields(payload: bytes, names: Iterable[str]) -> dict[str, Json]:
    """The named keyword arguments of a job whose program serialises with JSON.

    RQ's default is pickle, which can run anything when it is read: such a payload is left closed.
    """
    wanted = tuple(names)
    if not wanted or not payload:
        return {}
    inflate = zlib.decompressobj()
    try:
        call: object = json.loads(inflate.decompress(payload, _PAYLOAD_LIMIT))
    except (zlib.error, ValueError, RecursionError):
        return {}
    # RQ stores [function, instance, args, kwargs].
    arguments = call[3] if isinstance(call, list) and len(call) == 4 else None
    if not isinstance(arguments, dict):
        return {}
    given: Mapping[str, object] = arguments
    return {name: value for name in wanted if (value := _plain(given.get(name))) is not None}


def _plain(value: object) -> str | int | float | None:
    """A text, number or boolean as JSON can carry it; None for anything else (NaN is none)."""
    match value:
        case str():
            return clean_text(value)
        case float():
            return value if isfinite(value) else None
        case int():
            return value
    return None


def oldest_first(reports: Sequence[Report]) -> list[Report]:
    return sorted(reports, key=lambda report: report.at)
