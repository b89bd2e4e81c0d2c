"""How fast a fleet works on one job, and a local run on PostgreSQL, beside a bare loop and task queues in one run.

    python bench/fleet.py [--quick] [--items N] [--rounds N] [--only WORD ...]

No-op items, two slots on warm workers (`headway worker`), PostgreSQL with fsync and Redis; every item durably recorded, one
completion. The time of a fleet and of a local run goes from the first record to the last, so that neither the start of the
command nor the registering counts. That of the bare loop includes the start of its two processes, which favours us, the more
the fewer items there are: only long runs compare fairly with it.
Contestants take turns within every round; ratios are medians over the
rounds. The bare loop: two processes claim blocks of 500 by moving a frontier, and record each block by one INSERT … SELECT
from arrays, with the counter in the job's row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psycopg
from measure import ROOT, Report, median, say, scratch
from peers import ON_REDIS, Peer, install
from redis import Redis

from tests.services import postgres as postgres_service
from tests.services import redis as redis_service
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

HEADWAY = Path(sys.executable).parent / "headway"
SLOTS = 2
BLOCK = 500
#: No single measurement takes longer than this.
LIMIT = 300.0
#: Tasks of one round of the peers, by what each does in a few seconds here.
TASKS = {"celery": 1_000, "dramatiq": 4_000, "huey": 4_000, "pgqueuer:100": 8_000}


class Servers:
    def __init__(self, place: Path, **settings: str) -> None:
        place.chmod(0o755)  # PostgreSQL runs as somebody else and must find its own below
        self.place = place
        self.redis = RedisServer(place / "redis", redis_service.installations()[0])
        self.postgres = PostgresServer(
            place / "postgres", postgres_service.installations()[0], fsync="on", full_page_writes="on",
            shared_buffers="256MB", **settings,
        )  # fmt: skip
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self.redis.start()
        self.postgres.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.postgres.discard()
        self.redis.discard()

    def database(self, *, with_tables: bool = False) -> str:
        return self.postgres.url(self.postgres.create_database(with_tables=with_tables))

    def fresh_redis(self) -> str:
        url = self.redis.url(next(self._numbers) % 16)
        Redis.from_url(url).flushdb()
        return url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rough figures in a minute or two")
    parser.add_argument("--items", type=int, help="default 100,000; 20,000 with --quick")
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--only", nargs="*", help="rate, slow, growth")
    options = parser.parse_args()
    count = options.items or (20_000 if options.quick else 100_000)
    rounds = options.rounds or (1 if options.quick else 3)
    report = Report("fleet", quick=options.quick)
    parts: dict[str, Callable[[Servers], None]] = {
        "rate": lambda servers: measure_rate(report, servers, count, rounds),
        "slow": lambda servers: measure_slow(report, servers, 16, [1_000] if options.quick else [4_000, 16_000]),
        "growth": lambda servers: measure_growth(report, servers, [10_000, count] if options.quick else [10_000, 1_000_000]),
    }  # fmt: skip
    with scratch() as place, Servers(place) as servers:
        for name, measure in parts.items():
            if not options.only or name in options.only:
                measure(servers)
    report.print()


# ---- rate -------------------------------------------------------------------------------------------------------


def measure_rate(report: Report, servers: Servers, count: int, rounds: int) -> None:
    say(f"{count:,} no-op items, {SLOTS} slots, {rounds} rounds")
    trouble = install()
    peers = [] if trouble else [*ON_REDIS, "pgqueuer:100"]
    if trouble:
        report.leave_out(f"task queues: {trouble}")
    report.leave_out("SAQ and streaq: measured apart, they drained at less than the rate of Huey and Dramatiq")
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        rates["bare loop"].append(bare_rate(servers, count))
        rates["local run"].append(local_rate(servers, count))
        with fleet(servers, SLOTS) as env:
            rates["fleet"].append(fleet_rate(servers, env, count, SLOTS))
        for name in peers:
            peer = Peer(name, servers.fresh_redis(), servers.place, servers.database())
            rates[name].append(peer.measure(TASKS[name], LIMIT)[1])
        say("  " + ", ".join(f"{name} {values[-1]:,.0f}/s" for name, values in rates.items()))
    for name, values in rates.items():
        report.add(f"{name}: done", median(values), "items/s", rounds=rounds, least_seen=min(values))
    for ours in ("fleet", "local run"):
        report.add(f"{ours} / bare loop", ratio(rates, ours, "bare loop"), "x", least=0.3)
        if peers:
            fastest = max(ON_REDIS, key=lambda name: median(rates[name]))
            report.add(f"{ours} / fastest task queue", ratio(rates, ours, fastest), "x", least=10, fastest=fastest)
            report.add(f"{ours} / PgQueuer, batch 100", ratio(rates, ours, "pgqueuer:100"), "x", least=3)


def ratio(rates: dict[str, list[float]], ours: str, other: str) -> float:
    return median([mine / theirs for mine, theirs in zip(rates[ours], rates[other], strict=True)])


def measure_slow(report: Report, servers: Servers, slots: int, counts: list[int]) -> None:
    """Items that wait 20 ms: how near many slots come to what they could do at most. Of a job of some seconds the first and
    the last second are much: until every slot has begun and found out how large its blocks are to be, and when not all of
    them have something left."""
    with fleet(servers, slots) as env:
        for count in counts:
            ideal = slots / 0.02
            say(f"{count:,} items of 20 ms, {slots} slots, {count / ideal:g} s at best")
            rate = fleet_rate(servers, env, count, slots, function="measure.noop:wait")
            goal = 0.9 if count == counts[-1] else None
            report.add(f"{slots} slots, {count:,} items of 20 ms: of the ideal rate", rate / ideal, "x", least=goal)


def measure_growth(report: Report, servers: Servers, counts: list[int]) -> None:
    say(f"{counts[0]:,} and {counts[-1]:,} items")
    costs = []
    with fleet(servers, SLOTS) as env:
        for count in counts:
            costs.append(1 / fleet_rate(servers, env, count, SLOTS))
    report.add(f"cost of an item among {counts[-1]:,} / among {counts[0]:,}", costs[-1] / costs[0], "x", most=1.2)


# ---- contestants ------------------------------------------------------------------------------------------------


@contextmanager
def fleet(servers: Servers, workers: int) -> Iterator[dict[str, str]]:
    """A machine with that many workers, which have said that they are there; the environment to start jobs in."""
    url = servers.database(with_tables=True)
    redis = servers.fresh_redis()
    env = {**os.environ, "HEADWAY_DATABASE": url, "HEADWAY_REDIS": redis, "HEADWAY_QUEUE_REDIS": redis}
    with open(servers.place / "worker.log", "ab") as log:
        worker = subprocess.Popen(
            [str(HEADWAY), "worker", "--workers", str(workers)], cwd=ROOT / "bench", env=env, stdout=log, stderr=log
        )
    try:
        wait_for(url, f"SELECT count(*) >= {workers} FROM headway.task_workers WHERE ended_at IS NULL")
        yield env
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)


def wait_for(url: str, question: str) -> None:
    end = time.monotonic() + LIMIT
    with psycopg.connect(url, autocommit=True) as connection:
        while time.monotonic() < end:
            row = connection.execute(question).fetchone()
            if row and row[0]:
                return
            time.sleep(0.05)
    raise SystemExit(f"not within {LIMIT:g} s: {question}")


def fleet_rate(
    servers: Servers, env: dict[str, str], count: int, slots: int, function: str = "measure.noop:noop"
) -> float:
    return run(servers, env, count, function, "--fleet", "--slots", str(slots))


def local_rate(servers: Servers, count: int) -> float:
    env = {**os.environ, "HEADWAY_DATABASE": servers.database(with_tables=True)}
    return run(servers, env, count, "measure.noop:noop", "--workers", "2")


def run(servers: Servers, env: dict[str, str], count: int, function: str, *words: str) -> float:
    job = f"bench-{time.monotonic_ns()}"
    command = [
        str(HEADWAY), "run", function, "--items", str(write_items(servers.place, count)), "--job", job,
        "--progress", "none", "--json", *words,
    ]  # fmt: skip
    out = subprocess.run(command, cwd=ROOT / "bench", env=env, check=True, capture_output=True, timeout=LIMIT)
    assert json.loads(out.stdout)["done"] == count
    with psycopg.connect(env["HEADWAY_DATABASE"], autocommit=True) as connection:
        rows, first, last = connection.execute(
            "SELECT count(*), min(p.updated_at), max(p.updated_at) FROM headway.progress p JOIN headway.jobs j "
            "ON j.no = p.job WHERE j.id = %s AND p.status = 'done'",
            (job,),
        ).fetchone() or (0, 0.0, 0.0)
        (told,) = connection.execute(
            "SELECT count(*) FROM headway.outbox WHERE type = 'job.completed' AND job = %s", (job,)
        ).fetchone() or (0,)
    assert (rows, told) == (count, 1), "headway lost something"
    return float(count / (last - first))


def bare_rate(servers: Servers, count: int) -> float:
    url = servers.database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE job (frontier bigint, done bigint)")
        connection.execute("INSERT INTO job VALUES (0, 0)")
        connection.execute("CREATE TABLE item (idx bigint PRIMARY KEY, payload text)")
        connection.execute("INSERT INTO item SELECT n, n::text FROM generate_series(0, %s) n", (count - 1,))
        connection.execute(
            "CREATE TABLE progress (idx bigint PRIMARY KEY, status text, seconds float8, worker text, at float8)"
        )
    processes = [multiprocessing.Process(target=bare_work, args=(url, count)) for _ in range(SLOTS)]
    began = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    seconds = time.monotonic() - began
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT count(*), (SELECT done FROM job) FROM progress").fetchone()
    assert found == (count, count), "the bare loop lost something"
    return count / seconds


def bare_work(url: str, count: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            row = connection.execute(
                "UPDATE job SET frontier = frontier + %s WHERE frontier < %s RETURNING frontier", (BLOCK, count)
            ).fetchone()
            if row is None:
                return
            rows = connection.execute(
                "SELECT idx, payload FROM item WHERE idx >= %s AND idx < %s", (row[0] - BLOCK, row[0])
            ).fetchall()
            indices = [idx for idx, payload in rows if json.loads(payload) is not None]
            connection.execute("BEGIN")
            connection.execute(
                "INSERT INTO progress SELECT unnest(%s::bigint[]), 'done', 0.0, 'w', extract(epoch FROM now())",
                (indices,),
            )
            connection.execute("UPDATE job SET done = done + %s", (len(indices),))
            connection.execute("COMMIT")


def write_items(place: Path, count: int) -> Path:
    path = place / f"items-{count}.jsonl"
    if not path.exists():
        path.write_text("".join(f"{number}\n" for number in range(count)))
    return path


if __name__ == "__main__":
    main()
