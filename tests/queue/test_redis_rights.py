"""The queue on a Redis that grants exactly the documented rights."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.lifecycle import Shutdown
from headway.queue import migration
from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.task import Status, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.supervisor import CurrentHints
from headway.queue.worker.worker import Worker
from tests.services.redis import RedisServer, installations
from tests.services.waiting import eventually

ROOT = Path(__file__).parents[2]
SHOP = """
from headway.queue import TaskQueue
from tests.queue.test_redis_rights import register
queue = register(TaskQueue.from_settings())
"""


def documented_rights() -> list[str]:
    page = (ROOT / "docs" / "reference" / "redis.md").read_text("utf-8")
    found = re.search(r"^ACL SETUSER (headway-queue on .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].replace("PASSWORD", "s3cret").split()


@pytest.fixture(params=installations(), ids=lambda path: path.parent.parent.name)
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "guarded", request.param)
    server.start()
    yield server
    server.discard()


def fail(task: object, payload: object) -> None:
    raise ValueError("no")


def register(queue: TaskQueue) -> TaskQueue:
    queue.handler("echo", isolation="none")(lambda task, payload: payload)
    queue.handler("fail", isolation="none", retries=0)(fail)
    queue.handler("forked", retries=0)(fail)
    queue.handler("long")(lambda task, payload: time.sleep(payload))
    return queue


def refusals(server: RedisServer) -> set[str]:
    log: Any = server.client().execute_command("ACL", "LOG", "128")
    entries = [entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True)) for entry in log]
    found = {f"{entry['reason']} {entry['object']}" for entry in entries}
    return {entry for entry in found if "client" not in entry.lower()}  # what redis-py says of itself


def use_all_of_it(queue: TaskQueue, admin: Any) -> None:
    tasks = [queue.submit(kind, user_id=user) for kind, user in (("echo", 1), ("fail", 2), ("forked", 3), ("echo", 4))]
    for _ in range(2):
        with pytest.raises(UserBusy):
            queue.submit("echo", user_id=1)
    queue.cancel(tasks[3].id)
    admin.rpush("rq:queue:headway:normal", "forged")
    work_off(queue, "w1")
    assert [queue.get(task.id).status for task in tasks[:3]] == [Status.COMPLETED, Status.FAILED, Status.FAILED]
    queue.submit("echo", user_id=5)
    assert queue.hints is not None
    migration.to_database(queue)
    migration.to_rq(queue, queue.hints)
    admin.flushdb()
    sweeper = Sweeper(queue, hints=CurrentHints(queue))
    for _ in range(3):
        sweeper.tick()
    queue.retry(tasks[1].id)
    work_off(queue, "w2")
    admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] * 1.05))
    queue.hints.check_memory()  # nearly full: it cleans up
    admin.config_set("maxmemory", 0)
    queue.hints.check_memory()
    for key in ("rq:workers", "rq:workers:headway:normal"):
        admin.sadd(key, "rq:worker:killed")
    admin.zadd("rq:wip:headway:normal", {"killed": 1})
    queue.hints.remove_dead_workers()
    assert not admin.sismember("rq:workers:headway:normal", "rq:worker:killed")
    assert not admin.exists("rq:wip:headway:normal")


def work_off(queue: TaskQueue, name: str) -> None:
    assert queue.backend.redis_url is not None
    source = RqSource(queue, queue.backend.redis_url, name=name)
    Worker(queue, name=name, source=source, shutdown=Shutdown()).run(burst=True)


@pytest.mark.filterwarnings("ignore:CLIENT LIST command not supported")  # RQ asks for the address of its own client
def test_the_documented_rights_of_the_queue_are_enough_and_none_is_too_many(
    guarded: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spawn_cli: Callable[..., subprocess.Popen[str]],
):
    admin = guarded.client(0)
    admin.execute_command("ACL", "SETUSER", *documented_rights())
    url = f"redis://headway-queue:s3cret@127.0.0.1:{guarded.port}/0"
    database = f"sqlite:///{tmp_path}/queue.db"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
    Path("shop.py").write_text(SHOP)
    with register(TaskQueue(database, url)) as queue:
        use_all_of_it(queue, admin)
        supervisor = spawn_cli(
            "worker", "--app", "shop:queue", env={"HEADWAY_DATABASE": database, "HEADWAY_REDIS": url},
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        eventually(lambda: admin.smembers("rq:workers"), 60)
        short, long = queue.submit("echo", user_id=1), queue.submit("long", 2, user_id=2)
        eventually(lambda: admin.zcard("rq:wip:headway:normal"), 60)  # RQ's tools see it run
        eventually(lambda: all(queue.get(task.id).status is Status.COMPLETED for task in (short, long)), 60)
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert refusals(guarded) == set()
    used = {name.removeprefix("cmdstat_").partition("|")[0] for name in admin.info("commandstats")}
    granted = {right[1:].partition("|")[0] for right in documented_rights() if right.startswith("+")}
    assert granted - used <= {"select", "ping"}, "a right that nothing uses"
