"""`Report`, and the functions that build reports from RQ's records. They use no connection and no clock."""

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

#: - failed: the job raised, or RQ ended it at its timeout.
#: - killed: its process died (a signal, out of memory).
#: - lost: its worker disappeared and the lease on the execution expired.
#: - stuck: it runs longer than allowed.
#: - canceled, stopped: a user requested it.
#: - finished, retried, gone: the outcome of a job that was reported canceled, stuck or lost before.
Kind = Literal["failed", "killed", "lost", "stuck", "canceled", "stopped", "finished", "retried", "gone"]

#: user: a user requested it. system: a failure.
ErrorKind = Literal["user", "system"]

CANCELED_MESSAGE = "Job canceled"

#: Commands that only add a member to a sorted set or change a score. Any other command may remove members.
ADDITIONS = frozenset({"zadd", "zincr"})

#: RQ ends a job at its timeout. The job is reported stuck only after this many further seconds.
TIMEOUT_GRACE_S = 5.0

_MESSAGE_LIMIT = 500
#: Characters of a message that are redacted before it is cut. More would only take time.
_MESSAGE_READ = 4_096
#: Bytes kept of each end of a stored exception: the head of the traceback and the last exception.
_EXCEPTION_END = 512 * 1024
_EXCEPTION_LIMIT = 16 * 1024 * 1024
_PAYLOAD_LIMIT = 1024 * 1024
_TEXT_LIMIT = 1_000
#: Maximum bytes of a name. Two names and the queue's name form an event id, and PostgreSQL indexes up to 2,704 bytes.
_NAME_BYTES = 1_010
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
#: The beginning of a traceback: at the start of the text, or after the line that links chained exceptions.
_TRACEBACK = re.compile(
    r"(?:\A|(?:direct cause of the following exception:|another exception occurred:)[ |]*\n[ |]*\n)"
    r"(?P<margin>[ |]*)(?P<group>\+ Exception Group )?Traceback \(most recent call last\):\n"
)
_FRAME = re.compile(r' +File ".*", line \d+')
# Neither this pattern nor `_MARGIN` matches beyond its line: a text may contain half a million empty lines.
_SUBEXCEPTION = re.compile(r"^[|+ -]*\+-+ (?:\d+|\.\.\.) -+\n", re.MULTILINE)
_GROUP_END = re.compile(r"^[|+ -]*\+-+\s*\Z", re.MULTILINE)
_MARGIN = re.compile(r"^ *\| ?", re.MULTILINE)
_ERROR_TYPE = re.compile(r"^([^\W\d][\w.<>]*)(?::|$)")


@dataclass(frozen=True, slots=True)
class Report:
    """One fact about a job, to be published as an event."""

    job_id: str
    kind: Kind
    error_kind: ErrorKind
    message: str
    #: Identifies the fact within its job. Part of the event's id.
    identity: str
    at: datetime
    error_type: str = ""
    execution_id: str = ""
    worker: str = ""
    enqueued_at: str = ""
    started_at: str = ""
    ended_at: str = ""
    #: Whether the job was running. It may still end otherwise.
    running: bool = False
    #: Id of the earlier event about the same execution.
    follows: str = ""
    payload: bytes = b""


# ---------------------------------------------------------------------------------------------------------------------
# Settings of the server


def notifies(flags: str) -> bool:
    """Return whether ``notify-keyspace-events`` announces changes of sorted sets: K, and z or A, in any order."""
    return "K" in flags and ("z" in flags or "A" in flags)


def channel(db: int, key: str) -> str:
    """Return the channel that announces changes of a key."""
    return f"__keyspace@{db}__:{key}"


