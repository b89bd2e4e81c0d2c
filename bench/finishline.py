"""The finish line beside the bare thing it replaces, in one run on one private Redis.

    python bench/finishline.py [--quick]

    single   item_done with identity, finish check and event   against a bare HINCRBY by the same client
    batch    items_done of 100 in one script                   against single calls
    journal  item_done with journal=True on SQLite, 1 and 16 threads, against one bare commit per count
    memory   bytes per item remembered, by kind of id
    poll     1,000 clients that each ask every 2 s through AsyncProgress, against a bare pool of connections;
             and the same clients in a closed loop
    rebuild  a project of 100,000 items brought back from its journal after FLUSHALL

Rounds are interleaved, so that noise hits all alike; ratios are medians of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from headway import _redis, _sql  # noqa: E402  # after the path above
from headway.finishline import AsyncProgress, FinishLine  # noqa: E402
from tests.services.redis import RedisServer, installations  # noqa: E402


def rate(call: Callable[[int], object], count: int) -> float:
    began = time.perf_counter()
    for number in range(count):
        call(number)
    return count / (time.perf_counter() - began)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def single_and_batch(server: RedisServer, count: int, rounds: int) -> dict[str, Any]:
    client = _redis.connect(server.url(1), role="state", name="bare", max_connections=1)
    line = FinishLine(server.url(1))
    line.create("bench", total=10**9)
    rates: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rates.setdefault(name, []).append(value)

    def numbered(first: int, number: int) -> None:
        line.item_done("bench", first + number)

    def named(turn: int, number: int) -> None:
        line.item_done("bench", f"page-{turn}-{number}")

    def batch(base: int, number: int) -> None:
        line.items_done("bench", range(base + number * 100, base + number * 100 + 100))

    for turn in range(rounds):
        first = turn * count
        note("hincrby", rate(lambda _: client.hincrby("bare", "done", 1), count))
        note("item_done number", rate(partial(numbered, first), count))
        note("item_done text", rate(partial(named, turn), count))
        note("item_done no id", rate(lambda _: line.item_done("bench"), count))
        base = 10_000_000 + turn * count * 100

        note("items_done 100 (items)", 100 * rate(partial(batch, base), max(10, count // 20)))
    line.close()
    client.close()

    def ratio(over: str, under: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[over], rates[under], strict=True)), 2)

    return {
        "per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
        "item_done_number_over_hincrby": ratio("item_done number", "hincrby"),
        "item_done_text_over_hincrby": ratio("item_done text", "hincrby"),
        "batch_of_100_over_single": ratio("items_done 100 (items)", "item_done number"),
    }


def memory(server: RedisServer, count: int) -> dict[str, Any]:
    kinds: dict[str, Callable[[int], int | str]] = {
        "number": lambda number: number,
        "short text": lambda number: f"page-{number}",
        "address of 60 characters": lambda number: f"https://example.org/{number:040d}",
    }
    found = {}
    state: Any = server.client(1)
    with FinishLine(server.url(1)) as line:
        for kind, name in kinds.items():
            state.flushdb()
            line.create("bench", total=10**9)
            before = int(state.info("memory")["used_memory"])
            for start in range(0, count, 1000):
                line.items_done("bench", [name(number) for number in range(start, start + 1000)])
            keys = [key for key in state.scan_iter("smap:proj:bench:*") if not key.endswith(":meta")]
            used = sum(int(state.memory_usage(key, samples=0)) for key in keys)
            grown = int(state.info("memory")["used_memory"]) - before
            found[kind] = {"bytes_per_item": round(used / count, 3), "server_growth_per_item": round(grown / count, 3)}
    state.flushdb()
    return {"items": count, **found}


def journal(server: RedisServer, directory: Path, count: int) -> dict[str, Any]:
    bare = _sql.connect(f"sqlite:///{directory}/bare.db")
    bare.run(lambda tx: tx.execute("CREATE TABLE counts (item TEXT PRIMARY KEY)"))

    def commit(number: int) -> None:
        bare.run(lambda tx: tx.execute("INSERT INTO counts VALUES (?)", (str(number),)))

    with FinishLine(server.url(1), f"sqlite:///{directory}/journal.db", journal=True, checkpointer=False) as line:
        line.create("bench", total=10**9)
        commits = rate(commit, count)
        alone = rate(lambda number: line.item_done("bench", number), count)
        threads = [
            threading.Thread(
                target=rate,
                args=(lambda number, lane=lane: line.item_done("bench", 10**6 * (lane + 1) + number), count),
            )
            for lane in range(16)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together = 16 * count / (time.perf_counter() - began)
        batched = 100 * rate(
            lambda number: line.items_done("bench", range(3 * 10**7 + number * 100, 3 * 10**7 + number * 100 + 100)),
            max(10, count // 20),
        )
    bare.close()
    return {
        "bare_commit_per_second": round(commits),
        "one_thread_per_second": round(alone),
        "sixteen_threads_per_second": round(together),
        "batches_of_100_items_per_second": round(batched),
        "sixteen_threads_over_bare_commit": round(together / commits, 2),
    }


async def poll(ask: Callable[[str], Awaitable[object]], clients: int, seconds: float, period: float) -> dict[str, Any]:
    """Latencies of clients that each ask every ``period`` seconds, from the moment they ask."""
    waits: list[float] = []
    await ask("p0")
    start = time.perf_counter() + 0.1

    async def client(number: int) -> None:
        due = start + random.random() * period
        while due < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            await ask(f"p{number}")
            waits.append(time.perf_counter() - began)
            due += period

    await asyncio.gather(*(client(number) for number in range(clients)))
    return {
        "queries": len(waits), "p50_ms": round(1e3 * percentile(waits, 0.5), 2),
        "p99_ms": round(1e3 * percentile(waits, 0.99), 2), "max_ms": round(1e3 * max(waits), 2),
    }  # fmt: skip


async def poll_both(url: str, clients: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Through AsyncProgress, and bare: each client's own HGETALL through a pool of 20 connections; in turns."""
    ours: list[dict[str, Any]] = []
    bare: list[dict[str, Any]] = []
    pool = BlockingConnectionPool.from_url(url, max_connections=20, timeout=60, decode_responses=True)
    client = Redis(connection_pool=pool)
    async with AsyncProgress(url) as reader:
        for _ in range(rounds):
            ours.append(await poll(reader.progress, clients, seconds, 2.0))
            bare.append(await poll(lambda name: client.hgetall(f"smap:proj:{name}"), clients, seconds, 2.0))
    await client.aclose()
    await pool.disconnect()

    def median(rounds: list[dict[str, Any]], name: str) -> float:
        return float(statistics.median(found[name] for found in rounds))

    return {
        "clients": clients, "every_seconds": 2.0, "p50_ms": median(ours, "p50_ms"), "p99_ms": median(ours, "p99_ms"),
        "best_p99_ms": min(found["p99_ms"] for found in ours), "bare_p99_ms": median(bare, "p99_ms"),
        "p99_over_bare": round(median(ours, "p99_ms") / median(bare, "p99_ms"), 2), "rounds": ours, "bare_rounds": bare,
    }  # fmt: skip


