"""The thresholds of Redis's memory are settings: what is logged, when hints stop, and when they begin again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway._lease import Owner
from headway.config import Config
from headway.errors import HeadwayError
from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.store.claim import Claimant
from headway.queue.task import PRIORITIES
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.supervisor import CurrentHints
from tests.services.redis import RedisServer

USED = 40 * 2**20


def fill(server: RedisServer, size: int) -> None:
    """Let Redis use ``size`` bytes, to within a few kilobytes."""
    client: Any = server.client()
    client.flushall()
    # SETRANGE makes the text inside the server: a client's buffers would count too.
    client.setrange("ballast", size - client.info("memory")["used_memory"], "x")


@pytest.fixture
def server(redis_factory: Callable[..., RedisServer]) -> RedisServer:
    return redis_factory()


@pytest.fixture
def made(tmp_path: Path, server: RedisServer) -> Iterator[Callable[..., TaskQueue]]:
    opened: list[TaskQueue] = []

    def make(**values: object) -> TaskQueue:
        said = {f"HEADWAY_QUEUE_{name.upper()}": str(value) for name, value in values.items()}
        place = {"HEADWAY_DATABASE": f"sqlite:///{tmp_path}/q.db", "HEADWAY_QUEUE_REDIS": server.url()}
        queue = TaskQueue.from_settings(Config(environment={**place, **said}))
        queue.handler("echo", isolation="none")(lambda task, payload: payload)
        opened.append(queue)
        return queue

    yield make
    for queue in opened:
        queue.close()


@pytest.mark.req("S2-35", "S2-59")
@pytest.mark.parametrize(
    ("values", "overflows", "warns"),
    [
        ({"redis_memory": 44}, True, False),  # 91 %
        ({"redis_memory": 50}, False, True),  # 80 %
        ({"redis_memory": 60}, False, False),  # 67 %
        ({"redis_memory": 44, "redis_critical": 95}, False, True),
        ({"redis_memory": 50, "redis_critical": 78}, True, False),
        ({"redis_memory": 50, "redis_warn": 82}, False, False),
        ({"redis_memory": 60, "redis_warn": 60}, False, True),
    ],
)
def test_hints_stop_and_a_warning_is_logged_at_the_configured_percents(
    made: Callable[..., TaskQueue],
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    values: dict[str, int],
    overflows: bool,
    warns: bool,
):
    fill(server, USED)
    queue = made(**values)
    assert queue.hints is not None
    with caplog.at_level(logging.WARNING, "headway"):
        assert queue.hints.check_memory() is overflows
        queue.hints.check_memory()
    assert [record.levelname for record in caplog.records] == (["CRITICAL"] if overflows else ["WARNING"] * warns)
    queue.submit("echo", 1)
    assert server.client().llen("rq:queue:headway:normal") == (0 if overflows else 1)


@pytest.mark.req("S2-59")
def test_hints_begin_again_below_the_warning_percent(made: Callable[..., TaskQueue], server: RedisServer):
    hints = made(redis_memory=100, redis_critical=70, redis_warn=50).hints
    assert hints is not None
    seen = []
    for percent in (60, 75, 60, 45, 60):
        fill(server, percent * 2**20)
        seen.append(hints.check_memory())
    assert seen == [False, True, True, False, False]


@pytest.mark.parametrize(
    "values",
    [
        {"redis_warn": 85},
        {"redis_warn": 90},
        {"redis_critical": 101},
        {"redis_warn": 0},
        {"redis_critical": 75},
        {"prefix": "a b"},
    ],
)
def test_thresholds_that_contradict_each_other_are_refused(made: Callable[..., TaskQueue], values: dict[str, object]):
    with pytest.raises(HeadwayError, match=r"(?i)queue_"):
        made(**values)


def test_a_hint_that_a_full_redis_threw_away_is_missed_although_it_is_full(
    database_url: str, redis_server: RedisServer
):
    with TaskQueue(database_url, redis_server.url()) as queue, redis_server.client() as client:
        queue.handler("caption")(lambda task, payload: payload)
        task = queue.submit("caption")
        client.delete("rq:queue:headway:normal")  # evicted, or popped by a worker that was killed
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = hinted_at - 60"))
        client.config_set("maxmemory", client.info("memory")["used_memory"] * 10 // 9)
        try:
            hints = CurrentHints(queue)
            assert hints.check_memory()
            Sweeper(queue, hints=hints).tick()
            source = RqSource(queue, redis_server.url(), name="w")
            claimed = source.claim(Claimant("w", Owner.current(), ["caption"]), PRIORITIES, 1)
            source.close()
        finally:
            client.config_set("maxmemory", 0)
        assert [claim.id for claim in claimed] == [task.id]


def test_a_submitter_too_leaves_a_redis_alone_that_is_nearly_full(
    tmp_path: Path, redis_factory: Callable[..., RedisServer]
):
    server = redis_factory(maxmemory="40mb", maxmemory_policy="noeviction")
    client = server.client(0)
    for n in range(200):
        if client.info("memory")["used_memory"] < 0.9 * 40 * 2**20:
            client.set(f"ballast:{n}", "x" * 2**18)
    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db", f"redis://127.0.0.1:{server.port}/0", per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit("caption")
        assert client.llen("rq:queue:headway:normal") == 0
        assert queue.database.one("SELECT count(*) FROM tasks WHERE hinted_at IS NULL") == (1,)