def pattern(db: int, key: str) -> str:
    """Return a pattern that matches only this key's channel, even for a queue named ``q[1]`` or ``jobs*``."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", channel(db, key))


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def result_order(result_id: str) -> tuple[int, int]:
    """Parse a stream id into a pair that can be compared. (0, 0) for an invalid id."""
    milliseconds, _, number = result_id.partition("-")
    return (int(milliseconds), int(number)) if milliseconds.isdigit() and number.isdigit() else (0, 0)


def fresh_failures(record: RqJobRecord, seen: str | None, baseline: float) -> list[ResultRecord]:
    """Return the failed executions that are not reported yet, oldest first.

    Of a job without earlier reports, these are the failures since ``baseline`` (when the queue was first watched), or at
    least the newest one, which put the job into the registry.
    """
    failed = [result for result in record.results if result.outcome == "failed"]
    if seen is None:
        first = (int(baseline * 1000), 0)
        fresh = [result for result in failed if result_order(result.id) >= first] or failed[:1]
    else:
        last, kept = result_order(seen), {result_order(result.id) for result in record.results}
        if last not in kept and min(kept, default=last) < last:
            last = (0, 0)  # the job was re-created under the same id after the clock had been set back
        fresh = [result for result in failed if result_order(result.id) > last]
    return fresh[::-1]


def failure(record: RqJobRecord, result: ResultRecord) -> Report:
    """Report a failed execution."""
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
        # The result's times, because the job's times are those of its latest execution.
        started_at=result.started_at,
        ended_at=result.ended_at,
        payload=record.payload,
    )


def failure_without_result(record: RqJobRecord, identity: str, now: float) -> Report:
    """Report a job in the failed registry without a result (``failure_ttl=0``, or deleted meanwhile)."""
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
    """Report a failed or canceled job whose record is invalid."""
    return Report(
        job_id=job_id,
        kind=kind,
        error_kind="user" if kind == "canceled" else "system",
        message=f"Job {kind}; its record is invalid",
        identity=entry_name(score),
        at=_time(now),
    )


def cancellation(record: RqJobRecord, identity: str, score: float, now: float) -> Report:
    """Report a canceled job."""
    return Report(
        job_id=record.job_id,
        kind="canceled",
        error_kind="user",
        message=CANCELED_MESSAGE,
        identity=identity,
        # RQ uses the time of the cancellation as its score. Other programs may have used any score.
        at=datetime.fromtimestamp(score if 0 < score < now + 86_400 else now, UTC),
        execution_id=record.running,
        worker=record.worker if record.running else "",
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        running=bool(record.running),
        payload=record.payload,
    )


def overrun(record: RqJobRecord, execution_id: str, created_at: float, limit: float, now: float) -> Report:
    """Report an execution that runs longer than allowed."""
    message = f"Job has been running for {now - created_at:.0f} s, more than the {limit:.0f} s it may take"
    return _unfinished(record, "stuck", message, execution_id=execution_id, created_at=created_at, now=now)


def loss(record: RqJobRecord, execution_id: str, created_at: float, now: float) -> Report:
    """Report an execution whose lease expired without a heartbeat."""
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
    """Report the outcome of an execution that ``event`` reported as ``earlier``."""
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
    """Return a time in the text format of RQ's jobs."""
    return _time(seconds).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _time(seconds: float) -> datetime:
    """Return a time of a job's record, limited to the range of datetime."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECOND), UTC)


def entry_name(score: float) -> str:
    """Return the identity of an entry of a member: its score."""
    return f"score {score:.17g}"


def put_back_since(record: RqJobRecord, score: float) -> bool:
    """Return whether a canceled job was enqueued again later. The score of a cancellation is in whole seconds."""
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
    """Return whether RQ's clean-up wrote this exception, after the lease had expired. It names no execution."""
    return text.startswith("Moved to ") and "due to AbandonedJobError" in text