async def closed_loop(url: str, clients: int, seconds: float) -> dict[str, Any]:
    waits: list[float] = []
    async with AsyncProgress(url) as reader:
        await reader.progress("p0")
        until = time.perf_counter() + seconds

        async def client(number: int) -> None:
            while (began := time.perf_counter()) < until:
                await reader.progress(f"p{number}")
                waits.append(time.perf_counter() - began)

        await asyncio.gather(*(client(number) for number in range(clients)))
    return {
        "clients": clients, "queries_per_second": round(len(waits) / seconds),
        "p50_ms": round(1e3 * percentile(waits, 0.5), 2), "p99_ms": round(1e3 * percentile(waits, 0.99), 2),
    }  # fmt: skip


def rebuild(server: RedisServer, directory: Path, count: int) -> dict[str, Any]:
    with FinishLine(server.url(1), f"sqlite:///{directory}/rebuild.db", journal=True, checkpointer=False) as line:
        line.create("bench", total=count * 2)
        for start in range(0, count, 5000):
            line.items_done("bench", range(start, min(start + 5000, count)))
        server.client().flushall()
        began = time.perf_counter()
        found = line.progress("bench")
        took = time.perf_counter() - began
        assert found.done == count
    return {"items": count, "seconds": round(took, 3)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a tenth of the work, for a first look")
    options.add_argument("--only", help="one part: single_and_batch, memory, journal, rebuild or poll")
    chosen = options.parse_args()
    quick = chosen.quick
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        directory = Path(name)
        server = RedisServer(directory / "redis", installations()[0])
        server.start()
        try:
            result: dict[str, Any] = {
                "bench": "finishline",
                "machine": f"{platform.machine()}, Python {platform.python_version()}",
                "redis": server.client().info("server")["redis_version"],
                "quick": quick,
            }
            parts: dict[str, Callable[[], dict[str, Any]]] = {
                "single_and_batch": lambda: single_and_batch(server, 200, 20 if quick else 100),
                "memory": lambda: memory(server, 100_000 if quick else 1_000_000),
                "journal": lambda: journal(server, directory, 100 if quick else 1000),
                "rebuild": lambda: rebuild(server, directory, 20_000 if quick else 100_000),
            }
            for part, measure in parts.items():
                if chosen.only not in (None, part):
                    continue
                result[part] = measure()
                print(part, json.dumps(result[part]), file=sys.stderr)
            if chosen.only in (None, "poll"):
                server.client().flushall()
                with FinishLine(server.url(1)) as line:
                    for number in range(1000):
                        line.create(f"p{number}", total=1000)
                result["poll"] = asyncio.run(poll_both(server.url(1), 1000, 4, 1 if quick else 5))
                result["closed_loop"] = asyncio.run(closed_loop(server.url(1), 1000, 1 if quick else 5))
                print("poll", json.dumps(result["poll"]), json.dumps(result["closed_loop"]), file=sys.stderr)
        finally:
            server.discard()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
