"""The pure helpers: what RQ stored, and what it means."""

from __future__ import annotations

import base64
import json
import zlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.watcher import EventForm, Publisher
from headway.watcher.logic import (
    Report,
    cancellation,
    exception_text,
    failure,
    fresh_failures,
    notifies,
    outcome,
    pattern,
    payload_fields,
    result_order,
    split_member,
    stuck_after,
    summary,
)
from headway.watcher.ports import JobRecord, ResultRecord
from headway.watcher.publisher import event_id
from tests.watcher.fakes import FakeRedis

TRACEBACK = """Traceback (most recent call last):
  File "/srv/worker.py", line 1633, in perform_job
    return_value = job.perform()
                   ^^^^^^^^^^^^^
  File "/srv/train.py", line 12, in train
    raise ValueError("batch size\\n  is negative")
ValueError: batch size
  is negative
"""


def stored(text: str) -> bytes:
    return base64.b64encode(zlib.compress(text.encode()))


def result(
    result_id: str = "1000-0", text: str = TRACEBACK, outcome: str = "failed", execution: str = "x"
) -> ResultRecord:
    assert outcome in ("failed", "successful", "retried")
    return ResultRecord(result_id, outcome, execution, "w1", "began", "ended", stored(text))  # type: ignore[arg-type]  # just asserted


def job(*results: ResultRecord, status: str = "failed", exists: bool = True, running: str = "") -> JobRecord:
    return JobRecord("j", exists=exists, status=status, created_at="then", running=running, results=results)


@pytest.mark.parametrize("flags", ["zK", "AK", "AKE", "Kz"])
def test_flags_are_a_set_of_letters_that_suffices(flags):
    assert notifies(flags)


@pytest.mark.parametrize("flags", ["z", "K", "E", "AE", "", "Kg"])
def test_or_does_not(flags):
    assert not notifies(flags)


def test_a_pattern_matches_only_its_own_key():
    assert pattern(3, "rq:failed:q[1]*?^-\\") == "__keyspace@3__:rq:failed:q\\[1\\]\\*\\?\\^\\-\\\\"


@pytest.mark.req("S4-34")
def test_a_traceback_is_told_by_its_exception_on_one_line():
    assert summary(TRACEBACK) == ("ValueError", "ValueError: batch size is negative")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "")),
        ("Job stopped by user, work-horse terminated.", ("", "Job stopped by user, work-horse terminated.")),
        ('  File "a.py", line 1, in f\n    f()', ("", "")),
        ('  File "a.py", line 1, in f\n    f()\nmy.pkg.Error', ("my.pkg.Error", "my.pkg.Error")),
        ('  File "a.py", line 1\n    f()\n^ not a type', ("", "^ not a type")),
    ],
)
def test_whatever_stands_there_makes_one_line(text, expected):
    assert summary(text) == expected


@pytest.mark.req("S4-34")
def test_secrets_in_an_exception_are_not_told():
    assert (
        summary('  File "a.py", line 1, in f\nError: postgresql://me:hunter22@db/x')[1]
        == "Error: postgresql://me:***@db/x"
    )


def test_a_message_is_bounded():
    assert len(summary("x" * 10_000)[1]) == 500


def test_the_end_of_a_huge_exception_is_read_without_opening_all_of_it():
    bomb = base64.b64encode(zlib.compress(b"0" * 40_000_000))
    assert exception_text(bomb) == "0" * 8192
    assert exception_text(stored("a" * 100_000 + "the end")).endswith("the end")


@given(st.binary(max_size=200))
def test_a_damaged_exception_is_no_reason_to_fail(damage):
    assert isinstance(exception_text(damage), str)
    assert isinstance(exception_text(stored(TRACEBACK)[: len(damage)] + damage), str)


@pytest.mark.parametrize(
    ("text", "status", "kind", "error_kind"),
    [
        (TRACEBACK, "failed", "failed", "system"),
        (TRACEBACK, "stopped", "stopped", "user"),
        ("Job stopped by user, work-horse terminated.", "queued", "stopped", "user"),
        ("Work-horse terminated unexpectedly; waitpid returned 9 (signal 9); ", "failed", "killed", "system"),
        ("Moved to FailedJobRegistry, due to AbandonedJobError, at 2026", "failed", "lost", "system"),
        ("", "failed", "failed", "system"),
    ],
)
def test_the_kind_of_a_failure(text, status, kind, error_kind):
    report = failure(job(record := result(text=text), status=status), record)
    assert (report.kind, report.error_kind) == (kind, error_kind)
    assert report.message


def test_only_the_latest_failure_of_a_stopped_job_was_the_stop():
    old, new = result("1-0"), result("2-0")
    record = job(new, old, status="stopped")
    assert [failure(record, one).kind for one in (old, new)] == ["failed", "stopped"]