def outcome(
    record: RqJobRecord, execution_id: str, *, execution_exists: bool, listed: bool, lost: bool
) -> Literal["open", "reported", "abandoned", "finished", "retried", "gone", "lost"]:
    """Return the outcome of an execution that was reported canceled, stuck or lost.

    - ``open``: not decided yet.
    - ``reported``: the failed registry reports it.
    - ``abandoned``: it was lost and RQ gave it up, but its worker may come back.
    - ``lost``: it ended without a result.

    ``listed`` says that the started registry contains it. The job's status is then about another execution.
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
        return "open"  # it runs, or RQ has not cleaned up after its lease expired
    return "finished" if record.status == "finished" else "retried"


def stuck_after(stuck_timeout: float, job_timeout: float) -> float:
    """Return the seconds after which a job is stuck: at least the timeout that RQ enforces."""
    return max(stuck_timeout, job_timeout + TIMEOUT_GRACE_S) if job_timeout > 0 else stuck_timeout


def split_member(member: str) -> tuple[str, str]:
    """Split a member of the started registry, ``job_id:execution_id``."""
    job_id, _, execution_id = member.rpartition(":")
    return (job_id, execution_id) if job_id else (execution_id, "")


# ---------------------------------------------------------------------------------------------------------------------
# Decoding what RQ stored


def exception_text(stored: bytes) -> str:
    """Return the text of a stored exception, or both ends of a very long one.

    Of a damaged stream, or one that decompresses beyond the limit, the readable part is returned.
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
    """Return the type and one redacted line of a traceback. A message of RQ itself has no type."""
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
    """Return the text after the frames of a traceback. Frames are indented, the exception's first line is not."""
    lines = rest.split("\n")
    for number, line in enumerate(lines):
        if not line.startswith("  "):
            return "\n".join(lines[number:])
    return ""


def _group_summary(rest: str) -> tuple[str, str]:
    """Return the type of an exception group, and its line followed by the lines of its members."""
    own, *parts = _SUBEXCEPTION.split(rest)
    line = _one_line(_exception(_without_margin(own)))
    found = _ERROR_TYPE.match(line)
    members = [_one_line(_first_exception(_without_margin(part))) for part in parts]
    shown = "; ".join(member for member in members if member)
    return (found.group(1) if found else ""), f"{line}: {shown}"[:_MESSAGE_LIMIT] if shown else line


def _first_exception(part: str) -> str:
    """Return the exception's line of one member of a group, which may begin with a traceback."""
    lines = part.lstrip("\n").split("\n")
    if lines[0].endswith("Traceback (most recent call last):"):
        lines = _exception("\n".join(lines[1:])).split("\n")
    return lines[0]


def _without_margin(text: str) -> str:
    """Remove the bars that mark the members of an exception group."""
    return _MARGIN.sub("", _GROUP_END.sub("", text))


def _one_line(text: str) -> str:
    return redact(" ".join(text[:_MESSAGE_READ].split()))[:_MESSAGE_LIMIT]


#: Halves of surrogate pairs, and NUL, which PostgreSQL cannot store.
_UNSTORABLE = re.compile("[\ud800-\udfff\0]")


def clean_text(text: str, limit: int = _TEXT_LIMIT) -> str:
    """Return valid Unicode without NUL, at most ``limit`` characters. A cut text ends with the hash of the whole."""
    raw = text.encode("utf-8", "surrogatepass")
    text = _UNSTORABLE.sub("\ufffd", text)
    if len(text) <= limit:
        return text
    return f"{text[: limit - 17]}\u2026{sha256(raw).hexdigest()[:16]}"


def _clean_name(text: str) -> str:
    """Return a cleaned part of an event id, at most `_NAME_BYTES` bytes: the outbox has an index on it."""
    name = clean_text(text)
    whole = name.encode()
    if len(whole) <= _NAME_BYTES:
        return name
    return f"{whole[: _NAME_BYTES - 20].decode('utf-8', 'ignore')}\u2026{sha256(whole).hexdigest()[:16]}"


def clean(report: Report) -> Report:
    """Return the report with texts that can be published and stored."""
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
    """Return the named keyword arguments of a job that was serialized with JSON.

    RQ's default is pickle, which may execute code when it is loaded. Such a payload is not read.
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
    """Return a text, finite number or boolean. None for anything else."""
    match value:
        case str():
            return clean_text(value)
        case float():
            return value if isfinite(value) else None
        case int():
            return value
    return None


def oldest_first(reports: Sequence[Report]) -> list[Report]:
    """Sort reports by time."""
    return sorted(reports, key=lambda report: report.at)
