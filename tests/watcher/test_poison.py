"""Jobs that contain what no job should contain: each costs its own event at most, which is told in a degraded form."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from rq.job import Job, JobStatus

from headway._sql import connect
from headway.events import append_all
from headway.watcher import EventForm, ProcessedStore, SqlProcessedStore
from tests.watcher.scene import Scene

FORM = EventForm(payload_fields=["user_id"])
EXECUTION = {"type": "2", "execution_id": "x"}


def call(argument: str) -> bytes:
    """A job's payload as RQ's JSONSerializer writes it, around this piece of JSON."""
    return zlib.compress(b'["work.fail", null, [], {"user_id": %s}]' % argument.encode())


def fail(scene: Scene, job_id: str | bytes, hash: dict[str, Any], result: dict[Any, Any], entry: str = "*") -> None:
    """A failed job as RQ leaves it behind, or as nobody should."""
    raw = job_id if isinstance(job_id, bytes) else job_id.encode()
    scene.raw.hset(b"rq:job:" + raw, mapping={"created_at": "2026-11-16T10:00:00Z", "status": "failed"} | hash)
    if result:
        scene.raw.xadd(b"rq:results:" + raw, result, id=entry)
    scene.raw.zadd("rq:failed:digits", {raw: 9e9})


def surrogate(scene: Scene) -> None:
    fail(scene, "p", {"data": call('"a\\ud800b"')}, EXECUTION)


def not_a_number(scene: Scene) -> None:
    fail(scene, "p", {"data": call("NaN")}, EXECUTION)


def infinite(scene: Scene) -> None:
    fail(scene, "p", {"data": call("-Infinity")}, EXECUTION)


def large(scene: Scene) -> None:
    fail(scene, "p", {"data": call(json.dumps("x" * 10_000_000)), "worker_name": "w" * 10_000_000}, EXECUTION)


def long(scene: Scene) -> None:
    fail(scene, "p", {"data": call(json.dumps("x" * 100_000))}, EXECUTION)


def pickled(scene: Scene) -> None:
    fail(scene, "p", {"data": b"\x80\x05cos\nsystem\n"}, EXECUTION)


def undecodable_texts(scene: Scene) -> None:
    names = dict.fromkeys(("enqueued_at", "started_at", "ended_at", "worker_name"), b"\xff\x00\xfe")
    fail(scene, "p", names, EXECUTION | {"worker_name": b"\xff", "execution_id": b"\xfe\x00"})


def large_exception(scene: Scene) -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nBoom: ' + "\u2603" * 10_000_000
    fail(scene, "p", {}, EXECUTION | {"exc_string": base64.b64encode(zlib.compress(text.encode()))})


def half_a_million_empty_lines(scene: Scene) -> None:
    """An exception whose own words look like the traceback of a group."""
    link = "direct cause of the following exception:\n\n  + Exception Group Traceback (most recent call last):\n"
    text = f"Boom: {link}" + " \n" * 500_000
    fail(scene, "p", {}, EXECUTION | {"exc_string": base64.b64encode(zlib.compress(text.encode()))})


def damaged_exception(scene: Scene) -> None:
    fail(scene, "p", {}, EXECUTION | {"exc_string": b"\xff\xff no base64"})


def strange_numbers(scene: Scene) -> None:
    times = {"execution_started_at": "nan", "execution_ended_at": "1e400", "type": "soon"}
    fail(scene, "p", {"timeout": "for ever"}, EXECUTION | times)


def times_beyond_the_calendar(scene: Scene) -> None:
    times = {"execution_started_at": "-1e300", "execution_ended_at": "1e300"}
    fail(scene, "p", {}, EXECUTION | times, entry="99999999999999999-7")


def job_of_another_type(scene: Scene) -> None:
    scene.raw.set("rq:job:p", "a text")
    scene.raw.zadd("rq:failed:digits", {"p": 9e9})


def results_of_another_type(scene: Scene) -> None:
    fail(scene, "p", {}, {})
    scene.raw.lpush("rq:results:p", "a list")


def no_result_and_strange_times(scene: Scene) -> None:
    fail(scene, "p", {"ended_at": b"\xff" * 5_000}, {})


def name_of_any_bytes(scene: Scene) -> None:
    fail(scene, b"p\xff\x00\xfe", {}, EXECUTION)


def long_name(scene: Scene) -> None:
    fail(scene, "p" * 100_000, {}, EXECUTION)


def infinite_score(scene: Scene) -> None:
    fail(scene, "p", {}, {})
    scene.raw.zadd("rq:failed:digits", {"p": float("inf")})


POISONS = [
    surrogate, not_a_number, infinite, large, long, pickled, undecodable_texts, large_exception,
    half_a_million_empty_lines, damaged_exception,
    strange_numbers, times_beyond_the_calendar, job_of_another_type, results_of_another_type,
    no_result_and_strange_times, name_of_any_bytes, long_name, infinite_score,
]  # fmt: skip


def check(
    scene: Scene, store: Callable[[str], ProcessedStore] | None, poison: Callable[[Scene], None]
) -> dict[str, Any]:
    """One poison among good ones, found at the start and announced; a restart repeats nothing. Its event."""
    scene.burst(1, prefix="before")
    poison(scene)
    for round in range(2):
        with scene.watching(store=store, form=FORM):
            scene.burst(1, prefix=f"after{round}")
            scene.events.expect_number(3 + round)
    (event,) = [one for one in scene.events.all if one["job"].startswith("p")]
    jobs = sorted(one["job"] for one in scene.events.all)
    assert [job for job in jobs if not job.startswith("p")] == ["after0-00000", "after1-00000", "before-00000"]
    assert event["data"]["kind"] == "failed"
    assert len(json.dumps(event)) < 20_000
    return event


@pytest.mark.req("S4-34")
@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.__name__)
def test_a_poisonous_job_costs_its_own_event_only(scene: Scene, poison):
    check(scene, None, poison)


@pytest.mark.parametrize("store", ["redis", "postgresql"])
@pytest.mark.parametrize("poison", [undecodable_texts, name_of_any_bytes, long_name, no_result_and_strange_times])
def test_every_store_remembers_it(scene: Scene, request: pytest.FixtureRequest, store, poison):
    if store == "redis":
        check(scene, scene.redis_store, poison)
    else:
        database = connect(request.getfixturevalue("postgres_url"))
        check(scene, lambda queue: SqlProcessedStore(database, queue), poison)


def test_a_job_with_a_name_too_long_for_an_index_reaches_the_sinks(scene: Scene, postgres_url: str):
    letters = random.Random(4)  # not one after another: PostgreSQL would make that small enough
    name = "p" + "".join(chr(letters.randrange(0x10000, 0x20000)) for _ in range(3_000))
    with connect(postgres_url) as database:
        fail(scene, name, {}, EXECUTION | {"execution_id": name})
        scene.burst(1)
        for _ in range(2):  # started again it adds nothing
            with scene.watching(
                store=lambda queue: SqlProcessedStore(database, queue), append=partial(append_all, database)
            ):
                told = scene.events.expect_number(2)
        kept = database.all("SELECT id FROM outbox")
    assert sorted(one for (one,) in kept) == sorted(event["id"] for event in told)


def test_the_readable_fields_of_a_poisonous_job_are_reported(scene: Scene):
    for number, poison in enumerate([surrogate, not_a_number, long, large_exception, pickled]):
        poison(scene)
        for key in ("rq:job:", "rq:results:"):
            scene.raw.rename(f"{key}p", f"{key}p{number}")
        scene.raw.zadd("rq:failed:digits", {f"p{number}": 9e9})
        scene.raw.zrem("rq:failed:digits", "p")
    with scene.watching(form=FORM):
        told = {one["job"]: one["data"] for one in scene.events.expect_number(5)}
    assert told["p0"]["user_id"] == "a\ufffdb"
    assert "user_id" not in told["p1"]
    assert told["p2"]["user_id"].startswith("xxx")
    assert len(told["p2"]["user_id"]) == 1_000
    assert told["p3"]["error_type"] == "Boom"
    assert told["p3"]["message"].startswith("Boom: \u2603")
    assert len(told["p3"]["message"]) == 500
    assert "user_id" not in told["p4"]


def test_a_poisonous_job_may_be_canceled_and_run_as_well(scene: Scene):
    """The canceled and the started registry have their own look-ups."""
    scene.raw.hset(b"rq:job:p\xff", mapping={"created_at": b"\xff", "enqueued_at": b"\xff", "status": b"\xff"})
    scene.raw.zadd("rq:canceled:digits", {b"p\xff": float("inf")})
    scene.raw.set("rq:job:q", "no hash")
    scene.raw.set("rq:execution:q:x", "no hash")
    scene.raw.zadd("rq:wip:digits", {"q:x": 1.0})
    with scene.watching():
        scene.burst(1)
        events = scene.events.expect_number(4)
    assert sorted(one["data"]["kind"] for one in events) == ["canceled", "failed", "gone", "lost"]


def test_the_outcome_of_an_execution_whose_name_consists_of_any_bytes_is_awaited_like_any_other(scene: Scene):
    scene.raw.hset(b"rq:job:p\xff", mapping={"created_at": "2026-11-16T10:00:00Z", "status": "started"})
    scene.raw.zadd("rq:executions:p\xff".encode("latin-1"), {"x": 1.0})
    scene.raw.zadd("rq:wip:digits", {b"p\xff:x": 1.0})
    with scene.watching():
        scene.events.expect_number(1)
        scene.raw.hset(b"rq:job:p\xff", "status", "finished")
        scene.raw.zrem("rq:wip:digits", b"p\xff:x")
        scene.raw.zrem(b"rq:executions:p\xff", "x")
        events = scene.events.expect_number(2)
    assert [one["data"]["kind"] for one in events] == ["lost", "finished"]


def test_jobs_with_large_payloads_are_read_without_them(scene: Scene):
    for number in range(20):
        job = Job.create("work.fail", id=f"big{number}", connection=scene.raw, origin="digits", status=JobStatus.FAILED)
        with scene.raw.pipeline() as pipe:
            job._handle_failure("Boom", pipe, worker_name="w", execution_id="e")
            pipe.hset(job.key, "data", b"x" * 400_000)
            pipe.execute()
    scene.redis.config_resetstat()
    with scene.watching():
        scene.events.expect_number(20)
    sent: dict[str, int] = scene.redis.info("stats")
    assert sent["total_net_output_bytes"] < 1_000_000
