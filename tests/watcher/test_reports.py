"""The pure helpers: what RQ stored, and what it means."""

from __future__ import annotations

import base64
import json
import traceback
import zlib
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.watcher import EventForm, Publisher
from headway.watcher.ports import ResultRecord, RqJobRecord
from headway.watcher.publisher import event_id
from headway.watcher.reports import (
    Report,
    cancellation,
    exception_text,
    failure,
    fresh_failures,
    notifies,
    outcome,
    pattern,
    payload_fields,
    put_back_since,
    result_order,
    split_member,
    stuck_after,
    summary,
)
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


def job(*results: ResultRecord, status: str = "failed", exists: bool = True, running: str = "") -> RqJobRecord:
    return RqJobRecord("j", exists=exists, status=status, created_at="then", running=running, results=results)


@pytest.mark.parametrize("flags", ["zK", "AK", "AKE", "Kz"])
def test_flags_are_a_set_of_letters_that_suffices(flags):
    assert notifies(flags)


@pytest.mark.parametrize("flags", ["z", "K", "E", "AE", "", "Kg"])
def test_or_does_not(flags):
    assert not notifies(flags)


def test_a_pattern_matches_only_its_own_key():
    assert pattern(3, "rq:failed:q[1]*?^-\\") == "__keyspace@3__:rq:failed:q\\[1\\]\\*\\?^-\\\\"


@pytest.mark.req("S4-34")
def test_a_traceback_becomes_its_exception_on_one_line():
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
def test_every_text_becomes_one_line(text, expected):
    assert summary(text) == expected


def formatted(raising: Callable[[], None]) -> str:
    """As RQ stores it."""
    try:
        raising()
    except Exception as error:  # noqa: BLE001 - whatever it raises is what is wanted
        return "".join(traceback.format_exception(error))
    raise AssertionError


def raise_group() -> None:
    inner = ExceptionGroup("inner", [KeyError("k")])
    try:
        raise ValueError("first part\nof two lines")
    except ValueError as error:
        raise ExceptionGroup("many went wrong", [error, OSError(2, "no such file"), inner]) from error


def raise_chained() -> None:
    try:
        raise KeyError("secret detail " * 5_000)
    except KeyError as error:
        raise RuntimeError("in the end") from error


def raise_nested_text() -> None:
    raise RuntimeError(f"remote said:\n{TRACEBACK}\nand that was it")


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local


def raise_noted() -> None:
    error = ValueError("noted")
    error.add_note("while reading page 7")
    raise error


def raise_syntax() -> None:
    compile("a b", "f.py", "exec")


@pytest.mark.req("S4-34")
@pytest.mark.parametrize(
    ("raising", "error_type", "message"),
    [
        (
            raise_group,
            "ExceptionGroup",
            (
                "ExceptionGroup: many went wrong (3 sub-exceptions): ValueError: first part; "
                "FileNotFoundError: [Errno 2] no such file; ExceptionGroup: inner (1 sub-exception); KeyError: 'k'"
            ),
        ),
        (raise_chained, "RuntimeError", "RuntimeError: in the end"),
        (raise_noted, "ValueError", "ValueError: noted while reading page 7"),
        (raise_syntax, "SyntaxError", "SyntaxError: invalid syntax"),
    ],
)
def test_a_summary_has_the_message_without_the_traceback(raising, error_type, message):
    assert summary(formatted(raising)) == (error_type, message)


def test_a_group_in_a_group_and_a_group_after_another_error_are_groups():
    text = formatted(raise_group)
    assert "Exception Group Traceback" in text
    error_type, message = summary('Traceback (most recent call last):\n  File "a.py", line 1, in f\nE: 1\n\n'
                                  "During handling of the above exception, another exception occurred:\n\n" + text)  # fmt: skip
    assert error_type == "ExceptionGroup"
    for word in ('File "', "Traceback", "line ", "^^^", "+-"):
        assert word not in message


def test_a_traceback_quoted_in_a_message_is_a_part_of_the_message():
    error_type, message = summary(formatted(raise_nested_text))
    assert error_type == "RuntimeError"
    assert message.startswith("RuntimeError: remote said:")


def test_a_local_class_is_a_type():
    assert summary(formatted(raise_local))[0].endswith("raise_local.<locals>.Local")


@pytest.mark.parametrize("size", [600, 20_000, 2_000_000, 20_000_000])
def test_a_long_message_keeps_its_type_and_its_beginning(size):
    text = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nmy.Error: begins {"x" * size}'
    assert summary(exception_text(stored(text))) == ("my.Error", ("my.Error: begins " + "x" * size)[:500])


