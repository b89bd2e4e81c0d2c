"""What administrative reads cost running tasks (requirement S2-51).

    python bench/administration.py [--quick] [--rounds N]

One worker process drains no-op tasks from PostgreSQL (with fsync), first alone, then beside clients that read the queues,
the newest tasks and the success rates every 10 ms, each through a server's `Site` of its own. The two take turns within
a round; ratios are medians. ``--web-backlog 1000000000`` measures readers that do not yield.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from typing import Any

from measure import Report, median, say, scratch

from headway.config import Config
from headway.queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.views.reading import Reader
from headway.web.site import Site
from tests.services import postgres as postgres_service
from tests.services.postgres import PostgresServer

#: No single measurement takes longer than this.
LIMIT = 120.0
BACKLOG = 20_000
#: Seconds between two rounds of questions of one reader.
PAUSE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round with few tasks, rough figures")
    parser.add_argument("--web-backlog", type=int, default=1000, help="the setting web_backlog of the readers")
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    options = parser.parse_args()
    tasks, rounds = (1_000 if options.quick else 4_000), options.rounds or (1 if options.quick else 3)
    report = Report("administration", quick=options.quick)
    with scratch() as place:
        place.chmod(0o755)  # PostgreSQL runs as another user
        server = PostgresServer(
            place / "postgres", postgres_service.installations()[0], fsync="on", full_page_writes="on"
        )
        server.start()
        try:
            for readers in (1, 4):
                measure(report, server, tasks, rounds, readers, options.web_backlog)
        finally:
            server.discard()
    report.print()


def measure(report: Report, server: PostgresServer, tasks: int, rounds: int, readers: int, backlog: int) -> None:
    alone, beside, reads = [], [], []
    for number in range(rounds):
        say(f"{readers} reader(s), round {number + 1} of {rounds}")
        alone.append(drain(server, tasks, 0, backlog)[0])
        rate, answered = drain(server, tasks, readers, backlog)
        beside.append(rate)
        reads.append(answered)
    report.add(f"tasks/s alone (beside {readers})", median(alone), "tasks/s")
    report.add(f"tasks/s beside {readers} reader(s)", median(beside), "tasks/s")
    report.add(f"reads/s of {readers} reader(s) meanwhile", median(reads), "reads/s")
    ratios = [with_readers / without for with_readers, without in zip(beside, alone, strict=True)]
    report.add(f"share of the speed that is left beside {readers} reader(s)", median(ratios), "x")


def drain(server: PostgresServer, tasks: int, readers: int, backlog: int) -> tuple[float, float]:
    """Tasks per second of one worker, and reads per second of the clients."""
    url = server.url(server.create_database())
    with queue_at(url) as queue:
        for start in range(0, tasks + BACKLOG, 1000):
            kind = "noop" if start < tasks else "later"
            queue.submit_many({"kind": kind, "payload": n} for n in range(1000))
    context = multiprocessing.get_context("spawn")
    stop, ready, counter = context.Event(), context.Semaphore(0), context.Value("q", 0)
    clients = [
        context.Process(target=read, args=(url, backlog, ready, stop, counter), daemon=True) for _ in range(readers)
    ]
    for client in clients:
        client.start()
    for _ in clients:
        if not ready.acquire(timeout=LIMIT):
            raise SystemExit("a reader did not start")
    with queue_at(url, later=False) as queue:
        began, before = time.perf_counter(), counter.value
        Worker(queue).run(burst=True)
        seconds, answered = time.perf_counter() - began, counter.value - before
        row = queue.database.one("SELECT count(*) FROM tasks WHERE status = 'COMPLETED'")
        assert row == (tasks,), row
    stop.set()
    for client in clients:
        client.join(LIMIT)
    return tasks / seconds, answered / seconds


def read(url: str, backlog: int, ready: Any, stop: Any, counter: Any) -> None:
    """Ask what the pages of the queue ask, 100 times a second at most, through the server's `Site`."""
    config = Config(cli={"database": url, "web_backlog": backlog})
    site = Site(url, None, config, Reader(config))

    async def ask() -> None:
        reader = site.reader
        ready.release()
        deadline = time.monotonic() + LIMIT
        while not stop.is_set() and time.monotonic() < deadline:
            await site.view(reader.queues)
            await site.view(reader.tasks, limit=50)
            await site.view(reader.performance, range="1h")
            with counter.get_lock():
                counter.value += 3
            await asyncio.sleep(PAUSE)

    try:
        asyncio.run(ask())
    finally:
        site.close()


def nothing(task: object, payload: object) -> None:
    """Do no work."""


def queue_at(url: str, *, later: bool = True) -> TaskQueue:
    """``later``: with the kind of the backlog, which the worker does not serve."""
    queue = TaskQueue(url, per_user=None)
    queue.handler("noop", isolation="none")(nothing)
    if later:
        queue.handler("later", isolation="none")(nothing)
    return queue


if __name__ == "__main__":
    main()
