"""Signals to real processes, budgets, forks."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headway.core.lifecycle import STANDSTILL_SECONDS, Budget, ForkGuard, Shutdown, Stopwatch, on_signals
from headway.errors import HeadwayError, Stopping
from tests.services.waiting import eventually


@contextmanager
def child(code: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that runs ``code`` and has said that it is ready."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


HOLDING = """
import os, threading
from headway.core.lifecycle import Shutdown, on_signals
shutdown = Shutdown()
wakes = threading.Semaphore(0)
shutdown.on_request(lambda: (os.write(1, b"woken\\n"), wakes.release()))
with on_signals(shutdown):
    print("ready", flush=True)
    shutdown.stop.wait(30)
    os.write(1, b"stop %d %s\\n" % (shutdown.exit_code, str(shutdown.abandon.is_set()).encode()))
    shutdown.abandon.wait(30)
    os.write(1, b"abandon %d\\n" % shutdown.exit_code)
    for _ in range(2):
        wakes.acquire(timeout=30)  # another thread wakes, and a process that ends waits for none of its
raise SystemExit(shutdown.exit_code)
"""


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_means_finish_and_the_second_means_now(first: signal.Signals, code: int):
    with child(HOLDING) as process:
        assert process.stdout is not None
        process.send_signal(first)
        assert {process.stdout.readline(), process.stdout.readline()} == {"woken\n", f"stop {code} False\n"}
        process.send_signal(signal.SIGTERM)
        assert {process.stdout.readline(), process.stdout.readline()} == {"woken\n", f"abandon {code}\n"}
        assert process.wait(20) == code


BUSY = """
from headway.core.lifecycle import Shutdown, on_signals
shutdown = Shutdown()
with on_signals(shutdown):
    print("ready", flush=True)
    while not shutdown.stop.wait(0.000001):
        pass
    print("stopped", flush=True)
    while not shutdown.abandon.wait(0.000001):
        pass
"""


def test_a_signal_in_the_middle_of_a_wait_does_not_deadlock_with_it():
    """A handler that set the event itself would wait for the lock its own thread holds."""
    for _ in range(12):
        with child(BUSY) as process:
            assert process.stdout is not None
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stopped\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def test_two_requests_at_once_are_a_first_and_a_second():
    for _ in range(50):
        shutdown = Shutdown()
        threads = [threading.Thread(target=shutdown.request) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shutdown.stop.is_set()
        assert shutdown.abandon.is_set()


def test_no_new_operation_begins_after_a_request():
    shutdown = Shutdown()
    shutdown.check()
    shutdown.request()
    with pytest.raises(Stopping):
        shutdown.check()
    assert shutdown.exit_code == 143


def test_the_earlier_handlers_are_put_back():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with on_signals(Shutdown()) as shutdown:
            os.kill(os.getpid(), signal.SIGTERM)
            eventually(shutdown.stop.is_set)
        assert seen == []
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: seen == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    inside: list[object] = []

    def work() -> None:
        with on_signals(Shutdown()):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


def test_the_steps_of_a_shutdown_spend_one_budget():
    now = [10.0]
    budget = Budget(3.0, clock=lambda: now[0])
    assert (budget.left, budget.spent) == (3.0, False)
    now[0] = 12.0
    assert budget.left == 1.0
    now[0] = 99.0
    assert (budget.left, budget.spent) == (0.0, True)


def test_a_forked_child_may_not_use_its_parents_resource():
    guard = ForkGuard("The listener")
    guard.check()
    pid = os.fork()
    if pid == 0:
        try:
            guard.check()
        except HeadwayError as error:
            os._exit(7 if "The listener" in str(error) and error.hint and guard.crossed else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    guard.check()


def test_computing_between_polls_does_not_count_as_suspension():
    watch, began = Stopwatch(), time.process_time()
    while time.process_time() - began < 1.5 * STANDSTILL_SECONDS:
        pass
    assert watch.elapsed() >= 1.5 * STANDSTILL_SECONDS
