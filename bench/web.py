"""The web application under many clients: a real `headway serve`, over SQLite and a private Redis, on loopback.

    python bench/web.py [--quick] [--clients 1000]

    live    that many open live connections; a change every second: from the moment it is published to its arrival
    poll    that many clients that each ask /api/v1/projects/ID every 2 s, in open loop: latency from the moment they should ask

The clients run in this process and need a core of their own; on a busy machine the figures are theirs as much as the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from headway.finishline import FinishLine  # noqa: E402  # after the path above
from tests.services.redis import RedisServer, installations  # noqa: E402


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


async def poll(address: str, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    host, port = address.removeprefix("http://").split(":")
    request = f"GET /api/v1/projects/bench HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    taken: list[float] = []
    used, end = cpu(pid), time.perf_counter() + seconds

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        due = time.perf_counter() + random.random() * 2
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            assert b'"headway.progress/1"' in body, body
            taken.append((time.perf_counter() - due) * 1000)
            due += 2.0
        writer.close()

    await asyncio.gather(*(ask() for _ in range(clients)))
    return {
        "clients": clients, "requests": len(taken), "per_second": round(len(taken) / seconds),
        "server_cpu_per_request": round((cpu(pid) - used) / len(taken), 3),
        "p50": percentile(taken, 0.5), "p99": percentile(taken, 0.99), "unit": "ms", "goal": "p99 < 10",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clients", type=int, default=1000)
    options = parser.parse_args()
    seconds = 6.0 if options.quick else 20.0
    with tempfile.TemporaryDirectory() as name:
        server = RedisServer(Path(name) / "redis", installations()[0])
        server.start()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADWAY_")}
        command = [sys.executable, "-m", "headway", "serve", "--port", "0", "--redis", server.url(0)]
        process = subprocess.Popen(command, cwd=name, env=environment, text=True, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with FinishLine(server.url(1), checkpointer=False) as line:
                line.create("bench", 1000)
            result = {
                "poll": asyncio.run(poll(address, process.pid, options.clients, seconds)),
                "live": asyncio.run(live(address, process.pid, options.clients, seconds)),
            }
        finally:
            process.terminate()
            process.wait(30)
            server.discard()
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
