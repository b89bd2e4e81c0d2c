"""The watcher on the one path of events."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headway._sql import connect
from headway.core.lifecycle import Shutdown
from headway.errors import ServerRefused, Unavailable
from headway.events import Event
from headway.watcher import EventForm, Publisher
from headway.watcher.adapters import connect as connect_redis
from headway.watcher.reports import Report
from headway.watcher.runner import main
from tests.services.redis import RedisServer
from tests.services.waiting import eventually
from tests.watcher.fakes import FakeRedis, ports
from tests.watcher.test_runner import ENVIRONMENT


def report(number: int, **facts: Any) -> Report:
    at = datetime(2026, 11, 1, 0, 0, number, tzinfo=UTC)
    return Report(f"j-{number}", "failed", "system", facts.pop("message", "it broke"), f"x-{number}", at, **facts)


def test_the_watchers_events_reach_every_configured_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Any
):
    monkeypatch.chdir(tmp_path)
    redis, shutdown = FakeRedis(), Shutdown()
    redis.fail("a", "1-0")

    def take(handler: Any) -> None:
        handler.send_response(204)
        handler.end_headers()
        shutdown.request()

    receiver.answers = [take]
    assert main(ENVIRONMENT | {"HEADWAY_SINKS": receiver.url}, ports(redis), shutdown) == 0
    [(_, _, body)] = receiver.requests
    assert Event.from_json(body) == Event.from_json(redis.published[0])


def test_an_event_published_again_after_a_crash_reaches_a_sink_once(tmp_path: Path):
    appended: list[list[str]] = []
    redis = FakeRedis()
    publisher = Publisher(redis, EventForm(), "c", append=lambda found: appended.append([one.id for one in found]))

    def refuse() -> None:
        raise ServerRefused("NOPERM")

    redis.on_publish = refuse
    for _ in range(2):
        with pytest.raises(ServerRefused):
            publisher.publish("digits", [report(1)])
    assert appended[0] == appended[1]  # the outbox knows it by its id: see test_sql


def test_without_a_database_sinks_get_no_events_and_that_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], redis_server: RedisServer
):
    monkeypatch.chdir(tmp_path)
    redis, shutdown = FakeRedis(), Shutdown()
    redis.fail("a", "1-0")
    redis.on_publish = shutdown.request
    settings = ENVIRONMENT | {"HEADWAY_SINKS": "log:", "RQ_WATCHER_STORE": "redis", "REDIS_URL": redis_server.url(0)}
    assert main(settings, replace(ports(redis), hashes=connect_redis), shutdown) == 0
    assert len(redis.published) == 1
    assert "sinks receive no events" in capfd.readouterr().err
    assert not (tmp_path / "headway.db").exists()


def test_no_content_of_a_job_prevents_the_events_of_others(tmp_path: Path):
    import zlib

    payload = zlib.compress(b'["f", null, [], {"ratio": NaN, "user": "\\ud800", "size": 3}]')
    redis = FakeRedis()
    form = EventForm(payload_fields=("ratio", "user", "size"), fields={"limit": float("inf")})
    Publisher(redis, form, "c").publish("digits", [report(1, payload=payload), report(2, message="half \ud800")])
    first, second = (json.loads(body.encode(), parse_constant=pytest.fail) for body in redis.published)
    assert "ratio" not in first["data"], "what is no JSON is left out"
    assert [first["data"][name] for name in ("user", "size", "limit")] == ["\ufffd", 3, None]
    assert second["data"]["message"] == "half \ufffd"


@pytest.mark.parametrize("refusal", ["PUBLISH", "XADD", "WRONGTYPE"])
def test_a_server_that_refuses_to_publish_keeps_no_copy_however_often_the_watcher_is_started_again(
    redis_server: RedisServer, refusal: str
):
    client: Any = redis_server.client(0)
    if refusal == "WRONGTYPE":
        client.set("log", "a text")
    rights = {"PUBLISH": "-publish", "XADD": "-xadd"}.get(refusal, "+ping")
    client.execute_command("ACL", "SETUSER", "watcher", "on", ">word", "~*", "&*", "+@all", rights)
    redis = connect_redis(redis_server.url(0).replace("redis://", "redis://watcher:word@"))
    publisher = Publisher(redis, EventForm(), "c", stream="log")
    for _ in range(3):
        with pytest.raises((ServerRefused, Unavailable)) as refused:
            publisher.publish("digits", [report(1), report(2)])
        assert "j-1" not in str(refused.value), "the command is not shown"
    if refusal != "WRONGTYPE":
        assert client.xlen("log") == 0


def test_a_copy_and_the_event_on_the_channel_are_the_same(redis_server: RedisServer):
    client: Any = redis_server.client(0)
    listener = client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe("c")
    eventually(lambda: client.pubsub_numsub("c")[0][1])
    publisher = Publisher(connect_redis(redis_server.url(0)), EventForm(), "c", stream="log")
    publisher.publish("digits", [report(2), report(1)])
    heard = [eventually(lambda: listener.get_message(timeout=1))["data"] for _ in range(2)]
    assert [fields["event"] for _, fields in client.xrange("log")] == heard
    assert [json.loads(body)["job"] for body in heard] == ["j-1", "j-2"]  # the oldest first
    listener.close()


def test_the_outbox_gets_no_event_without_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    redis, shutdown = FakeRedis(), Shutdown()
    redis.on_publish = shutdown.request
    redis.fail("a", "1-0")
    assert main(ENVIRONMENT, ports(redis), shutdown) == 0
    with connect(f"sqlite:///{tmp_path}/headway.db") as database:
        assert database.one("SELECT count(*) FROM outbox") == (0,)
