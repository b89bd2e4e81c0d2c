"""States against the bare thing: write-to-subscriber latency between two processes, reads, replay, idle cost.

    python bench/states.py [--quick]

The bare thing is one durable write that gives the next version, with its notification, and a listener in another
process that receives both: on Redis a script that counts, keeps and appends to a stream, heard by XREAD BLOCK; on
PostgreSQL one statement that upserts and notifies, heard by LISTEN. Nothing that headway adds is in it: no log for readers
that are behind, no recognition of a repeated write, no check, no cache, no subscribers.

Every ratio is measured in one run, the two sides taking turns, because the machine is noisy. JSON on stdout; a goal that
was missed is named on stderr and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg
from redis import Redis

from headway import states
from headway.states import Manager, State
from tests.services import postgres, redis
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

SPAWN = multiprocessing.get_context("spawn")
BODY = json.dumps([1, "a", 5, "on it", 1, {"rows": 12}])
BARE_REDIS = """
local version = redis.call('HINCRBY', KEYS[1], 'version', 1)
redis.call('HSET', KEYS[1], 'state', ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '1024', '*', 'n', ARGV[1], 'version', version, 'state', ARGV[2])
return version
"""
BARE_POSTGRES = """
WITH stored AS (
    INSERT INTO bare VALUES ('k', %s, 1) ON CONFLICT (id) DO UPDATE SET state = excluded.state, version = bare.version + 1
    RETURNING version
)
SELECT version, pg_notify('bare', concat(%s::text, ' ', version, ' ', %s::text)) FROM stored
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- echo: the other process answers each thing it hears with the moment it heard it -------------------------------
# Both clocks are CLOCK_MONOTONIC of one machine, so the difference is the latency from the call to the reader.


def hear_headway(url: str, pipe: Any) -> None:
    store, _ = states.open_store(url, "bench", 2)
    with store.subscribe(accepts=lambda state: state.task_id == 1) as subscription:
        pipe.send("ready")
        for event in subscription:
            if event.state is not None:
                pipe.send((event.state.status, time.monotonic()))


def hear_redis(port: int, pipe: Any) -> None:
    client, position = Redis(port=port, db=1, decode_responses=True), "$"
    pipe.send("ready")
    while True:
        for _, entries in client.xread({"bare": position}, block=60_000):
            for position, fields in entries:  # noqa: B007  (the last one is where to go on)
                json.loads(fields["state"])
                pipe.send((int(fields["n"]), time.monotonic()))


def hear_postgres(url: str, pipe: Any) -> None:
    connection = psycopg.connect(url, autocommit=True)
    connection.execute("LISTEN bare")
    pipe.send("ready")
    for notification in connection.notifies():
        number, _, state = notification.payload.split(" ", 2)
        json.loads(state)
        pipe.send((int(number), time.monotonic()))


