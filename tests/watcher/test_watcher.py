"""`NotificationWatcher` on fakes: orders of events and failures that have to be just so."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headway.errors import ConfigError, InvalidInput, ServerRefused, Unavailable
from headway.watcher import link
from headway.watcher.link import preflight, probe
from headway.watcher.ports import ExecutionRecord, Member, Message, ResultRecord, RqJobRecord
from headway.watcher.reports import channel, pattern
from tests.watcher.fakes import FakePubSub, FakeRedis, Stand, settings

NOW = 1_000_000.0


def delivered(stand: Stand) -> list[tuple[str, str]]:
    events: list[dict[str, Any]] = [json.loads(body) for body in stand.redis.published]
    return [(event["job"], event["data"]["kind"]) for event in events]


def run(redis: FakeRedis, member: str, *, since: float = 0.0, lease: float = 1e6, timeout: float = 0.0) -> None:
    """An execution under way, with its job."""
    job_id, execution_id = member.split(":")
    redis.zsets["W"][member] = NOW + lease
    redis.runs[member] = ExecutionRecord(exists=True, created_at=NOW + since, worker="w", timeout=timeout)
    redis.records[job_id] = RqJobRecord(job_id, exists=True, status="started", created_at="then", running=execution_id)


def end(redis: FakeRedis, member: str, outcome: Any = None, status: str = "finished") -> None:
    """It ends, and its registry of executions says so."""
    job_id, execution_id = member.split(":")
    redis.zsets["W"].pop(member, None)
    redis.runs.pop(member, None)
    results = (ResultRecord("1-0", outcome, execution_id, "w", "", "", b""),) if outcome else ()
    redis.records[job_id] = replace(redis.records[job_id], status=status, running="", results=results)
    redis.announce(f"X:{job_id}", "zrem")


# ---- publishing and dedupe -------------------------------------------------------------------------------------------


@pytest.mark.req("S4-25")
def test_an_announced_failure_is_published_once_however_often_it_is_announced():
    stand = Stand().open()
    stand.redis.fail("a", "1-0")
    for _ in range(5):
        stand.redis.announce("F")
        stand.watcher.tick()
    assert delivered(stand) == [("a", "failed")]


@pytest.mark.req("S4-25")
def test_a_flood_of_announcements_causes_one_read():
    stand = Stand().open()
    stand.redis.fail("a", "1-0")
    for _ in range(500):
        stand.redis.announce("F")
    stand.watcher.tick()
    assert stand.redis.calls == ["zrevrangebyscore", "jobs", "publish"]


def test_an_endless_flood_does_not_prevent_reads(monkeypatch):
    monkeypatch.setattr(link, "BATCH", 10)
    stand = Stand().open()
    stand.redis.fail("a", "1-0")
    for _ in range(25):
        stand.redis.announce("F")
    stand.watcher.tick()
    assert delivered(stand) == [("a", "failed")]
    assert len(stand.link.inbox) == 15


def test_it_dies_between_publishing_and_noting_it_then_the_event_comes_again_with_the_same_id():
    stand = Stand().open()
    stand.redis.fail("a", "1-0")

    def die() -> None:
        raise KeyboardInterrupt

    stand.redis.on_publish = die
    stand.redis.announce("F")
    with pytest.raises(KeyboardInterrupt):
        stand.watcher.tick()
    stand.redis.on_publish = lambda: None
    stand.restart()
    first, second = (json.loads(body) for body in stand.redis.published)
    assert first["id"] == second["id"] == "digits:a:e-1-0:failed"


def test_events_of_one_read_are_in_the_order_of_their_times():
    stand = Stand(page_size=2).open()
    for number, job_id in enumerate("dbeac"):
        stand.redis.fail(job_id, f"{number + 1}000-0", score=100 + number)
    stand.redis.announce("F")
    stand.watcher.tick()
    assert [job for job, _ in delivered(stand)] == list("dbeac")


def test_a_failure_in_the_middle_of_a_large_registry_is_found_because_the_size_does_not_add_up():
    stand = Stand(page_size=2).open()
    for number in range(9):
        stand.redis.fail(f"j{number}", f"{number + 1}-0", score=100 * number)
    stand.redis.announce("F")
    stand.pass_time(20)
    stand.redis.fail("middle", "50-0", score=450)
    stand.redis.announce("F")
    stand.pass_time(20)
    assert delivered(stand)[9:] == [("middle", "failed")]


@pytest.mark.req("S4-07")
def test_a_failure_kept_for_ever_is_found_at_the_lowest_end_without_going_through_the_registry():
    stand = Stand(page_size=2).open()
    for number in range(20):
        stand.redis.fail(f"j{number}", f"{number + 1}-0", score=100 * number)
    stand.redis.announce("F")
    stand.pass_time(20)
    stand.redis.calls.clear()
    stand.redis.fail("forever", "50-0", score=-1)
    stand.redis.announce("F")
    stand.watcher.tick()
    assert delivered(stand)[20:] == [("forever", "failed")]
    assert stand.redis.calls == ["zrevrangebyscore", "zrange", "jobs", "publish", "zrange", "zcard"]


@pytest.mark.parametrize("score", [-1.0, 9e9])
def test_a_job_that_failed_again_with_the_same_score_is_reported_again(score):
    stand = Stand().open()
    stand.redis.fail("a", "1-0", score=score)
    stand.redis.announce("F")
    stand.watcher.tick()
    stand.redis.fail("a", "2-0", score=score)
    stand.redis.announce("F", "zrem")
    stand.redis.announce("F")
    stand.watcher.tick()
    assert [json.loads(body)["id"] for body in stand.redis.published] == [
        "digits:a:e-1-0:failed",
        "digits:a:e-2-0:failed",
    ]


def test_a_doubt_lasts_until_the_whole_registry_was_gone_through():
    """New entries met on the way do not make those behind them certain."""
    stand = Stand(page_size=2).open()
    for number, job_id in enumerate("abcd"):
        stand.redis.fail(job_id, f"{number + 1}-0", score=100 + number)
    stand.redis.announce("F")
    stand.pass_time(5)
    stand.watcher.close()
    stand.redis.clock[0] += 1000
    stand.redis.fail("d", "9-0", score=103)  # put back within the same second, so with the same score
    stand.redis.fail("new", "8-0", score=50)
    stand.restart()
    assert sorted(delivered(stand)) == [(job_id, "failed") for job_id in ("a", "b", "c", "d", "d", "new")]


def test_removing_an_entry_does_not_read_old_ones_again():
    stand = Stand().open()
    stand.pass_time(1)
    stand.redis.fail("old", "1-0")
    stand.redis.announce("F")
    stand.pass_time(20)
    stand.redis.fail("new", "2-0")
    stand.redis.announce("F")
    stand.watcher.tick()
    stand.redis.announce("F", "zrem")
    stand.redis.announce("F")
    stand.watcher.tick()
    assert stand.redis.asked == [["old"], ["new"], ["new"]]


def test_a_removal_alone_costs_nothing():
    stand = Stand().open()
    stand.redis.announce("F", "zremrangebyscore")
    stand.watcher.tick()
    assert stand.redis.calls == []


def test_a_large_registry_in_turmoil_is_not_walked_over_and_over():
    stand = Stand(page_size=2).open()
    for number in range(10):
        stand.redis.fail(f"j{number}", f"{number + 1}-0", score=number)
    for _ in range(50):
        stand.redis.announce("F", "zrem")
        stand.redis.announce("F")
        stand.watcher.tick()
    stand.pass_time(5)
    assert 5 <= stand.redis.calls.count("zscan") < 3 * 6  # a few walks of five windows
    assert len(delivered(stand)) == 10


def test_a_job_without_a_result_is_reported_once_from_its_other_fields():
    stand = Stand().open()
    redis = stand.redis
    redis.records["a"] = RqJobRecord("a", exists=True, status="stopped", created_at="then", ended_at="at noon")
    redis.zsets["F"] = {"a": 1.0, "b": 2.0}
    for score in (1.0, 5.0):
        redis.zsets["F"]["a"] = score
        redis.announce("F")
        stand.watcher.tick()
    assert delivered(stand) == [("b", "failed"), ("a", "stopped")] or delivered(stand) == [
        ("a", "stopped"),
        ("b", "failed"),
    ]
    redis.zsets["F"]["b"] = 7.0  # nothing is left to compare but the score
    redis.announce("F")
    stand.watcher.tick()
    assert delivered(stand)[2:] == [("b", "failed")]


def test_a_doubted_entry_without_news_is_not_reported_again():
    stand = Stand().open()
    stand.redis.fail("a", "1-0", score=-1)
    stand.redis.zsets["F"]["b"] = -1
    stand.redis.zsets["C"]["c"] = 5.0
    stand.redis.announce("F")
    stand.redis.announce("C")
    stand.watcher.tick()
    for key in "FC":
        stand.redis.announce(key, "zrem")
        stand.redis.announce(key)
    stand.watcher.tick()
    stand.redis.zsets["F"]["a"] = -2
    stand.redis.announce("F")
    stand.watcher.tick()
    assert sorted(delivered(stand)) == [("a", "failed"), ("b", "failed"), ("c", "canceled")]


def test_an_entry_in_the_middle_that_gets_another_score_is_found_although_no_size_changes():
    """As when a job is enqueued again under its id, and RQ leaves its old entry where it is."""
    stand = Stand(page_size=2).open()
    for number in range(20):
        stand.redis.fail(f"j{number:02}", f"{number + 1}-0", score=100 * number)
    stand.redis.announce("F")
    stand.pass_time(20)
    stand.redis.fail("j10", "50-0", score=450)
    stand.redis.announce("F")
    stand.pass_time(20)
    assert delivered(stand)[20:] == [("j10", "failed")]


@pytest.mark.parametrize("silent", [False, True])
def test_entries_that_join_behind_a_page_of_a_walk_are_found(silent):
    stand = Stand(page_size=2).open()
    for number in range(20):
        stand.redis.fail(f"j{number:02}", f"{number + 1}-0", score=100 * number)
    if silent:
        stand.restart()
        stand.redis.fail("k", "40-0", score=850)
    zscan, joined = stand.redis.zscan, iter(["aaa"])

    def scanned(key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        answer = zscan(key, cursor, count)
        if key == "F" and answer[0] == 0:
            for name in joined:
                stand.redis.fail(name, "50-0", score=950)
                stand.redis.announce("F")
        return answer

    stand.redis.zscan = scanned  # type: ignore[method-assign]  # a registry that changes while it is read
    stand.restart()
    stand.pass_time(20)
    assert ("aaa", "failed") in delivered(stand)


def test_entries_of_a_walk_do_not_explain_later_announcements():
    stand = Stand(page_size=2).open()
    for number in range(20):
        stand.redis.fail(f"j{number:02}", f"{number + 1}-0", score=100 * number)
    stand.redis.announce("F")
    stand.pass_time(20)
    for number in range(5):
        stand.redis.fail(f"silent{number}", f"5{number}-0", score=950 + number)
    stand.redis.announce("F")
    stand.watcher.tick()
    while len(delivered(stand)) < 25:
        stand.watcher.tick()
    stand.redis.fail("announced", "60-0", score=850)
    stand.redis.announce("F")
    stand.pass_time(30)
    assert delivered(stand)[25:] == [("announced", "failed")]


def test_a_late_announcement_is_explained_by_an_earlier_entry():
    """A look finds what happened up to now; its announcements may still be on their way. They are no reason to go
    through a large registry."""
    stand = Stand(page_size=2).open()
    for number in range(20):
        stand.redis.fail(f"j{number:02}", f"{number + 1}-0", score=100 * number)
    stand.redis.announce("F")
    stand.pass_time(20)
    stand.redis.calls.clear()
    for number in range(30, 40):
        stand.redis.fail(f"j{number}", f"{number}-0", score=100 * number)
    for _ in range(10):
        stand.redis.announce("F")
        stand.watcher.tick()
    stand.pass_time(30)
    assert len(delivered(stand)) == 30
    assert "zscan" not in stand.redis.calls


@pytest.mark.parametrize("removed", [6, 40])
def test_a_window_that_moved_while_it_was_read_makes_the_registry_be_gone_through(removed):
    """Removed below, everything above is lower by as many ranks: entries would be skipped."""
    stand = Stand(page_size=4).open()
    for number in range(40):
        stand.redis.fail(f"j{number:02}", f"{number + 1}-0", score=100 + number)

    def meddle() -> None:
        if len(stand.redis.published) >= 8 and "j00" in stand.redis.zsets["F"]:
            for number in range(removed):
                del stand.redis.zsets["F"][f"j{number:02}"]  # and nobody is told

    stand.redis.on_publish = meddle
    stand.redis.announce("F")
    stand.pass_time(30)
    there = [(f"j{number:02}", "failed") for number in range(40 if removed == 6 else 10)]
    assert sorted(delivered(stand)) == there


def test_a_short_lived_failure_during_a_long_walk_is_reported():
    """What was announced is looked at between two windows: it need not stay until the walk is through."""
    stand = Stand(page_size=2).open()
    for number in range(40):
        stand.redis.fail(f"j{number:02}", f"{number + 1}-0", score=100 + number)
    zscan, windows = stand.redis.zscan, iter(range(1_000))

    def scanned(key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        answer, window = zscan(key, cursor, count), next(windows)
        if window == 5:
            stand.redis.fail("brief", "99-0", score=9e9)
            stand.redis.announce("F")
        elif window == 7:
            del stand.redis.zsets["F"]["brief"]
            stand.redis.announce("F", "zrem")
        return answer

    stand.redis.zscan = scanned  # type: ignore[method-assign]  # a registry that changes while it is read
    stand.restart()
    assert ("brief", "failed") in delivered(stand)


def test_a_forgotten_job_that_fails_again_reports_only_its_new_failure():
    stand = Stand().open()
    stand.redis.fail("a", "1000000000-0")
    stand.redis.announce("F")
    stand.pass_time(1)
    del stand.redis.zsets["F"]["a"]  # put back into the queue, where it waits for days
    stand.redis.announce("F", "zrem")
    for _ in range(4):
        stand.redis.clock[0] += 90_000
        stand.pass_time(1)
    stand.redis.fail("a", "1000360000-0", score=8e9)
    stand.redis.announce("F")
    stand.pass_time(1)
    assert [json.loads(body)["data"]["execution_id"] for body in stand.redis.published] == [
        "e-1000000000-0",
        "e-1000360000-0",
    ]


def test_an_unreadable_record_is_still_reported():
    stand = Stand().open()
    for name, key, kind in (("a", "F", "failed"), ("b", "C", "canceled")):
        stand.redis.fail("good", "7-0")
        nonsense: Any = object()
        stand.redis.records[name] = RqJobRecord(name, exists=True, created_at="then", enqueued_at=nonsense,
                                                results=nonsense)  # fmt: skip
        stand.redis.zsets[key][name] = 9e9
        for _ in range(2):
            stand.redis.announce(key, "zrem")
            stand.redis.announce(key)
            stand.pass_time(1)
        assert delivered(stand).count((name, kind)) == 1
    assert ("good", "failed") in delivered(stand)


# ---- cancellations ---------------------------------------------------------------------------------------------------


def test_a_job_requeued_and_canceled_again_is_reported_again():
    stand = Stand().open()
    for second, enqueued in enumerate(("first", "second")):
        stand.redis.records["a"] = RqJobRecord(
            "a", exists=True, created_at="then", enqueued_at=enqueued, status="canceled"
        )
        stand.redis.zsets["C"]["a"] = NOW + second
        stand.redis.announce("C", "zrem")
        stand.redis.announce("C")
        stand.watcher.tick()
    assert delivered(stand) == [("a", "canceled")] * 2


def test_a_job_canceled_while_it_was_stuck_names_the_earlier_event():
    stand = Stand().open()
    run(stand.redis, "a:x", since=-200)
    stand.redis.announce("W")
    stand.pass_time(30)
    stand.redis.records["a"] = replace(stand.redis.records["a"], status="canceled", enqueued_at="then")
    stand.redis.zsets["C"]["a"] = NOW
    stand.redis.announce("C")
    stand.watcher.tick()
    stuck, canceled = (json.loads(body) for body in stand.redis.published)
    assert canceled["data"]["follows"] == stuck["id"]


def test_a_canceled_job_whose_worker_died_is_reported_as_lost():
    stand = Stand().open()
    run(stand.redis, "a:x")
    stand.redis.records["a"] = replace(stand.redis.records["a"], status="canceled")
    stand.redis.zsets["C"]["a"] = NOW
    stand.redis.announce("C")
    stand.watcher.tick()
    end(stand.redis, "a:x", status="canceled")
    stand.pass_time(1)
    assert delivered(stand) == [("a", "canceled"), ("a", "lost")]


def test_a_job_canceled_and_finished_between_reads_is_reported_as_both():
    stand = Stand().open()
    run(stand.redis, "a:x")
    end(stand.redis, "a:x", "successful", "finished")
    stand.redis.zsets["C"]["a"] = NOW
    stand.redis.announce("C")
    stand.pass_time(1)
    assert delivered(stand) == [("a", "canceled"), ("a", "finished")]


def test_a_job_that_fails_while_its_outcome_is_looked_up_is_not_taken_for_lost(monkeypatch):
    stand = Stand().open()
    run(stand.redis, "a:x")
    stand.redis.records["a"] = replace(stand.redis.records["a"], status="canceled")
    stand.redis.zsets["C"]["a"] = NOW
    jobs, executions = stand.redis.jobs, stand.redis.executions

    def fail_now() -> None:
        monkeypatch.undo()
        end(stand.redis, "a:x", "failed", "failed")
        stand.redis.zsets["F"]["a"] = 9e9

    def jobs_and_then(job_ids: Sequence[str], *, running: bool) -> list[RqJobRecord]:
        answer = jobs(job_ids, running=running)
        fail_now()
        return answer

    def executions_and_then(members: Sequence[str]) -> list[ExecutionRecord]:
        answer = executions(members)
        fail_now()
        return answer

    def once_it_is_told() -> None:
        stand.redis.on_publish = lambda: None
        monkeypatch.setattr(stand.redis, "jobs", jobs_and_then)
        monkeypatch.setattr(stand.redis, "executions", executions_and_then)

    stand.redis.on_publish = once_it_is_told
    stand.redis.announce("C")
    stand.pass_time(2)
    assert delivered(stand) == [("a", "canceled"), ("a", "failed")]


# ---- stuck and lost --------------------------------------------------------------------------------------------------


@pytest.mark.req("S4-11", "S4-25")
def test_a_job_past_its_time_is_reported_as_stuck_once():
    stand = Stand().open()
    run(stand.redis, "a:x")
    stand.redis.announce("W")
    stand.pass_time(90)
    assert delivered(stand) == []
    stand.pass_time(20)
    assert delivered(stand) == [("a", "stuck")]
    stand.pass_time(200)
    stand.restart()
    stand.pass_time(200)
    assert delivered(stand) == [("a", "stuck")]


@pytest.mark.req("S4-10", "S4-25")
def test_a_job_that_left_in_time_is_forgotten():
    stand = Stand().open()
    run(stand.redis, "a:x")
    stand.redis.announce("W")
    stand.pass_time(20)
    assert list(stand.watcher.started["digits"].running) == ["a:x"]
    del stand.redis.zsets["W"]["a:x"]
    stand.redis.announce("W", "zrem")
    stand.pass_time(20)
    assert stand.watcher.started["digits"].running == {}
    stand.pass_time(200)
    assert delivered(stand) == []


@pytest.mark.req("S4-11")
def test_a_job_that_left_unannounced_is_found_missing_when_its_time_is_up():
    stand = Stand().open()
    run(stand.redis, "a:x")
    stand.redis.announce("W")
    stand.pass_time(20)
    del stand.redis.zsets["W"]["a:x"]
    stand.pass_time(100)
    assert stand.redis.calls.count("zrank") == 1
    assert stand.watcher.started["digits"].running == {}
    assert delivered(stand) == []


def test_heartbeats_move_the_lease_and_not_the_start():
    stand = Stand(stuck_job_timeout_s=1000.0).open()
    run(stand.redis, "a:x", lease=60)
    stand.redis.announce("W")
    for beat in range(1, 10):
        stand.pass_time(30)
        stand.redis.zsets["W"]["a:x"] = NOW + 30 * beat + 90
    (running,) = stand.watcher.started["digits"].running.values()
    assert running.created_at == NOW
    assert delivered(stand) == []
    assert stand.redis.calls.count("zscore") < 10  # it is asked after once per lease, not once per heartbeat


def test_an_expired_lease_is_reported_as_lost_once_and_never_as_stuck():
    stand = Stand().open()
    run(stand.redis, "a:x", lease=60)
    stand.redis.announce("W")
    stand.pass_time(70)
    assert delivered(stand) == [("a", "lost")]
    stand.pass_time(200)
    stand.restart()
    stand.pass_time(200)
    assert delivered(stand) == [("a", "lost")]


def test_the_lease_may_be_given_more_time():
    stand = Stand(lost_grace_s=15.0).open()
    run(stand.redis, "a:x", lease=60)
    stand.redis.announce("W")
    stand.pass_time(70)
    assert delivered(stand) == []
    stand.pass_time(10)
    assert delivered(stand) == [("a", "lost")]


def test_a_lapsed_lease_whose_entry_is_gone_is_nothing_to_tell():
    stand = Stand().open()
    run(stand.redis, "a:x", lease=60)
    stand.redis.announce("W")
    stand.pass_time(20)
    del stand.redis.zsets["W"]["a:x"]
    stand.pass_time(60)
    assert stand.watcher.started["digits"].running == {}
    assert delivered(stand) == []


def test_a_stuck_job_whose_worker_dies_is_reported_as_lost_with_the_earlier_event():
    stand = Stand().open()
    run(stand.redis, "a:x", since=-100, lease=60)
    stand.redis.announce("W")
    stand.pass_time(70)
    stuck, lost = (json.loads(body) for body in stand.redis.published)
    assert [event["data"]["kind"] for event in (stuck, lost)] == ["stuck", "lost"]
    assert lost["data"]["follows"] == stuck["id"]


def test_an_execution_without_a_record_counts_from_when_it_was_first_seen():
    stand = Stand().open()
    run(stand.redis, "a:x", since=-1000)
    del stand.redis.runs["a:x"]
    stand.redis.announce("W")
    stand.pass_time(90)
    assert delivered(stand) == []
    stand.pass_time(60)
    assert delivered(stand) == [("a", "stuck")]


def test_a_started_registry_larger_than_a_window_is_read_to_its_end():
    stand = Stand(page_size=2).open()
    for number in range(4):
        run(stand.redis, f"j{number}:x")
    stand.redis.announce("W")
    stand.pass_time(20)
    assert len(stand.watcher.started["digits"].running) == 4


def test_reports_of_an_execution_are_forgotten_after_a_day():
    stand = Stand().open()
    run(stand.redis, "a:x", since=-200)
    stand.redis.announce("W")
    stand.pass_time(30)
    stand.redis.clock[0] += 200_000
    stand.pass_time(1)
    assert stand.store("digits@0").look("started", ["a:x"])  # it is still there
    end(stand.redis, "a:x", "successful")
    stand.redis.clock[0] += 200_000
    stand.pass_time(1)
    assert stand.store("digits@0").look("started", ["a:x"]) == {}


def test_a_server_whose_clock_was_set_is_asked_for_it_before_anybody_is_called_lost():
    stand = Stand(stuck_job_timeout_s=1000.0).open()
    run(stand.redis, "a:x", lease=60)
    stand.redis.announce("W")
    stand.pass_time(50)
    stand.redis.skew = -500.0  # the lease is as far away again
    stand.pass_time(100)
    assert delivered(stand) == []
    stand.pass_time(450)
    assert delivered(stand) == [("a", "lost")]


def test_one_awaited_outcome_adds_no_read_for_other_jobs():
    stand = Stand().open()
    run(stand.redis, "a:x", since=-200)
    stand.redis.announce("W")
    stand.pass_time(30)
    stand.redis.calls.clear()
    began = stand.redis.clock[0]
    for _ in range(3_000):
        stand.redis.announce("W")
        stand.redis.announce("W", "zrem")
        stand.watcher.tick()
        stand.redis.clock[0] += 0.01
    assert stand.redis.calls.count("zscan") <= stand.redis.clock[0] - began + 2  # about one a second


# ---- outcomes --------------------------------------------------------------------------------------------------------


def stuck() -> Stand:
    stand = Stand().open()
    run(stand.redis, "a:x", since=-200)
    stand.redis.announce("W")
    stand.pass_time(30)
    assert delivered(stand) == [("a", "stuck")]
    return stand


def test_an_awaited_outcome_has_a_subscription_until_it_is_reported():
    stand = stuck()
    assert stand.link.channels == [channel(0, "X:a")]
    end(stand.redis, "a:x", "successful")
    stand.pass_time(1)
    assert delivered(stand)[1:] == [("a", "finished")]
    assert stand.link.channels == []
    stand.link.inbox.append(Message("event", channel(0, "X:a"), "zrem"))  # still under way when we unsubscribed
    stand.pass_time(1)
    assert len(delivered(stand)) == 2


def test_an_outcome_just_before_its_subscription_is_reported():
    stand = Stand().open()
    run(stand.redis, "a:x", since=-200)

    def end_unheard() -> None:
        stand.redis.on_publish = lambda: None
        end(stand.redis, "a:x", "successful")
        stand.link.inbox.clear()

    stand.redis.on_publish = end_unheard
    stand.redis.announce("W")
    stand.pass_time(30)
    assert delivered(stand) == [("a", "stuck"), ("a", "finished")]


def test_a_heartbeat_of_an_awaited_job_causes_no_read():
    stand = stuck()
    before = stand.redis.calls.count("jobs")
    stand.redis.announce("X:a", "zadd")
    stand.pass_time(2)
    assert stand.redis.calls.count("jobs") == before


@pytest.mark.parametrize(
    ("outcome", "status", "kind"),
    [
        ("successful", "finished", "finished"),
        (None, "finished", "finished"),
        ("retried", "queued", "retried"),
        (None, "queued", "retried"),
        (None, "scheduled", "retried"),
    ],
)
def test_every_outcome_of_an_awaited_job_is_reported(outcome, status, kind):
    stand = stuck()
    end(stand.redis, "a:x", outcome, status)
    stand.pass_time(1)
    assert delivered(stand)[1:] == [("a", kind)]


def test_the_failed_registry_reports_an_awaited_job_that_fails():
    stand = stuck()
    end(stand.redis, "a:x", "failed", "failed")
    stand.redis.zsets["F"]["a"] = 9e9
    stand.pass_time(1)
    stand.redis.announce("F")
    stand.pass_time(1)
    earlier, failed = (json.loads(body) for body in stand.redis.published)
    assert failed["data"]["kind"] == "failed"
    assert failed["data"]["follows"] == earlier["id"]


def test_a_stuck_job_that_rq_gives_up_is_reported_as_lost_with_the_earlier_event():
    stand = stuck()
    text = "Moved to FailedJobRegistry, due to AbandonedJobError, at noon"
    exception = base64.b64encode(zlib.compress(text.encode()))
    result = ResultRecord("5-0", "failed", "", "", "", "", exception)
    stand.redis.records["a"] = replace(stand.redis.records["a"], status="failed", running="", results=(result,))
    del stand.redis.zsets["W"]["a:x"]
    stand.redis.zsets["F"]["a"] = 9e9
    stand.redis.announce("W", "zremrangebyscore")
    stand.redis.announce("F")
    stand.pass_time(1)
    earlier, lost = (json.loads(body) for body in stand.redis.published)
    assert lost["data"]["kind"] == "lost"
    assert lost["data"]["follows"] == earlier["id"]


def test_an_outcome_from_before_the_start_is_reported():
    stand = stuck()
    stand.watcher.close()
    end(stand.redis, "a:x", "successful")
    stand.restart()
    assert delivered(stand)[1:] == [("a", "finished")]


def test_an_unannounced_outcome_is_found_by_the_sweep():
    stand = stuck()
    end(stand.redis, "a:x", "successful")
    stand.link.inbox.clear()
    stand.pass_time(700)
    assert delivered(stand)[1:] == [("a", "finished")]


def test_a_lost_job_that_is_canceled_afterwards_was_lost_once():
    stand = Stand().open()
    run(stand.redis, "a:x", lease=60)
    stand.redis.announce("W")
    stand.pass_time(70)
    end(stand.redis, "a:x", status="canceled")
    stand.pass_time(2)
    assert delivered(stand) == [("a", "lost")]
    assert stand.store("digits@0").follows() == []


def test_a_lost_execution_that_rq_gave_up_is_awaited_for_a_day():
    stand = Stand().open()
    run(stand.redis, "a:x", lease=60)
    stand.redis.announce("W")
    stand.pass_time(70)
    text = "Moved to FailedJobRegistry, due to AbandonedJobError, at noon"
    result = ResultRecord("5-0", "failed", "", "", "", "", base64.b64encode(zlib.compress(text.encode())))
    end(stand.redis, "a:x", status="failed")
    stand.redis.records["a"] = replace(stand.redis.records["a"], results=(result,))
    stand.redis.zsets["F"]["a"] = 9e9
    stand.redis.announce("W", "zremrangebyscore")
    stand.redis.announce("F")
    stand.pass_time(10)
    stand.redis.clock[0] += 80_000
    stand.pass_time(1)
    assert [one.member for one in stand.store("digits@0").follows()] == ["a:x"]
    stand.redis.clock[0] += 10_000
    stand.pass_time(1)
    assert stand.store("digits@0").follows() == []
    assert stand.link.channels == []
    assert delivered(stand) == [("a", "lost")]


def test_outcomes_awaited_by_an_earlier_release_are_still_awaited():
    stand = stuck()
    stand.watcher.close()
    with stand.database as database:
        database.run(lambda tx: tx.execute("UPDATE followed SET since = 0"), operation="test")
        stand.restart()
        assert [one.since > 0 for one in stand.watcher._queues[0].context.follows.values()] == [True]


# ---- the sweep -------------------------------------------------------------------------------------------------------


def test_a_sweep_of_a_large_registry_reads_nothing_of_it_unless_something_changed():
    stand = Stand(page_size=2).open()
    for number in range(5):
        stand.redis.fail(f"j{number}", f"{number + 1}-0", score=number)
    stand.redis.announce("F")
    stand.pass_time(610)
    stand.redis.calls.clear()
    stand.pass_time(600)
    assert stand.redis.calls == ["guard", "config_get"]
    stand.redis.fail("middle", "9-0", score=2.5)
    stand.pass_time(600)
    assert delivered(stand)[5:] == [("middle", "failed")]
    stand.redis.calls.clear()
    stand.redis.zsets["C"]["c"] = 5.0
    stand.redis.announce("C")
    stand.pass_time(600)  # something was changed and announced: then one command says that the failed ones are the same
    assert [call for call in stand.redis.calls if call in ("guard", "zcard", "config_get")] == [
        "guard", "zcard", "config_get",
    ]  # fmt: skip


def test_a_silent_exchange_of_a_large_registry_for_one_of_the_same_size_is_found_by_the_sweep():
    stand = Stand(page_size=2).open()
    for number in range(5):
        stand.redis.fail(f"j{number}", f"{number + 1}-0", score=number)
    stand.redis.announce("F")
    stand.pass_time(610)
    del stand.redis.zsets["F"]["j2"]
    stand.redis.fail("other", "9-0", score=2)
    stand.pass_time(600)
    assert delivered(stand)[5:] == [("other", "failed")]


def test_members_that_left_their_registry_a_day_ago_are_forgotten():
    stand = Stand().open()
    stand.redis.fail("a", "1-0")
    stand.redis.fail("b", "2-0")
    stand.redis.announce("F")
    stand.pass_time(1)
    del stand.redis.zsets["F"]["a"]
    del stand.redis.records["a"]
    for _ in range(3):
        stand.redis.clock[0] += 90_000
        stand.pass_time(1)
    assert list(stand.store("digits@0").look("failed", ["a", "b"])) == ["b"]
    assert len(delivered(stand)) == 2


# ---- the link --------------------------------------------------------------------------------------------------------


@pytest.mark.req("S4-20", "S4-27")
def test_an_error_of_the_link_is_raised():
    stand = Stand().open()
    stand.link.inbox.append(Unavailable("cut"))
    with pytest.raises(Unavailable, match="cut"):
        stand.watcher.tick()


@pytest.mark.req("S4-27")
def test_an_error_of_a_command_is_raised():
    stand = Stand().open()
    stand.redis.announce("F")
    stand.redis.error = ServerRefused("OOM")
    with pytest.raises(ServerRefused, match="OOM"):
        stand.watcher.tick()


@pytest.mark.req("S4-20")
def test_a_second_confirmation_means_that_the_client_reconnected():
    stand = Stand().open()
    stand.link.inbox.append(Message("subscribed", pattern(0, "F")))
    with pytest.raises(Unavailable, match="cut and reconnected"):
        stand.watcher.tick()


@pytest.mark.req("S4-12")
def test_a_subscription_that_is_not_confirmed_is_an_error(monkeypatch):
    stand = Stand()
    silent = FakePubSub()
    silent.confirms = False
    monkeypatch.setattr(stand.redis, "pubsub", lambda: silent)
    with pytest.raises(Unavailable, match="did not confirm"):
        stand.watcher.open()


def test_a_quiet_link_is_pinged_twice_a_minute_and_a_busy_one_not():
    stand = Stand().open()
    pings: list[float] = []
    ping = stand.link.ping

    def counted() -> None:
        pings.append(stand.redis.clock[0])
        ping()

    stand.link.ping = counted  # type: ignore[method-assign]
    stand.pass_time(300)
    assert 9 <= len(pings) <= 10
    pings.clear()
    for _ in range(30):
        stand.link.inbox.append(Message("event", "nobody's", "zadd"))
        stand.pass_time(10)
    assert pings == []


def test_an_unanswered_ping_is_an_error_after_the_silence_and_the_time_for_an_answer():
    stand = Stand().open()
    stand.link.answers = False
    stand.pass_time(34)
    with pytest.raises(Unavailable, match="no answer to a ping within 5 s"):
        stand.pass_time(3)
    assert 35 <= stand.redis.clock[0] <= 36.5


def test_an_answer_that_waits_while_we_are_busy_is_an_answer():
    class Slow(FakeRedis):
        def config_get(self, name: str) -> str | None:
            if self.clock[0] > 0:  # at a sweep: it takes a minute, and the pong arrives meanwhile
                self.clock[0] += 60
                self.links[-1].inbox.append(Message("pong"))
            return super().config_get(name)

    stand = Stand(Slow(), sweep_s=31.0).open()
    stand.link.answers = False
    while stand.redis.clock[0] < 90:
        stand.watcher.tick()
    assert stand.redis.calls.count("config_get") == 1


def test_a_subscription_asked_for_twice_may_be_confirmed_twice():
    stand = stuck()
    stand.link.confirms = False
    for second in range(2):
        end(stand.redis, "a:x", "successful")
        stand.watcher.tick()
        run(stand.redis, "a:x", since=-200)
        stand.redis.records["a"] = replace(stand.redis.records["a"], status="canceled")
        stand.redis.zsets["C"]["a"] = NOW + second
        stand.redis.announce("C")
        stand.watcher.tick()
    stand.link.inbox.extend(Message("subscribed", channel(0, "X:a")) for _ in range(2))
    stand.pass_time(2)
    assert ("a", "canceled") in delivered(stand)


def test_run_ends_when_stopped_and_closes_its_connections():
    stand = Stand()
    stop = threading.Event()
    stand.redis.on_publish = stop.set
    stand.redis.fail("a", "1-0")
    stand.watcher.run(stop)
    assert stand.link.closed
    assert stand.redis.closed
    assert delivered(stand) == [("a", "failed")]


def test_closing_it_before_it_was_opened_is_fine():
    stand = Stand()
    stand.watcher.close()
    assert stand.redis.closed


# ---- before listening ------------------------------------------------------------------------------------------------


@pytest.mark.req("S4-14", "S4-25")
def test_wrong_flags_are_refused_before_anything_else_is_asked():
    stand = Stand(FakeRedis(flags="E"))
    with pytest.raises(ConfigError):
        stand.watcher.open()
    assert stand.redis.calls == ["time", "config_get"]
    assert stand.redis.links == []


def test_a_server_that_knows_no_such_setting_is_probed():
    redis = FakeRedis(flags=None)
    stand = Stand(redis)
    stand.watcher.open()
    assert "unlink" in redis.calls


def test_a_probe_that_is_not_announced_leaves_nothing_behind():
    redis = FakeRedis(flags=None)
    redis.announces = False
    assert not probe(redis, lambda: redis.clock[0])
    assert redis.links[0].closed
    assert list(redis.zsets) == ["F", "W", "C"]


def test_a_probe_that_may_not_be_written_is_the_servers_refusal(monkeypatch):
    redis = FakeRedis(flags=None)

    def refused(key: str, member: str, score: float) -> None:
        raise ServerRefused("NOPERM")

    monkeypatch.setattr(redis, "zadd", refused)
    with pytest.raises(ServerRefused, match="NOPERM"):
        preflight(redis, lambda: redis.clock[0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"queues": ()}, "no queue"),
        ({"queues": ("",)}, "no queue"),
        ({"channel": ""}, "no channel"),
        ({"stuck_job_timeout_s": 0}, "stuck_job_timeout_s"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 10_001}, "page_size"),
        ({"sweep_s": -1}, "sweep_s"),
        ({"ping_s": float("nan")}, "ping_s"),
        ({"lost_grace_s": -1}, "lost_grace_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, match):
    with pytest.raises(InvalidInput, match=match):
        settings(**changes)


@pytest.mark.req("S4-19")
def test_entries_of_a_walk_do_not_explain_announcements_during_it():
    """The one it finds was announced before it began. A second one, announced meanwhile where the walk has been already,
    is looked for by another walk."""
    stand = Stand(page_size=4)
    for number in range(40):
        stand.redis.fail(f"known{number:02}", f"{number + 1}-0", score=1_000.0 + number)
    stand.open()
    before = len(stand.redis.published)
    second = iter(["a-second"])

    def fail_behind() -> None:
        for job_id in second:
            stand.redis.fail(job_id, "900-0", score=1_019.5)
            stand.redis.announce("F")

    stand.redis.on_publish = fail_behind
    stand.redis.fail("known10-first", "800-0", score=1_020.5)  # neither among the highest nor among the lowest
    stand.redis.announce("F")
    stand.pass_time(10)
    told = [json.loads(body)["job"] for body in stand.redis.published[before:]]
    assert told == ["known10-first", "a-second"]


class SlowlyScanned(FakeRedis):
    """Half a second for every window of a walk."""

    def zscan(self, key: str, cursor: int, count: int) -> tuple[int, list[Member]]:
        self.clock[0] += 0.5
        return super().zscan(key, cursor, count)


def test_a_long_walk_at_the_start_does_not_delay_announcements():
    stand = Stand(SlowlyScanned(), page_size=4)
    for number in range(40):
        stand.redis.fail(f"known{number:02}", f"{number + 1}-0", score=1_000.0 + number)
    stand.open()
    before = len(stand.redis.published)
    stand.redis.fail("new", "800-0", score=1_020.5)  # neither among the highest nor among the lowest
    stand.redis.announce("F")
    stand.pass_time(15)  # the walk took five seconds; so does the next
    assert [json.loads(body)["job"] for body in stand.redis.published[before:]] == ["new"]


def test_the_log_names_a_few_events_and_has_the_number_of_many(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "headway.watcher")
    stand = Stand().open()
    for number in range(3):
        stand.redis.fail(f"few{number}", f"{number + 1}-0")
    stand.redis.announce("F")
    stand.watcher.tick()
    for number in range(30):
        stand.redis.fail(f"many{number}", f"{number + 100}-0")
    stand.redis.announce("F")
    stand.watcher.tick()
    said: list[Any] = [record for record in caplog.records if record.getMessage() == "reported"]
    assert [record.fields.get("job") for record in said] == ["few0", "few1", "few2", None]
    assert (said[-1].fields["count"], said[-1].fields["event"]) == (30, "failed")
