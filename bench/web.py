"""The web application under many clients: a real `headway serve`, over SQLite and a private Redis, on loopback.

    python bench/web.py [--quick] [--clients 1000] [--only live,poll,lists,page]

    live    that many open live connections; a change every second: from the moment it is published to its arrival
    poll    that many clients that each ask /api/v1/projects/ID every 2 s, in open loop: latency from the moment they should
            ask; and as many that ask rq-dashboard, as it ships, for what its page asks for (`.venv/peers`, or --peer PROGRAM)
    lists   pages of a job of 1,000,000 items (100,000 with --quick), by SQLite and PostgreSQL: first, middle and last,
            filtered and not
    page    a run with `--serve`, with its page open and without, in turns: how much of its rate the page takes

The clients run in this process and need a core of their own; on a busy machine the figures are theirs as much as the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.client import connect
from websockets.sync.client import connect as sync_connect

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from headway.core.failure import describe  # noqa: E402  # after the path above
from headway.finishline import FinishLine  # noqa: E402
from headway.ledger import Done, Failed, Ledger, NewItem  # noqa: E402
from tests.services.postgres import PostgresServer  # noqa: E402
from tests.services.postgres import installations as postgres_installations  # noqa: E402
from tests.services.redis import RedisServer  # noqa: E402
from tests.services.redis import installations as redis_installations  # noqa: E402


def percentile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 2)


def memory(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return round(next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")) / 1024, 1)


def cpu(pid: int) -> float:
    """Milliseconds of processor the server has used: what a busy machine does not change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


async def live(address: str, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    url = address.replace("http", "ws") + "/api/v1/live"
    late: list[float] = []
    gate = asyncio.Semaphore(50)
    opened = 0
    measuring, everybody = asyncio.Event(), asyncio.Event()

    async def listen(stop: asyncio.Event) -> None:
        nonlocal opened
        async with gate:
            socket = await connect(url, compression=None, open_timeout=60)
        opened += 1
        if opened == clients:
            everybody.set()
        try:
            while not stop.is_set():
                message = json.loads(await socket.recv())
                if measuring.is_set():
                    late.append((time.time() - datetime.fromisoformat(message["at"]).timestamp()) * 1000)
        finally:
            await socket.close()

    stop = asyncio.Event()
    before = memory(pid)
    tasks = [asyncio.create_task(listen(stop)) for _ in range(clients)]
    await everybody.wait()
    await asyncio.sleep(2)
    measuring.set()
    used = cpu(pid)
    await asyncio.sleep(seconds)
    used = cpu(pid) - used
    measuring.clear()
    after = memory(pid)
    stop.set()
    await asyncio.gather(*tasks)
    return {
        "clients": clients, "messages": len(late), "p50": percentile(late, 0.5), "p99": percentile(late, 0.99),
        "worst": round(max(late), 2), "unit": "ms", "server_cpu_per_message": round(used / len(late), 3),
        "rss_mb_before": before, "rss_mb": after, "goal": "p99 <= 100",
    }  # fmt: skip


async def poll(
    address: str,
    pid: int,
    clients: int,
    seconds: float,
    path: str = "/api/v1/projects/bench",
    mark: bytes = b'"headway.progress/1"',
) -> dict[str, Any]:
    host, port = address.removeprefix("http://").split(":")
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    taken: list[float] = []
    failed = 0
    used, end = cpu(pid), time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal failed
        connection = None
        due = time.perf_counter() + random.random() * 2
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            try:
                connection = connection or await asyncio.open_connection(host, int(port))
                reader, writer = connection
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                assert mark in body, body
                taken.append((time.perf_counter() - due) * 1000)
                if b"connection: close" in head or head.startswith(b"http/1.0"):  # a peer that keeps none open
                    writer.close()
                    connection = None
            except (OSError, asyncio.IncompleteReadError):
                failed += 1
                connection = None
            due += 2.0
        if connection is not None:
            connection[1].close()

    await asyncio.gather(*(ask() for _ in range(clients)))
    return {
        "clients": clients, "requests": len(taken), "per_second": round(len(taken) / seconds),
        "server_cpu_per_request": round((cpu(pid) - used) / max(1, len(taken)), 3),
        "p50": percentile(taken, 0.5), "p99": percentile(taken, 0.99), "failed": failed, "unit": "ms", "goal": "p99 < 10",
    }  # fmt: skip


def poll_peer(program: Path, redis: str, clients: int, seconds: float) -> dict[str, Any] | str:
    """rq-dashboard in its documented configuration: an open page of it asks for its queues every few seconds."""
    if not program.exists():
        return f"there is no {program}; bench/run.py installs the peers"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(program), "--bind", "127.0.0.1", "--port", str(port), "--redis-url", redis]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        return asyncio.run(
            poll(f"http://127.0.0.1:{port}", process.pid, clients, seconds, "/0/data/queues.json", b'"queues"')
        )
    finally:
        process.terminate()
        process.wait(30)