@contextlib.contextmanager
def listening(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    time.sleep(0.3)  # a blocking read must have begun
    yield ours
    process.terminate()
    process.join()


def latency(write: Callable[[int], object], pipe: Any, number: int) -> float:
    began = time.monotonic()
    write(number)
    while True:
        heard, when = pipe.recv()
        if heard == number:
            return when - began


def side_by_side(bare: Callable[[int], object], bare_pipe: Any, ours: Callable[[int], object], our_pipe: Any, rounds: int,
                 pause: float = 0.002) -> dict[str, Any]:  # fmt: skip
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(1, rounds + 1):
        found[0].append(latency(bare, bare_pipe, number))
        time.sleep(pause)
        found[1].append(latency(ours, our_pipe, number))
        time.sleep(pause)
    warm = rounds // 10
    bare_ms, our_ms = ([value * 1_000 for value in side[warm:]] for side in found)
    return {
        "bare_p50_ms": quantile(bare_ms, 50),
        "headway_p50_ms": quantile(our_ms, 50),
        "bare_p99_ms": quantile(bare_ms, 99),
        "headway_p99_ms": quantile(our_ms, 99),
        "ratio_p50": round(quantile(our_ms, 50) / quantile(bare_ms, 50), 2),
    }


def quantile(values: list[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100)[percent - 1], 3)


# ---- the measurements -----------------------------------------------------------------------------------------------


def redis_latency(server: RedisServer, rounds: int) -> dict[str, Any]:
    client = Redis(port=server.port, db=1)
    store, _ = states.open_store(server.url(1), "bench", 2)
    sha = client.script_load(BARE_REDIS)
    with listening(hear_redis, server.port) as bare, listening(hear_headway, server.url(1)) as ours:
        found = side_by_side(
            lambda number: client.evalsha(sha, 2, "bare-key", "bare", number, BODY),
            bare,
            reporting(store),
            ours,
            rounds,
        )
    store.close()
    return found | {"goal": "ratio_p50 <= 1.5", "met": found["ratio_p50"] <= 1.5}


def postgres_latency(server: PostgresServer, rounds: int) -> dict[str, Any]:
    url = server.url(server.create_database())
    store, _ = states.open_store(url, "bench", 2)
    connection = psycopg.connect(url, autocommit=True)
    connection.execute("CREATE TABLE bare (id TEXT PRIMARY KEY, state TEXT, version BIGINT)")

    with listening(hear_postgres, url) as bare, listening(hear_headway, url) as ours:
        found = side_by_side(
            lambda number: connection.execute(BARE_POSTGRES, (BODY, number, BODY)).fetchone(), bare,
            reporting(store), ours, rounds,
        )  # fmt: skip
    store.close()
    connection.close()
    return found | {"goal": "ratio_p50 <= 2", "met": found["ratio_p50"] <= 2}


def sqlite_latency(directory: Path, rounds: int) -> dict[str, Any]:
    url = f"sqlite:///{directory}/bench.db"
    store, _ = states.open_store(url, "bench", 2)
    write, times = reporting(store), {}
    with listening(hear_headway, url) as ours:
        for name, pause in (("busy", 0.01), ("after_a_pause", 1.3)):
            count = rounds if pause < 1 else max(5, rounds // 25)
            found = []
            for number in range(1, count + 1):
                time.sleep(pause)
                found.append(latency(write, ours, number) * 1_000)
            times[name] = {"p50_ms": round(statistics.median(found), 2), "worst_ms": round(max(found), 2)}
            if count >= 100:
                times[name]["p99_ms"] = quantile(found, 99)
    store.close()
    busy = times["busy"]
    return times | {"goal": "p99 <= 50 ms", "met": busy.get("p99_ms", busy["worst_ms"]) <= 50}


def reporting(store: Any) -> Callable[[int], object]:
    return lambda number: store.set_state(State("bench", 1, "a", number, "on it", payload={"rows": 12}))


def sqlite_idle(directory: Path, seconds: float) -> dict[str, Any]:
    store, _ = states.open_store(f"sqlite:///{directory}/idle.db", "bench", 2)
    subscription = store.subscribe()  # a store that nobody reads does not even look
    time.sleep(1.5)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    time.sleep(seconds)
    after, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    subscription.close()
    store.close()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    percent = round(100 * used / wall, 2)
    return {"cpu_percent": percent, "goal": "< 1 %", "met": percent < 1}


def reads(seconds: float) -> dict[str, Any]:
    store, _ = states.open_store("sqlite:///:memory:", "bench", 2)
    manager = Manager("bench", 1, 2, store)
    manager.set_started("a")
    count, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(1_000):
            manager.get_state(task_id=1, tag="a")
        count += 1_000
    store.close()
    return {"get_state_per_second": round(count / seconds), "goal": ">= 100,000", "met": count / seconds >= 100_000}


def subscribers(server: RedisServer) -> dict[str, Any]:
    client = Redis(port=server.port, db=1)
    store, _ = states.open_store(server.url(1), "bench", 2)
    opened = [store.subscribe()]
    connections, threads = len(client.client_list()), threading.active_count()
    opened += [store.subscribe() for _ in range(99)]
    began = time.monotonic()
    reporting(store)(1)
    for subscription in opened:
        while subscription.get(10).state is None:
            continue
    found = {
        "connections_added_by_99_more": len(client.client_list()) - connections,
        "threads_added_by_99_more": threading.active_count() - threads,
        "one_change_to_100_ms": round((time.monotonic() - began) * 1_000, 2),
    }
    store.close()
    added = found["connections_added_by_99_more"] + found["threads_added_by_99_more"]
    return found | {"goal": "0: one listener serves all", "met": added == 0}


def replay(directory: Path, count: int) -> dict[str, Any]:
    url = f"sqlite:///{directory}/replay.db?synchronous=normal"
    store, _ = states.open_store(url, "bench", count)
    for task in range(count):
        store.set_state(State("bench", task, "a", 5, "on it", payload={"rows": task}))
    store.close()
    began = time.monotonic()
    store, _ = states.open_store(url, "bench", count)
    store.list_all_states()
    opened = time.monotonic()
    tracemalloc.start()
    with store.subscribe() as subscription:
        heard = 0
        while subscription.get(10).state is not None:
            heard += 1
    ended = time.monotonic()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    store.close()
    assert heard == count
    return {
        "states": count,
        "open_and_list_ms": round((opened - began) * 1_000),
        "replay_ms": round((ended - opened) * 1_000),
        "replay_peak_kb": peak // 1_024,
        "goal": "replay <= 1 s per 10,000 states",
        "met": ended - opened <= max(0.1, count / 10_000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    rounds = 150 if parser.parse_args().quick else 1_000
    found: dict[str, Any] = {"benchmark": "states", "rounds": rounds}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        directory.chmod(0o755)  # PostgreSQL runs as somebody else and must find its own below
        redis_server = RedisServer(directory / "redis", redis.installations()[0])
        postgres_server = PostgresServer(directory / "postgres", postgres.installations()[0], fsync="on")
        for server in (redis_server, postgres_server):
            server.start()
        try:
            for name, measure in {
                "redis_latency": lambda: redis_latency(redis_server, rounds),
                "postgresql_latency": lambda: postgres_latency(postgres_server, rounds),
                "sqlite_latency": lambda: sqlite_latency(directory, rounds),
                "sqlite_idle": lambda: sqlite_idle(directory, 3 if rounds < 500 else 10),
                "reads": lambda: reads(1),
                "subscribers": lambda: subscribers(redis_server),
                "replay": lambda: replay(directory, 1_000 if rounds < 500 else 10_000),
            }.items():
                say(f"measuring {name} ...")
                found[name] = measure()
                say(f"  {found[name]}")
        finally:
            for server in (redis_server, postgres_server):
                server.discard()
    print(json.dumps(found, indent=2))
    missed = [name for name, figures in found.items() if isinstance(figures, dict) and not figures.get("met", True)]
    if missed:
        say(f"missed: {', '.join(missed)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