@pytest.mark.req("S4-34")
def test_secrets_in_an_exception_are_redacted():
    assert (
        summary('  File "a.py", line 1, in f\nError: postgresql://me:hunter22@db/x')[1]
        == "Error: postgresql://me:***@db/x"
    )


def test_a_message_is_bounded():
    assert len(summary("x" * 10_000)[1]) == 500


def test_both_ends_of_a_huge_exception_are_read_without_keeping_all_of_it():
    bomb = base64.b64encode(zlib.compress(b"0" * 40_000_000))
    assert len(exception_text(bomb)) <= 1024 * 1024
    text = exception_text(stored("the beginning" + "a" * 9_000_000 + "the end"))
    assert text.startswith("the beginning")
    assert text.endswith("the end")
    assert len(text) <= 1024 * 1024


@given(st.binary(max_size=200))
def test_a_damaged_exception_raises_nothing(damage):
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


def test_failures_since_the_last_reported_one_are_new():
    record = job(result("30-0"), result("20-5", outcome="successful"), result("20-0"), result("10-0"))
    assert [one.id for one in fresh_failures(record, "10-0", 0)] == ["20-0", "30-0"]
    assert fresh_failures(record, "30-0", 0) == []
    assert [one.id for one in fresh_failures(record, None, 0.020)] == ["20-0", "30-0"]
    assert [one.id for one in fresh_failures(record, None, 99)] == ["30-0"]
    assert len(fresh_failures(record, "score 12", 0)) == 3


def test_failures_of_a_job_made_again_while_the_servers_clock_was_set_back_are_fresh():
    again = job(result("20-0"), result("10-0"))
    assert [one.id for one in fresh_failures(again, "3600000-0", 0)] == ["10-0", "20-0"]
    assert [one.id for one in fresh_failures(job(result("3700000-0"), result("10-0")), "3600000-0", 0)] == [
        "10-0",
        "3700000-0",
    ]
    assert fresh_failures(job(result("20-0", outcome="successful"), result("10-0")), "20-0", 0) == []
    assert fresh_failures(job(), "20-0", 0) == []


def test_stream_ids_compare_by_number():
    assert result_order("9-10") > result_order("9-9") > result_order("8-99")
    assert result_order("no id") == result_order("12-x") == (0, 0)


@pytest.mark.parametrize(
    ("record", "exists", "expected"),
    [
        (job(result(outcome="successful"), status="finished"), False, "finished"),
        (job(result(outcome="retried"), status="queued"), False, "retried"),
        (job(result()), False, "reported"),
        (job(result(execution="another"), status="started", running="x"), True, "open"),
        (job(status="started", running="another"), False, "retried"),
        (job(status="started"), False, "open"),
        (job(exists=False), False, "gone"),
        (job(), False, "reported"),
        (job(status="stopped"), False, "reported"),
        (job(status="canceled"), True, "open"),
        (job(status="canceled"), False, "lost"),
        (job(status="finished"), False, "finished"),
        (job(status="scheduled"), True, "retried"),
    ],
)
def test_the_outcome_of_an_execution(record, exists, expected):
    assert outcome(record, "x", execution_exists=exists, listed=False, lost=False) == expected


@pytest.mark.parametrize("status", ["failed", "canceled", "finished", "queued", "started"])
def test_an_execution_in_the_started_registry_is_not_decided_whatever_another_one_did_to_the_job(status):
    record = job(status=status, running="another")
    assert outcome(record, "x", execution_exists=True, listed=True, lost=False) == "open"
    assert outcome(job(result(outcome="successful")), "x", execution_exists=True, listed=True, lost=False) == "finished"


def test_a_lost_execution_that_rq_gave_up_may_still_come_to_something():
    assert outcome(job(), "x", execution_exists=False, listed=False, lost=True) == "abandoned"
    successful = job(result(outcome="successful"), status="finished")
    assert outcome(successful, "x", execution_exists=False, listed=False, lost=True) == "finished"


def test_a_job_is_never_stuck_before_its_own_timeout():
    assert stuck_after(60, 0) == 60
    assert stuck_after(60, -1) == 60
    assert stuck_after(60, 30) == 60
    assert stuck_after(60, 600) == 605


def test_members_of_the_started_registry_are_split_at_the_last_colon():
    assert split_member("a:b:c") == ("a:b", "c")
    assert split_member("alone") == ("alone", "")


@pytest.mark.parametrize(
    ("enqueued", "back"),
    [("1970-01-01T00:01:40Z", False), ("1970-01-01T00:01:41.5Z", True), ("", False), ("soon", False)],
)
def test_a_job_enqueued_after_the_second_of_its_cancellation_was_put_back(enqueued, back):
    assert put_back_since(RqJobRecord("j", exists=True, enqueued_at=enqueued), 100.0) is back


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
