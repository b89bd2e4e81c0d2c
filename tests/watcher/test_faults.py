"""Long campaigns: kills at random, the lease RQ really gives, ten thousand at once."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services.tracing import untraced_environment
from tests.services.waiting import eventually
from tests.watcher.scene import CHANNEL, ROOT, Scene

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(scene: Scene) -> Iterator[Start]:
    """Starts the command; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(**changes: str) -> subprocess.Popen[bytes]:
        started.append(_start(scene, **changes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def _start(scene: Scene, **changes: str) -> subprocess.Popen[bytes]:
    environment = {
        "REDIS_URL": scene.url,
        "RQ__QUEUE": scene.name,
        "DIGITS_EVENTS_CHANNEL": CHANNEL,
        "RQ_WATCHER_STUCK_TIMEOUT_SECONDS": "3600",
        "RQ_WATCHER_PAGE_SIZE": "20",
        "PYTHONPATH": str(ROOT / "src"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "headway", "watch"],
        cwd=scene.directory,
        env=untraced_environment() | environment | changes,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("store", ["sqlite:///watcher.db", "redis"])
def test_a_watcher_killed_repeatedly_loses_nothing_and_repeats_only_unrecorded_events(
    scene: Scene, start: Start, store
):
    """Kill -9 at random moments while failures pour in. A kill may repeat the window it fell into, under the same ids."""
    kills, draw, ids = 40, random.Random(4), []
    for number in range(kills):
        watcher = start(RQ_WATCHER_STORE=store)
        ids += scene.burst(100, prefix=f"round{number}")
        eventually(lambda: scene.redis.pubsub_numpat() == 3, 30)
        time.sleep(draw.uniform(0, 0.15))
        watcher.send_signal(signal.SIGKILL)
        watcher.wait()
        eventually(lambda: scene.redis.pubsub_numpat() == 0, 30)
    watcher = start(RQ_WATCHER_STORE=store)
    eventually(lambda: {event["job"] for event in scene.events.hear()} >= set(ids), 60)
    watcher.terminate()
    assert watcher.wait(10) == 0
    told = Counter(event["id"] for event in scene.events.hear())
    assert {event["job"] for event in scene.events.all} == set(ids)
    assert len(told) == len(ids)
    assert sum(told.values()) - len(told) <= kills * 20


def test_a_killed_worker_is_reported_when_its_lease_expires(scene: Scene):
    worker = scene.worker()  # RQ's own lease: a minute and the monitoring interval, here 1 s
    with scene.watching():
        job, _ = scene.hang()
        scene.kill_group(worker)
        began = time.monotonic()
        scene.events.expect((job.id, "lost"), timeout=100)
        assert 55 < time.monotonic() - began < 70


def test_a_link_cut_two_hundred_times_loses_nothing(scene: Scene):
    ids: list[str] = []
    for number in range(200):
        watching = scene.start(page_size=20)
        ids += scene.burst(3, prefix=f"before{number}")
        for link in scene.redis.client_list():
            if link["name"] == "headway-watcher" and link["psub"] != "0":
                scene.redis.client_kill_filter(_id=link["id"])
        ids += scene.burst(3, prefix=f"after{number}")
        assert watching.ended() is not None
    with scene.watching():
        scene.events.expect(*[(job_id, "failed") for job_id in ids], timeout=60)


def test_ten_thousand_failures_are_each_reported_once_in_bounded_memory(scene: Scene, start: Start):
    watcher = start(RQ_WATCHER_PAGE_SIZE="200")
    eventually(lambda: scene.redis.pubsub_numpat() == 3, 30)
    ids = scene.burst(10_000)
    scene.events.expect(*[(job_id, "failed") for job_id in ids], timeout=120)
    status = Path(f"/proc/{watcher.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 100 * 1024
    watcher.terminate()
    assert watcher.wait(10) == 0