def test_the_failures_since_the_last_one_told_are_new():
    record = job(result("30-0"), result("20-5", outcome="successful"), result("20-0"), result("10-0"))
    assert [one.id for one in fresh_failures(record, "10-0", 0)] == ["20-0", "30-0"]
    assert fresh_failures(record, "30-0", 0) == []
    assert [one.id for one in fresh_failures(record, None, 0.020)] == ["20-0", "30-0"]
    assert [one.id for one in fresh_failures(record, None, 99)] == ["30-0"]
    assert len(fresh_failures(record, "score 12", 0)) == 3


def test_stream_ids_compare_by_number():
    assert result_order("9-10") > result_order("9-9") > result_order("8-99")
    assert result_order("no id") == result_order("12-x") == (0, 0)


@pytest.mark.parametrize(
    ("record", "exists", "expected"),
    [
        (job(result(outcome="successful"), status="finished"), False, "finished"),
        (job(result(outcome="retried"), status="queued"), False, "retried"),
        (job(result()), False, "told"),
        (job(result(execution="another"), status="started", running="x"), True, "open"),
        (job(status="started", running="another"), False, "retried"),
        (job(status="started"), False, "open"),
        (job(exists=False), False, "gone"),
        (job(), False, "told"),
        (job(status="stopped"), False, "told"),
        (job(status="canceled"), True, "open"),
        (job(status="canceled"), False, "lost"),
        (job(status="finished"), False, "finished"),
        (job(status="scheduled"), True, "retried"),
    ],
)
def test_what_became_of_an_execution(record, exists, expected):
    assert outcome(record, "x", execution_exists=exists) == expected


def test_a_job_is_never_stuck_before_its_own_timeout():
    assert stuck_after(60, 0) == 60
    assert stuck_after(60, -1) == 60
    assert stuck_after(60, 30) == 60
    assert stuck_after(60, 600) == 605


def test_members_of_the_started_registry_are_split_at_the_last_colon():
    assert split_member("a:b:c") == ("a:b", "c")
    assert split_member("alone") == ("alone", "")


@pytest.mark.parametrize(("score", "second"), [(1_000.0, 1_000), (0.0, 5_000), (9e12, 5_000), (float("inf"), 5_000)])
def test_a_cancellation_happened_when_its_score_says_if_that_can_be(score, second):
    assert cancellation(job(), "i", score, 5_000).at == datetime.fromtimestamp(second, UTC)


def packed(call: object) -> bytes:
    return zlib.compress(json.dumps(call).encode())


@pytest.mark.req("S4-34")
def test_named_arguments_of_a_json_payload_are_repeated_if_they_are_plain():
    payload = packed(["m.train", None, [], {"user_id": 7, "model": "m", "deep": {"a": 1}, "nothing": None}])
    assert payload_fields(payload, ["user_id", "model", "deep", "nothing", "absent"]) == {"user_id": 7, "model": "m"}


@pytest.mark.req("S4-34")
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no zlib",
        zlib.compress(b"\x80\x05\x95 pickle"),
        zlib.compress(b"[" * 100_000),
        packed("text"),
        packed([1, 2, 3]),
        packed([1, 2, 3, [4]]),
    ],
)
def test_any_other_payload_stays_closed(payload):
    assert payload_fields(payload, ["user_id"]) == {}
    assert payload_fields(payload, []) == {}


@pytest.mark.req("S4-08", "S4-34")
def test_an_event_has_the_facts_the_fixed_fields_and_the_arguments_asked_for():
    form = EventForm(failed="my.failed", fields={"site": "north", "kind": "hidden"}, payload_fields=["user_id"])
    record = job(one := result())
    report = failure(record, one)
    publisher = Publisher(FakeRedis(), form, "channel")
    event = publisher.event("digits", Report(**{name: getattr(report, name) for name in report.__slots__}
                                             | {"payload": packed(["f", None, [], {"user_id": 7}])}))  # fmt: skip
    assert json.loads(event.as_json()) == {
        "id": "digits:j:x:failed",
        "type": "my.failed",
        "at": "1970-01-01T00:00:01Z",
        "source": "headway.watcher",
        "job": "j",
        "version": 1,
        "data": {
            "site": "north",
            "user_id": 7,
            "queue": "digits",
            "job_id": "j",
            "kind": "failed",
            "error_kind": "system",
            "message": "ValueError: batch size is negative",
            "error_type": "ValueError",
            "execution_id": "x",
            "worker": "w1",
            "enqueued_at": None,
            "started_at": "began",
            "ended_at": "ended",
            "running": False,
            "follows": None,
        },
    }
    assert event.id == event_id("digits", report)
