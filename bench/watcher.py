"""The watcher measured beside polling: how soon, at what cost, and ten thousand failures at once.

    python bench/watcher.py [--quick]

Everything runs on private Redis servers; the watcher is the real command in a process of its own. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from rq.registry import CanceledJobRegistry, FailedJobRegistry, StartedJobRegistry  # noqa: E402 - after the path

from tests.services.redis import RedisServer, installations  # noqa: E402
from tests.services.waiting import eventually  # noqa: E402
from tests.watcher.scene import CHANNEL, Scene  # noqa: E402


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1000, 2),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000, 2),
        "max_ms": round(ordered[-1] * 1000, 2),
        "samples": len(ordered),
    }


@contextmanager
def scene_of(name: str, directory: Path) -> Iterator[Scene]:
    server = RedisServer(directory / name, installations()[0], notify_keyspace_events="Kz")
    server.start()
    scene = Scene(server, directory)
    try:
        yield scene
    finally:
        scene.close()
        server.discard()


@contextmanager
def watcher(scene: Scene, directory: Path, **changes: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "REDIS_URL": scene.url,
        "RQ__QUEUE": scene.name,
        "DIGITS_EVENTS_CHANNEL": CHANNEL,
        "RQ_WATCHER_STUCK_TIMEOUT_SECONDS": "3600",
        "HEADWAY_DATABASE": f"sqlite:///{directory}/{os.urandom(4).hex()}.db",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "watch"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment, **changes},
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: scene.redis.pubsub_numpat() >= 3 or process.poll() is not None, 30)
        assert process.poll() is None, "the watcher ended"
        yield process
    finally:
        process.terminate()
        process.wait(10)


def fail_and_wait(scene: Scene, name: str, hears: Any) -> float:
    began = time.perf_counter()
    scene.burst(1, prefix=name)
    eventually(hears, 20)
    return time.perf_counter() - began


def latency(directory: Path, rounds: int, polled_rounds: int) -> dict[str, Any]:
    """From just before RQ writes a failure until a subscriber has its event; the bare notification and polling too."""
    with scene_of("latency", directory) as scene:
        bare_link = scene.redis.pubsub(ignore_subscribe_messages=True)
        bare_link.psubscribe(f"__keyspace@0__:{FailedJobRegistry(scene.name).key}")
        bare_link.get_message(timeout=1)
        bare, watched, polled = [], [], []
        for number in range(rounds):
            bare.append(fail_and_wait(scene, f"bare{number}", lambda: bare_link.get_message(timeout=1)))
        bare_link.close()
        with watcher(scene, directory):
            eventually(lambda: len(scene.events.hear()) == rounds, 60)
            scene.events.all.clear()
            for number in range(rounds):
                began = time.perf_counter()
                scene.burst(1, prefix=f"w{number}")
                eventually(lambda wanted=number: len(listen(scene)) > wanted, 20)
                watched.append(time.perf_counter() - began)
        registry = FailedJobRegistry(scene.name, connection=scene.raw)
        known = set(registry.get_job_ids(cleanup=False))
        stop, found, draw = threading.Event(), threading.Event(), random.Random(4)

        def poll() -> None:
            while not stop.wait(2.0):
                ids = set(registry.get_job_ids(cleanup=False))
                if ids - known:
                    known.update(ids)
                    found.set()

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        for number in range(polled_rounds):
            found.clear()
            time.sleep(draw.uniform(0, 2))  # failures do not keep step with a poller
            began = time.perf_counter()
            scene.burst(1, prefix=f"p{number}")
            found.wait(10)
            polled.append(time.perf_counter() - began)
        stop.set()
        thread.join()
    return {
        "bare_notification": summary(bare),
        "watcher_event": summary(watched),
        "polling_every_2_s": summary(polled),
        "goal": "p99 < 100 ms",
        "reached": summary(watched)["p99_ms"] < 100,
    }


def listen(scene: Scene) -> list[dict[str, Any]]:
    """Like `Listener.hear`, waiting for the next message instead of looking now and then."""
    connection = scene.events._pubsub.connection  # noqa: SLF001 - measured without the pauses of a test
    assert connection is not None
    if connection.can_read(timeout=5):
        message = scene.events._pubsub.get_message(timeout=5)  # noqa: SLF001
        if message is not None:
            scene.events.all.append(json.loads(message["data"]))
    return scene.events.all


def idle(directory: Path, minutes: float) -> dict[str, Any]:
    """Commands a quiet queue costs, counted by the server: the watcher on one, polling on another, at the same time."""
    with scene_of("idle", directory) as watched, scene_of("polled", directory) as polled:
        for scene in (watched, polled):
            scene.burst(50)
        registries = [
            registry(polled.name, connection=polled.raw)
            for registry in (FailedJobRegistry, StartedJobRegistry, CanceledJobRegistry)
        ]
        stop = threading.Event()

        def poll() -> None:
            while not stop.wait(2.0):
                for registry in registries:
                    registry.get_job_ids(cleanup=False)

        with watcher(watched, directory, RQ__QUEUE=f"{watched.name},a,b,c"):
            eventually(lambda: len(watched.events.hear()) == 50)
            time.sleep(1)
            for scene in (watched, polled):
                scene.redis.config_resetstat()
            thread = threading.Thread(target=poll, daemon=True)
            thread.start()
            time.sleep(minutes * 60)
            counts = [scene.commands() for scene in (watched, polled)]
            stop.set()
            thread.join()
    for count in counts:
        count.pop("CONFIG|RESETSTAT", None)
        count.pop("CONFIG", None)
    per_minute = [sum(count.values()) / minutes for count in counts]
    return {
        "minutes": minutes,
        "queues": 4,
        "watcher_commands_per_minute": round(per_minute[0], 2),
        "watcher_commands": counts[0],
        "polling_commands_per_minute": round(per_minute[1], 2),
        "times_cheaper": round(per_minute[1] / max(per_minute[0], 0.01), 1),
        "commands_a_day": round(per_minute[0] * 1440),
        "goal": "<= 3 a minute",
        "reached": per_minute[0] <= 3,
    }


def memory(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def burst(directory: Path, count: int) -> dict[str, Any]:
    """So many failures at once."""
    with scene_of("burst", directory) as scene, watcher(scene, directory) as process:
        scene.burst(10, prefix="warm")
        eventually(lambda: len(scene.events.hear()) == 10)
        scene.events.all.clear()
        before = memory(process.pid, "VmRSS")
        scene.redis.config_resetstat()
        began = time.perf_counter()
        ids = scene.burst(count)
        written = time.perf_counter() - began
        eventually(lambda: len(scene.events.hear()) >= count, 300)
        told = time.perf_counter() - began
        time.sleep(1)
        heard = [event["job"] for event in scene.events.hear()]
        commands = scene.commands()
        peak = memory(process.pid, "VmHWM")
    return {
        "failures": count,
        "reported": len(heard),
        "each_once": sorted(heard) == ids,
        "seconds_until_all_written": round(written, 2),
        "seconds_until_all_told": round(told, 2),
        "events_per_second": round(count / told),
        "rss_before_mb": round(before, 1),
        "rss_peak_mb": round(peak, 1),
        "commands_per_failure": round(
            sum(commands.get(name, 0) for name in ("ZRANGE", "HMGET", "XREVRANGE", "PUBLISH", "ZCARD")) / count, 2
        ),
        "goal": "every one once, bounded memory",
        "reached": sorted(heard) == ids and peak - before < 50,
    }


def crowded(directory: Path, standing: int, count: int) -> dict[str, Any]:
    """So many failures arrive in a registry that is large already, in three places of it, while they are reported."""
    with scene_of("crowded", directory) as scene:
        for start in range(0, standing, 1_000):
            with scene.raw.pipeline(transaction=False) as pipe:
                for number in range(start, start + 1_000):
                    pipe.hset(f"rq:job:old{number}", mapping={"created_at": "2026-01-01T00:00:00Z", "status": "failed"})
                    pipe.xadd(f"rq:results:old{number}", {"type": 2, "execution_id": f"e{number}"})
                    pipe.zadd("rq:failed:digits", {f"old{number}": time.time() + 86_400 * 300 + number})
                pipe.execute()
        with watcher(scene, directory) as process:
            began = time.perf_counter()
            eventually(lambda: len(scene.events.hear()) >= standing, 900)
            caught_up = time.perf_counter() - began
            scene.events.all.clear()
            scene.redis.config_resetstat()
            began = time.perf_counter()
            for part in range(10):
                scene.burst(count // 10, failure_ttl=[None, -1, 86_400][part % 3], prefix=f"new{part}")
            written = time.perf_counter() - began
            eventually(lambda: len(scene.events.hear()) >= count, 300)
            seconds = time.perf_counter() - began
            time.sleep(1)
            heard = [event["job"] for event in scene.events.hear()]
            commands, peak = scene.commands(), memory(process.pid, "VmHWM")
    once = len(heard) == len(set(heard)) == count
    return {
        "standing": standing,
        "arriving": count,
        "seconds_until_caught_up": round(caught_up, 1),
        "seconds_until_all_written": round(written, 1),
        "seconds_until_all_told": round(seconds, 1),
        "each_once": once,
        "windows": sum(commands.get(name, 0) for name in ("ZRANGE", "ZSCAN")),
        "rss_peak_mb": round(peak, 1),
        "goal": "each once within 30 s",
        "reached": once and seconds <= 30,
    }


def lost(directory: Path, rounds: int) -> dict[str, Any]:
    """From the moment a killed worker's lease lapses until the event. The lease is RQ's (60 to 90 s); here 3 s."""
    late = []
    for number in range(rounds):
        with (
            scene_of(f"lost{number}", directory) as scene,
            watcher(scene, directory, RQ_WATCHER_STUCK_TIMEOUT_SECONDS="4"),
        ):
            worker = scene.worker(lease=3)
            job, _ = scene.hang()
            scene.kill_group(worker)
            ((_, lapses),) = scene.redis.zrange(StartedJobRegistry(scene.name).key, 0, -1, withscores=True)
            scene.events.expect((job.id, "lost"), timeout=30)
            late.append(time.time() - float(lapses))
    return {"after_the_lease_lapsed": summary(late), "goal": "as soon as the lease lapses"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of seven")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        results: dict[str, Any] = {"bench": "watcher", "quick": quick}
        say("latency ...")
        results["latency"] = latency(directory, 100 if quick else 1000, 3 if quick else 10)
        say(f"  {results['latency']}\nburst ...")
        results["burst"] = burst(directory, 2_000 if quick else 10_000)
        say(f"  {results['burst']}\ncrowded ...")
        results["crowded"] = crowded(directory, 10_000 if quick else 100_000, 1_000 if quick else 5_000)
        say(f"  {results['crowded']}\nlost worker ...")
        results["lost"] = lost(directory, 1 if quick else 5)
        say(f"  {results['lost']}\nidle ...")
        results["idle"] = idle(directory, 0.5 if quick else 5)
        say(f"  {results['idle']}")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
