"""Relays in processes of their own, killed at every step and at random."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from headway.events import CallableSink, Relay
from tests.core.databases import python
from tests.events.conftest import Store
from tests.events.scene import event, ids
from tests.services.waiting import eventually

#: Arguments: kind of store, its address, the file in which deliveries are noted, where to die.
RELAY = """
import os, signal, sys, threading
from headway import _redis, _sql
from headway.events import CallableSink, RedisOutbox, Relay, SqlOutbox

kind, address, path, point = sys.argv[1:]
file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def deliver(event):
    if point == "before delivering":
        die()
    os.write(file, f"{event.job} {event.id}\\n".encode())
    if point == "after delivering":
        die()

if kind == "redis":
    box = RedisOutbox(_redis.connect(address, role="state"))
else:
    box = SqlOutbox(_sql.connect(address))
note = box.delivered

def delivered(sink, handle):
    note(sink, handle)
    if point == "after noting":
        die()

box.delivered = delivered
relay = Relay(box, [CallableSink("s", deliver)], rest=0.01)
if point:
    relay.tick()
else:
    print("ready", flush=True)
    relay.run(threading.Event())
"""


def start(store: Store, path: Path, point: str = "") -> subprocess.Popen[str]:
    return python(RELAY, store.kind, store.address, path, point)


@pytest.mark.parametrize(
    ("point", "heard"),
    [
        ("before delivering", ids([1, 2])),
        ("after delivering", ids([1, 1, 2])),
        ("after noting", ids([1, 2])),
    ],
)
def test_a_relay_killed_at_a_step_is_followed_by_one_that_leaves_nothing_out(
    store: Store, tmp_path: Path, point: str, heard: list[str]
):
    """And that does not wait for the dead one's lease: it sees that its holder is gone."""
    store.decide(event(1), event(2))
    log = tmp_path / "log"
    doomed = start(store, log, point)
    doomed.communicate(timeout=60)
    assert doomed.returncode == -signal.SIGKILL
    assert [one.holder for one in store.outbox().backlog()] == [None], "the dead serve nobody"
    told = [line.split()[1] for line in log.read_text().splitlines()]
    Relay(store.outbox(), [CallableSink("s", lambda found: told.append(found.id))]).tick()
    assert told == heard


def test_several_relays_killed_at_random_tell_everything_in_order_and_little_of_it_twice(store: Store, tmp_path: Path):
    campaign(store, tmp_path / "log", relays=2, kills=2, total=60)


@pytest.mark.faults
def test_many_relays_killed_at_random_tell_everything_in_order_and_little_of_it_twice(store: Store, tmp_path: Path):
    campaign(store, tmp_path / "log", relays=4, kills=20, total=400)


def campaign(store: Store, log: Path, *, relays: int, kills: int, total: int) -> None:
    """One relay is killed and replaced while events pour in. Each kill may repeat one delivery."""
    serving = [start(store, log) for _ in range(relays)]
    try:
        for number in range(1, total + 1):
            store.decide(event(number, f"job-{number % 3}"))
            if number % (total // kills) == 0:
                victim = serving.pop(0)
                assert victim.stdout is not None
                victim.stdout.readline()
                _await_some(log, number // 2)
                victim.kill()
                victim.communicate()
                serving.append(start(store, log))
        eventually(lambda: len(set(log.read_text().splitlines())) == total, 90)
    finally:
        for one in serving:
            one.kill()
            one.communicate()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) <= total + kills
    for job in {job for job, _ in lines}:
        told = [int(id.removeprefix("e-")) for name, id in lines if name == job]
        assert told == sorted(told)  # a repeated one comes before the next


def _await_some(log: Path, count: int) -> None:
    eventually(lambda: log.exists() and len(log.read_text().splitlines()) >= count, 60)
