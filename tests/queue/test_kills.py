"""Workers are killed with SIGKILL, many of them, at any moment: no task is lost, none is recorded twice.

The truth is a file to which every execution appends its task and attempt. A hundred kills in the normal suite, over both
modes, both engines and both ways of running a handler; a thousand in `make faults`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.queue.recovery import Sweeper
from headway.queue.task_queue import TaskQueue
from tests.queue import app
from tests.queue.nursery import Forked, Nursery
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

WORKERS = 3
CASES = [
    ("database", "file", "fork"),
    ("database", "postgresql", "none"),
    ("rq", "file", "none"),
    ("rq", "postgresql", "fork"),
]


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Callable[..., Forked]]:
    started: list[Forked] = []

    def begin(name: str, **options: object) -> Forked:
        started.append(nursery.begin(name, **options))
        return started[-1]

    yield begin
    for child in started:
        child.kill()


@pytest.mark.req("S2-14", "S2-16", "S2-31")
@pytest.mark.parametrize(("mode", "engine", "isolation"), CASES)
@pytest.mark.parametrize("kills", [25, pytest.param(250, marks=pytest.mark.faults)])
def test_kill_9_of_workers_loses_no_task_and_records_none_twice(
    mode: str, engine: str, isolation: str, kills: int, tmp_path: Path, request: pytest.FixtureRequest,
    start: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr("headway.queue.recovery.HINT_SECONDS", 0.2)  # a lost hint is missed sooner than in 10 s
    url = f"sqlite:///{tmp_path}/queue.db" if engine == "file" else request.getfixturevalue("postgres_url")
    server: RedisServer | None = request.getfixturevalue("redis_server") if mode == "rq" else None
    redis_url = server.url() if server else None
    truth = tmp_path / "ran"
    chance = random.Random(kills)
    with app.build(url, redis=redis_url, isolations=[isolation]) as queue:
        sweeper, submitted, alive = Sweeper(queue, hints=queue.hints), 0, list[Forked]()
        for n in range(4 * kills):
            if n >= kills and _lost(queue):
                break  # until some of those killed held a task: on a busy machine many of them are killed before they have one
            while _active(queue) < 2 * WORKERS:
                _submit(queue, isolation, truth, 10)
                submitted += 10
            while len(alive) < WORKERS:
                name = f"w{n}-{len(alive)}-{chance.getrandbits(32):x}"
                alive.append(start(name, url=url, redis=redis_url, isolations=[isolation]))
            size = _size(truth)
            eventually(lambda: sweeper.tick() >= 0 and (_size(truth) > size or not _active(queue)), 60)  # noqa: B023 - at once
            victim = alive.pop(chance.randrange(WORKERS))
            victim.kill()
            if server:
                server.client().lpop("rq:queue:headway:normal")  # and one that dies right after the pop
        while len(alive) < WORKERS:
            alive.append(start(f"last-{len(alive)}", url=url, redis=redis_url, isolations=[isolation]))
        eventually(lambda: sweeper.tick() >= 0 and not _active(queue), 120)
        statuses = queue.database.all("SELECT status, count(*) FROM tasks GROUP BY status")
        assert statuses == [("COMPLETED", submitted)]
        completions = queue.database.all("SELECT job, count(*) FROM outbox WHERE type = 'task.completed' GROUP BY job")
        assert Counter(count for _, count in completions) == {1: submitted}
        lost = _lost(queue)
        others = queue.database.all("SELECT outcome FROM task_attempts WHERE outcome <> 'lost'")
    ran = Counter(truth.read_text().splitlines())
    assert len({line.split()[0] for line in ran}) == submitted
    assert set(ran.values()) == {1}, "an attempt is one execution: a second one is charged as a second attempt"
    assert sum(ran.values()) <= submitted + lost
    assert not others, "what was not killed did not fail"
    assert lost, "some of those killed held a task"


def _submit(queue: TaskQueue, isolation: str, truth: Path, count: int) -> None:
    payload = {"file": str(truth), "seconds": 0.005}
    queue.submit_many([{"kind": f"log.{isolation}", "payload": payload} for _ in range(count)])
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET retries = 100, retry_delay = 0.01 WHERE retries = 0"))


def _lost(queue: TaskQueue) -> int:
    row = queue.database.one("SELECT count(*) FROM task_attempts WHERE outcome = 'lost'")
    assert row is not None
    return int(row[0])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _active(queue: TaskQueue) -> int:
    row = queue.database.one("SELECT count(*) FROM tasks WHERE status IN ('QUEUED', 'RUNNING')")
    assert row is not None
    return int(row[0])