# ---- lists ----------------------------------------------------------------------------------------------------------


def lists(url: str, place: Path, items: int, rounds: int) -> dict[str, Any]:
    """What a page of a list takes over HTTP, one client. Nine of ten items are done, one of a hundred is dead."""
    with Ledger.open(url) as ledger:
        job = ledger.create("big")
        for start in range(0, items, 20_000):
            job.register([NewItem(idx, "{}") for idx in range(start, min(items, start + 20_000))])
        hold = ledger.hold(job, {})
        for start in range(0, items, 20_000):
            ended: list[Done | Failed] = [
                Failed(idx, describe(ValueError("no such page")), retryable=False) if idx % 100 == 0 else Done(idx)
                for idx in range(start, min(items, start + 20_000))
                if idx % 10 or idx % 100 == 0
            ]
            job.record(ended, hold=hold)
        ledger.release(hold, "interrupted")
    paths = {
        f"{kind}, {where}": f"/api/v1/jobs/big/items?limit=50&after={after}{query}"
        for kind, query in {"all": "", "done": "&status=done", "dead": "&status=dead", "pending": "&status=pending",
                            "cause": "&cause=1"}.items()
        for where, after in {"first": -1, "middle": items // 2, "last": items - 1000}.items()
    }  # fmt: skip
    paths |= {
        "dead letters": "/api/v1/jobs/big/dead/letters",
        "page of items": "/jobs/big/items",
        "page of the job": "/jobs/big",
    }
    found = {}
    with served(place, "--database", url) as (address, _):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
        for name, path in paths.items():
            taken = []
            for _ in range(rounds):
                began = time.perf_counter()
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read()
                taken.append((time.perf_counter() - began) * 1000)
                assert response.status == 200, body
            found[name] = {"p50": percentile(taken, 0.5), "p95": percentile(taken, 0.95)}
    worst = max(found, key=lambda name: found[name]["p95"])
    return {
        "items": items,
        "worst": worst,
        "p95": found[worst]["p95"],
        "unit": "ms",
        "goal": "p95 <= 150",
        "each": found,
    }


# ---- the page of a run ----------------------------------------------------------------------------------------------


def page(place: Path, items: int, rounds: int) -> dict[str, Any]:
    """Wall time and processor time (of the run, its workers and the page's server) of the same run, with its page open and
    without, in turns."""
    (place / "items.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(items)))
    (place / "work.py").write_text("def work(item):\n    return sum(range(5000))\n")
    wall: dict[str, list[float]] = {"alone": [], "open": []}
    used: dict[str, list[float]] = {"alone": [], "open": []}
    for number in range(rounds * 2):
        kind = ("alone", "open", "open", "alone")[number % 4]
        words = [
            "run",
            "work:work",
            "--items",
            "items.jsonl",
            "--job",
            f"job-{number}",
            "--serve",
            "--progress",
            "plain",
        ]
        before, began = os.times(), time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", *words, "--database", f"sqlite:///{place}/page-{number}.db"],
            cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert process.stderr is not None
        shown, seconds = "", 0.0
        for line in process.stderr:
            if "Page: " in line:
                shown = line.partition("Page: ")[2].strip()
                if kind == "open":
                    threading.Thread(target=look_at, args=(shown,), daemon=True).start()
            if "finished in" in line:
                seconds = time.perf_counter() - began
        process.wait()
        assert shown, "the run said no address"
        assert process.returncode == 0
        after = os.times()
        wall[kind].append(seconds)
        used[kind].append(after.children_user + after.children_system - before.children_user - before.children_system)
    medians = {kind: statistics.median(values) for kind, values in wall.items()}
    processor = {kind: statistics.median(values) for kind, values in used.items()}
    return {
        "items": items, "rounds": rounds, "wall_s": medians, "cpu_s": processor,
        "rate_lost_percent": round(100 * (1 - medians["alone"] / medians["open"]), 2),
        "cpu_more_percent": round(100 * (processor["open"] / processor["alone"] - 1), 2),
        "goal": "rate_lost_percent < 2",
    }  # fmt: skip


def look_at(address: str) -> None:
    """What a browser does with the page of a job: it is sent the changes, and asks for the page again every few seconds."""
    base = "/".join(address.split("/")[:3])
    page = base + parse_qs(urlsplit(address).query)["next"][0]
    with urllib.request.urlopen(address, timeout=30) as entered:  # the link that opens a session
        cookies = [value.partition(";")[0] for value in entered.headers.get_all("set-cookie")]
    session = {"Cookie": "; ".join(cookies)}
    live_address = base.replace("http", "ws") + "/api/v1/live"
    with contextlib.suppress(Exception), sync_connect(live_address, additional_headers=session) as live:
        asked = 0.0
        while True:
            live.recv(10)
            if time.monotonic() - asked > 3:
                asked = time.monotonic()
                urllib.request.urlopen(urllib.request.Request(page, headers=session), timeout=10).read()


# ---------------------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("HEADWAY_")}


@contextlib.contextmanager
def served(place: Path, *arguments: str) -> Iterator[tuple[str, int]]:
    """The address and the process of a `headway serve`."""
    command = [sys.executable, "-m", "headway", "serve", "--no-auth", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=place, env=environment(), text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--only", default="poll,live,lists,page")
    parser.add_argument("--peer", type=Path, default=ROOT / ".venv" / "peers" / "bin" / "rq-dashboard")
    options = parser.parse_args()
    wanted, seconds = options.only.split(","), 6.0 if options.quick else 20.0
    items, rounds = (100_000, 10) if options.quick else (1_000_000, 40)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)  # PostgreSQL does not run as root
        if {"poll", "live"} & set(wanted):
            server = RedisServer(place / "redis", redis_installations()[0])
            server.start()
            try:
                with served(place, "--redis", server.url(0)) as (address, pid):
                    with FinishLine(server.url(1), checkpointer=False) as line:
                        line.create("bench", 1000)
                    if "poll" in wanted:
                        result["poll"] = asyncio.run(poll(address, pid, options.clients, seconds))
                        result["poll_rq_dashboard"] = poll_peer(options.peer, server.url(0), options.clients, seconds)
                    if "live" in wanted:
                        result["live"] = asyncio.run(live(address, pid, options.clients, seconds))
            finally:
                server.discard()
        if "lists" in wanted:
            result["lists_sqlite"] = lists(f"sqlite:///{place}/lists.db", place, items, rounds)
            postgres = PostgresServer(place / "postgres", postgres_installations()[0])
            postgres.start()
            try:
                result["lists_postgresql"] = lists(postgres.url(postgres.create_database()), place, items, rounds)
            finally:
                postgres.discard()
        if "page" in wanted:
            result["page"] = page(place, 20_000 if options.quick else 60_000, 3 if options.quick else 8)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
