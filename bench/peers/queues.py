"""One no-op task for each task queue that is compared, headway's own among them; their workers import this file.

BENCH_PEER says which queue, BENCH_REDIS and BENCH_POSTGRES where its servers are, BENCH_BATCH how many tasks a worker
claims together where that can be said, BENCH_TICKS the file to which a task that runs appends twelve bytes (its number and
the moment): that is how a run is seen, for about two microseconds and without any queue's own help.

    queues.py prepare          make the queue's tables
    queues.py enqueue COUNT    one by one; prints the seconds of each call as JSON
    queues.py many COUNT       together, as the queue does it best; prints the seconds of all
    queues.py bulk COUNT       the same on a connection that is open; prints the seconds of each of five calls as JSON
    queues.py pickup ROUNDS    one at a time on idle workers; prints the seconds until each one ran
    queues.py work             the queue's workers, where it has no command for that
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any

PEER = os.environ["BENCH_PEER"].partition(":")[0]
REDIS = os.environ["BENCH_REDIS"]
POSTGRES = os.environ.get("BENCH_POSTGRES", "")
BATCH = int(os.environ.get("BENCH_BATCH", "10"))
TICKS = os.environ["BENCH_TICKS"]
TICK = struct.Struct("<Id")
_ticks = os.open(TICKS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def tick(number: int) -> None:
    os.write(_ticks, TICK.pack(number, time.monotonic()))


def one_by_one(numbers: Sequence[int]) -> None:
    for number in numbers:
        enqueue(number)


def nothing() -> None:
    """No tables to make, no workers to run."""


enqueue: Callable[[int], object]
many: Callable[[Sequence[int]], object] = one_by_one
prepare: Callable[[], object] = nothing
work: Callable[[], object] = nothing

if PEER == "dramatiq":
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url=REDIS))
    enqueue = dramatiq.actor(tick).send
elif PEER == "huey":
    from huey import RedisHuey

    huey = RedisHuey("bench", url=REDIS)
    enqueue = huey.task()(tick)
elif PEER == "celery":
    from celery import Celery

    app = Celery("queues", broker=REDIS)
    # Its fastest ordinary configuration: acknowledged before it runs, no result kept.
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
    _task = app.task(tick)

    def enqueue(number: int) -> object:
        with app.producer_or_acquire() as producer:
            return _task.apply_async((number,), producer=producer)
elif PEER in ("rq_simple", "rq_fork"):
    from redis import Redis
    from rq import Queue

    _rq = Queue("bench", connection=Redis.from_url(REDIS))

    def enqueue(number: int) -> object:
        return _rq.enqueue("queues.tick", number)

    def many(numbers: Sequence[int]) -> object:
        return _rq.enqueue_many([Queue.prepare_data("queues.tick", (number,)) for number in numbers])
elif PEER == "procrastinate":
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=POSTGRES))

    @app.task(name="tick", queue="bench")
    async def _tick(number: int) -> None:
        tick(number)

    @lru_cache(maxsize=1)
    def _opened() -> Any:
        """Opened for synchronous use: that is how a web application without asyncio defers."""
        app.open()
        return app

    def enqueue(number: int) -> object:
        _opened()
        return _tick.defer(number=number)

    def many(numbers: Sequence[int]) -> object:
        _opened()
        return _tick.batch_defer(*({"number": number} for number in numbers))

    def prepare() -> None:
        _opened().schema_manager.apply_schema()
elif PEER == "pgqueuer":
    import asyncpg
    import uvloop
    from pgqueuer import AsyncpgDriver, PgQueuer, Queries

    _loop = asyncio.new_event_loop()

    @lru_cache(maxsize=1)
    def _queries() -> Queries:
        return Queries(AsyncpgDriver(_loop.run_until_complete(asyncpg.connect(POSTGRES))))

    def _do(made: Callable[[Any], Coroutine[Any, Any, object]]) -> object:
        return _loop.run_until_complete(made(_queries()))

    def enqueue(number: int) -> object:
        return _do(lambda queries: queries.enqueue("tick", str(number).encode()))

    def many(numbers: Sequence[int]) -> object:
        payloads = [str(number).encode() for number in numbers]
        return _do(lambda queries: queries.enqueue(["tick"] * len(numbers), payloads, [0] * len(numbers)))

    def prepare() -> None:
        _do(lambda queries: queries.install())

    async def pgqueuer() -> PgQueuer:
        made = PgQueuer(AsyncpgDriver(await asyncpg.connect(POSTGRES)))

        @made.entrypoint("tick")
        async def _run(job: Any) -> None:
            tick(int(job.payload))

        return made

    def work() -> None:
        """As its command does it, which cannot be used: in 1.6.0 it fails on its own default of --log-level."""

        async def run() -> None:
            await (await pgqueuer()).run(batch_size=BATCH)

        uvloop.run(run())
elif PEER == "dbos":
    from dbos import DBOS, DBOSClient

    @lru_cache(maxsize=1)
    def _client() -> DBOSClient:
        return DBOSClient(system_database_url=POSTGRES)

    @DBOS.workflow(name="tick")
    def _workflow(number: int) -> None:
        tick(number)

    def enqueue(number: int) -> object:
        return _client().enqueue({"queue_name": "bench", "workflow_name": "tick"}, number)

    def _launch() -> None:
        DBOS(
            config={"name": "bench", "system_database_url": POSTGRES, "log_level": "ERROR", "application_version": "1"}
        )
        DBOS.launch()
        DBOS.register_queue("bench", polling_interval_sec=0.1)

    def prepare() -> None:
        _launch()
        DBOS.destroy()

    def work() -> None:
        _launch()
        while True:
            time.sleep(60)
elif PEER in ("headway", "headway_fork", "headway_database"):
    from headway.queue import TaskQueue

    queue = TaskQueue(POSTGRES, redis=None if PEER == "headway_database" else REDIS, per_user=None)

    @queue.handler("tick", isolation="fork" if PEER == "headway_fork" else "none")
    def _handle(_task: object, number: int) -> None:
        tick(number)

    def enqueue(number: int) -> object:
        return queue.submit("tick", number)

    def many(numbers: Sequence[int]) -> object:
        return queue.submit_many({"kind": "tick", "payload": number} for number in numbers)

    def prepare() -> None:
        queue.stats()

    def work() -> None:
        """One worker with its batch. (`headway worker` has the batch of the settings.)"""
        from headway.core.lifecycle import Shutdown, on_signals
        from headway.queue.rq.source import RqSource
        from headway.queue.worker.heartbeat import Settings
        from headway.queue.worker.worker import Worker

        name, shutdown = f"bench.{os.getpid()}", Shutdown()
        source = RqSource(queue, REDIS, name=name) if queue.backend.redis_url else None
        with on_signals(shutdown):
            Worker(queue, name=name, source=source, settings=Settings(batch=BATCH), shutdown=shutdown).run()


# ---- what the benchmark asks ----------------------------------------------------------------------------------------


def enqueued(count: int) -> list[float]:
    taken = []
    for number in range(count):
        began = time.perf_counter()
        enqueue(number)
        taken.append(time.perf_counter() - began)
    return taken


def together(count: int, size: int = 1000) -> float:
    began = time.perf_counter()
    for start in range(0, count, size):
        many(range(start, min(count, start + size)))
    return time.perf_counter() - began


def picked_up(rounds: int) -> list[float]:
    taken = []
    with open(TICKS, "rb") as ticks:
        for number in range(rounds):
            ticks.seek(0, os.SEEK_END)
            began = time.monotonic()
            enqueue(number)
            while len(found := ticks.read(TICK.size)) < TICK.size:
                ticks.seek(-len(found), os.SEEK_CUR)
                if time.monotonic() > began + 30:
                    raise TimeoutError("a task was not picked up within 30 s")
                time.sleep(0.0005)
            taken.append(TICK.unpack(found)[1] - began)
            time.sleep(0.02)  # the worker goes back to waiting
    return taken


def main() -> None:
    verb, count = sys.argv[1], int((*sys.argv[2:], "0")[0])
    match verb:
        case "prepare":
            prepare()
        case "enqueue":
            enqueued(3)  # connects
            print(json.dumps(enqueued(count)))
        case "many":
            print(together(count))
        case "bulk":
            enqueued(3)
            print(json.dumps([together(count) for _ in range(5)]))
        case "pickup":
            picked_up(2)
            print(json.dumps(picked_up(count)))
        case "work":
            work()


if __name__ == "__main__":
    # Under its own name, so that tasks are known by the name the workers import.
    import queues

    queues.main()
