"""What the third attack on the queue found: each of these once failed."""

from __future__ import annotations

import os
import stat
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from headway._sql import Tx
from headway.errors import HeadwayError, InvalidInput, NotFound, StorageError
from headway.lifecycle import Shutdown
from headway.queue import admission, migration, supervisor
from headway.queue.codec import PlainCodec
from headway.queue.execution import rss
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status, Task
from headway.queue.watch import Settings
from headway.queue.worker import Worker
from headway.testing import eager
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def test_a_task_that_is_tried_again_while_the_sweeper_deletes_it_is_not_lost(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue, ThreadPoolExecutor(1) as threads:
        queue.handler("caption")(lambda task, payload: payload)
        old = queue.cancel(queue.submit("caption").id)
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET ended_at = ended_at - 40 * 86400"))

        def try_again(tx: Tx) -> Task:
            task = admission.retry(tx, old.id, per_user=1)
            purged = threads.submit(Sweeper(queue).purge)
            eventually(lambda: purged.done() or queue.database.one("SELECT 1 FROM pg_locks WHERE NOT granted"))
            return task

        queue.database.run(try_again)
        threads.submit(lambda: None).result(60)  # the sweeper is through
        assert queue.get(old.id).status is Status.QUEUED


# ---------------------------------------------------------------------------------------------------------------------
# What a handler returned


def work_off(queue: TaskQueue) -> None:
    Worker(queue, settings=Settings(rest=0.05)).run(burst=True)


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_what_a_handler_returned_can_be_read_by_whose_task_it_is(database_url: str, isolation: Any):
    with TaskQueue(database_url) as queue:
        queue.handler("caption", isolation=isolation)(lambda task, payload: payload)
        told = queue.submit("caption", {"words": ["a", "boat"]}, user_id="anna")
        silent = queue.submit("caption")
        with pytest.raises(InvalidInput, match="is QUEUED: it has no result"):
            queue.result(told.id)
        work_off(queue)
        assert queue.result(told.id, user_id="anna") == {"words": ["a", "boat"]}
        assert queue.result(silent.id) is None
        with pytest.raises(NotFound):
            queue.result(told.id, user_id="ben")


@pytest.mark.parametrize("isolation", ["fork", "none", "eager"])
def test_with_keys_what_a_handler_returned_is_stored_encrypted(database_url: str, isolation: Any):
    with TaskQueue(database_url, keys=[Fernet.generate_key()]) as queue:
        queue.handler("caption", isolation="none" if isolation == "eager" else isolation)(lambda task, payload: payload)

        def look() -> None:
            (stored,) = queue.database.one("SELECT result FROM tasks WHERE id = ?", (task.id,)) or ("",)
            assert "canary" not in stored
            assert queue.result(task.id) == "canary"

        if isolation == "eager":
            with eager(queue):
                task = queue.submit("caption", "canary")
                look()
            return
        task = queue.submit("caption", "canary")
        work_off(queue)
        look()


@pytest.mark.parametrize("stored", ['"forged"', "payload"])
def test_a_result_that_somebody_put_there_is_refused_also_if_it_is_the_tasks_own_payload(
    queue: TaskQueue, stored: str, database_url: str
):
    with TaskQueue(database_url, keys=[Fernet.generate_key()]) as keyed:
        keyed.handler("caption", isolation="none")(lambda task, payload: "a boat")
        task = keyed.submit("caption", "canary")
        work_off(keyed)
        value = "payload" if stored == "payload" else f"'{stored}'"
        keyed.database.run(lambda tx: tx.execute(f"UPDATE tasks SET result = {value}"))
        with pytest.raises(StorageError, match=f"The result of task {task.id} cannot be read") as refused:
            keyed.result(task.id)
        assert "canary" not in str(refused.value)


@pytest.mark.parametrize("cannot", ["read the payload", "write the result"])
def test_a_codec_of_the_application_that_raises_costs_its_own_task_alone(tmp_path: Path, cannot: str):
    class Fussy(PlainCodec):
        def encode(self, task_id: str, text: str) -> str:
            if text == '"write the result"' and " " in task_id:
                raise RuntimeError
            return text

        def decode(self, task_id: str, stored: str) -> str:
            if stored == '"read the payload"':
                raise RuntimeError
            return stored

    with TaskQueue(f"sqlite:///{tmp_path}/queue.db", codec=Fussy()) as queue:
        queue.handler("caption", isolation="none")(lambda task, payload: payload)
        refused, taken = queue.submit("caption", cannot), queue.submit("caption", "a boat")
        work_off(queue)
        assert queue.get(refused.id).status is Status.FAILED
        assert "RuntimeError" in str(queue.get(refused.id).error)
        assert queue.result(taken.id) == "a boat"


# ---------------------------------------------------------------------------------------------------------------------
# Handlers that reach for what is not theirs


def pipes() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


@pytest.mark.parametrize(
    "said", ["7", '{"progress": 1}', '{"ended": 3}', '{"ended": [7, ["a"], "failed", 1]}', '{"progress": [1e999, ""]}', "long"]
)  # fmt: skip
def test_a_handler_that_writes_into_the_pipe_to_its_worker_is_in_nobodys_way(tmp_path: Path, said: str):
    foreign = pipes()
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("odd", retries=0)
        def odd(task: Any, payload: str) -> str:
            raw = payload.encode()
            for pipe in pipes() - foreign:
                os.write(pipe, struct.pack(">I", 2**32 - 1 if payload == "long" else len(raw)) + raw)
            return "done"

        queue.handler("caption")(lambda task, payload: payload)
        strange, plain = queue.submit("odd", said), queue.submit("caption", 7)
        work_off(queue)
        assert queue.get(strange.id).is_final
        assert queue.get(strange.id).percent in (0.0, 100.0)
        assert queue.result(plain.id) == 7


def test_a_handlers_own_file_in_the_place_of_the_pipe_is_not_written_into(tmp_path: Path):
    foreign, kept = pipes(), []
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("daemon", retries=0)
        def daemon(task: Any, payload: Any) -> str:
            for pipe in pipes() - foreign:
                os.close(pipe)
                kept.append((tmp_path / "own").open("wb"))
                os.dup2(kept[-1].fileno(), pipe)
            return "done"

        task = queue.submit("daemon")
        work_off(queue)
        assert queue.get(task.id).status is Status.FAILED
        assert (tmp_path / "own").read_bytes() == b""


# ---------------------------------------------------------------------------------------------------------------------
# The memory of a worker whose handlers run in it


MB = 2**20


@pytest.mark.req("S2-48")
def test_a_task_that_uses_too_much_memory_in_its_workers_process_is_ended_with_its_cause(tmp_path: Path):
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("hog", retries=0, isolation="none")
        def hog(task: Any, payload: Any) -> None:
            taken = bytearray(b"x" * 300 * MB)
            for _ in range(600):
                time.sleep(0.05)
            del taken

        task = queue.submit("hog")
        Worker(queue, settings=Settings(rest=0.05, memory_limit=rss(os.getpid()) + 100 * MB)).tick()
        assert str(queue.get(task.id).error).startswith("MemoryLimit: the task's process used more than")
        assert queue.database.all("SELECT outcome FROM task_attempts") == [("memory",)]


@pytest.mark.req("S2-48")
def test_a_worker_whose_handlers_leave_too_much_in_its_memory_ends_and_the_next_task_waits_uncharged(tmp_path: Path):
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        # It ends at once: while a task runs, somebody else looks at the memory, and ends the task for it.
        queue.handler("leak", isolation="none")(lambda task, payload: None)
        first, second = queue.submit("leak"), queue.submit("leak")
        worker = Worker(queue, settings=Settings(rest=0.05, batch=1, memory_limit=rss(os.getpid()) // 2))
        worker.run()
        assert worker.outgrown
        assert queue.get(first.id).status is Status.COMPLETED
        assert (queue.get(second.id).status, queue.get(second.id).attempts) == (Status.QUEUED, 0)


def test_a_burst_that_ends_because_of_its_memory_says_that_it_is_not_through(tmp_path: Path):
    left: list[bytearray] = []
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.handler("leak", isolation="none")(lambda task, payload: left.append(bytearray(b"x") * (64 * MB)))
        queue.submit("leak")
        queue.set("memory_limit", (rss(os.getpid()) + 32 * MB) // MB)
        with pytest.raises(HeadwayError, match="ended before all was done"):
            supervisor.work_off(queue, supervisor.Plan(""), shutdown=Shutdown())


# ---------------------------------------------------------------------------------------------------------------------
# Moving


def test_a_move_to_the_database_ends_also_beside_a_sweeper_that_tells_rq_again(
    database_url: str, redis_server: RedisServer
):
    redis_server.client(0).flushall()
    stop = threading.Event()
    with TaskQueue(database_url, redis_server.url(), per_user=None) as queue, ThreadPoolExecutor(2) as threads:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit_many({"kind": "caption"} for _ in range(1200))
        sweeping = threads.submit(Sweeper(queue, hints=queue.hints).run, stop)
        try:
            moved = threads.submit(migration.to_database, queue).result(30)
        finally:
            stop.set()
            sweeping.result(60)
        assert moved.moved == 1200


def test_a_move_to_the_database_while_redis_is_away_says_that_the_hints_are_still_there(
    database_url: str, redis_factory: Callable[..., RedisServer]
):
    server = redis_factory()
    with TaskQueue(database_url, server.url(), per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit_many({"kind": "caption"} for _ in range(3))
        server.stop()
        assert migration.to_database(queue) == migration.Moved(0, left=3)
