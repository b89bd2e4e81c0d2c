"""Readers that a raising signal handler interrupts anywhere: no lock stays held, and whoever waits goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.tracing import untraced_environment
from tests.states.conftest import Place

SCENE = """
import signal, sys, threading
from headway import states

class Alarm(Exception):
    pass

def ring(*_):
    raise Alarm

store, _ = states.open_store(sys.argv[1], "job", 3, max_concurrency=2)
stop = threading.Event()

def write():
    number = 0
    while not stop.wait(0.0005):
        number += 1
        store.set_state(states.State("job", 1, "a", number))

writer = threading.Thread(target=write)
writer.start()
subscription = store.subscribe()

def read():
    subscription.get(0.0005)

def put():
    store.set_state(states.State("job", 0, "a", 1))

def come_and_go():
    with store.subscribe() as passing:
        passing.get(1)

def look():
    store._supervisor._fresh_until = 0.0  # as if the listener had lost its store a moment ago
    store.list_all_states()

signal.signal(signal.SIGALRM, ring)
interrupted = 0
for number in range(500):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.00002 + number % 97 * 0.00001)
            for _ in range(1_000):  # an end: what is raised in a destructor is lost
                WHAT()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # also after a TimeoutError: an alarm then strikes in here, not later
    except (Alarm, TimeoutError):
        interrupted += 1
stop.set()
writer.join(10)
last = store.set_state(states.State("job", 2, "last", 7))
heard = []
reader = threading.Thread(target=lambda: heard.extend(iter(lambda: subscription.get(10).state, last)))
reader.start()
reader.join(20)
closing = threading.Thread(target=store.close)
closing.start()
closing.join(20)
print(interrupted > 100, writer.is_alive(), reader.is_alive(), closing.is_alive())
"""


@pytest.mark.parametrize("what", ["read", "put", "come_and_go", "look"])
def test_a_reader_and_a_writer_that_are_interrupted_anywhere_leave_the_store_and_its_subscriptions_usable(
    what: str, tmp_path: Path
):
    command = [sys.executable, "-X", "faulthandler", "-c", SCENE.replace("WHAT", what), f"sqlite:///{tmp_path}/s.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=untraced_environment())
    assert done.stdout == "True False False False\n", done.stderr


CLOSING = """
import signal, sys
from headway import states
from headway.errors import HeadwayError

def end(*_):
    manager.close()

signal.signal(signal.SIGALRM, end)
for number in range(100):
    store, tasks = states.open_store(sys.argv[1], "job", 3)
    manager = states.Manager("job", 0, tasks, store)
    subscription = manager.subscribe()
    signal.setitimer(signal.ITIMER_REAL, 0.0005 + number % 10 * 0.0005)
    try:
        while True:
            manager.set_state("a", status=number + 1)
            while subscription.waiting:
                subscription.get(0)
            manager.get_state()
    except HeadwayError as closed:
        assert "closed" in str(closed), closed
print("all closed")
"""

ACCEPTING = """
import sys
from headway import states
from headway.errors import HeadwayError

for status in (1, 2):  # of what is current, and of what happens
    store, _ = states.open_store(sys.argv[1], f"job-{status}", 3)
    store.set_state(states.State(store.job_id, 0, "a", 1))
    other = store.subscribe()

    def accepts(state):
        if state.status == status:
            store.close()
        return True

    subscription = store.subscribe(accepts=accepts)
    try:
        store.set_state(states.State(store.job_id, 0, "a", 2))
    except HeadwayError as closed:
        assert "closed" in str(closed), closed
    list(subscription), list(other)
print("all closed")
"""


@pytest.mark.parametrize("scene", [CLOSING, ACCEPTING], ids=["signal_handler", "accepts"])
def test_a_store_may_be_closed_by_a_signal_handler_and_by_what_a_subscription_accepts(scene: str, tmp_path: Path):
    """Neither may wait for what the call it interrupts has locked."""
    command = [sys.executable, "-X", "faulthandler", "-c", scene, f"sqlite:///{tmp_path}/s.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=untraced_environment())
    assert done.stdout == "all closed\n", done.stderr


STALE = """
import sys
from headway import states
from headway.core.retry import RetryPolicy
from tests.services.waiting import eventually

store, _ = states.open_store(sys.argv[1], "job", 3, retry=RetryPolicy(retries=5, base=3600, cap=3600))
store.set_state(states.State("job", 1, "a", 1))
with store.subscribe():
    store._supervisor._listener._waker._watch._connection.close()  # as if it had been lost
    eventually(lambda: not store.fresh, 30)
subscription = store.subscribe(accepts=lambda _: store.get_state(1, "a").status == 1)
print(subscription.get().state.status, subscription.get().state)
store.close()
"""


def test_what_a_subscription_accepts_may_read_the_store_also_of_who_subscribes_while_the_listener_is_away(
    tmp_path: Path,
):
    """In the main thread, where a listing is done by another one: that may not wait for what the first one has locked."""
    command = [sys.executable, "-X", "faulthandler", "-c", STALE, f"sqlite:///{tmp_path}/s.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=untraced_environment())
    assert done.stdout == "1 None\n", done.stderr


WRITING = """
import signal, sys
from headway import states
from headway.errors import HeadwayError

def warn(*_):
    manager.set_warning("ends soon", sys.argv[2])

store, tasks = states.open_store(sys.argv[1], "job", 3)
manager = states.Manager("job", 0, tasks, store)
signal.signal(signal.SIGALRM, warn)
refused = 0
for number in range(1000):
    signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 20 * 0.0001)
    try:
        while signal.getitimer(signal.ITIMER_REAL)[0]:
            manager.set_state("a", status=number + 1)
    except HeadwayError as error:
        assert "being written by the call that this one interrupts" in str(error), error
        refused += 1
    if refused == 3:
        break
assert manager.set_state("a", status=7).status == manager.set_state(sys.argv[2], status=7).status == 7
print("refused" if refused else "never within a write")
"""


@pytest.mark.stores(("sqlite", "postgresql", "redis"))
def test_a_signal_handler_that_writes_the_state_that_is_being_written_is_refused(place: Place):
    """The write that it interrupts waits for it, so it must not wait for that write."""
    for tag in ("a", "b") if place.kind == "sqlite" else ("a",):  # a file of SQLite has one writer
        command = [sys.executable, "-X", "faulthandler", "-c", WRITING, place.url, tag]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=untraced_environment()
        )
        assert done.stdout == "refused\n", done.stderr
