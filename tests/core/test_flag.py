"""What a signal handler that raises must not break: `Flag` and `undisturbed`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from headway.core.lifecycle import Flag, undisturbed
from tests.services.tracing import untraced_environment
from tests.services.waiting import eventually

INTERRUPTED = """
import signal, threading
from headway.core.lifecycle import Flag

class Alarm(Exception):
    pass

def ring(*_):
    raise Alarm

flag, interrupted = Flag(), 0
signal.signal(signal.SIGALRM, ring)
for number in range(1_000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.000005 + number % 97 * 0.000001)
        while True:
            flag.wait(0.00002)
    except Alarm:
        interrupted += 1
waiting = threading.Thread(target=flag.wait)
waiting.start()
setting = threading.Thread(target=flag.set)
setting.start()
setting.join(10)
waiting.join(10)
print(interrupted, setting.is_alive(), waiting.is_alive())
"""


def test_a_wait_that_a_signal_handler_interrupts_anywhere_leaves_the_flag_usable():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=untraced_environment(),
    )
    assert done.stdout == "1000 False False\n", done.stderr


def test_a_flag_wakes_everybody_who_waits_and_stays_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Flag, "_LOOK_SECONDS", 600.0)  # nobody looks by itself
    flag = Flag()
    threads = [threading.Thread(target=flag.wait, daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not flag.is_set()
    assert not flag.wait(0.001)
    eventually(lambda: len(flag._waiters) == 5)
    flag.set()
    flag.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert flag.wait()
    assert flag.wait(0)
    flag.clear()
    assert not flag.is_set()


def test_a_waiter_that_was_not_woken_polls_the_flag(monkeypatch: pytest.MonkeyPatch):
    assert Flag._LOOK_SECONDS <= 1.0
    monkeypatch.setattr(Flag, "_LOOK_SECONDS", 0.02)
    flag = Flag()
    thread = threading.Thread(target=flag.wait, daemon=True)
    thread.start()
    flag._flag = True  # as if whoever set it had been interrupted before it woke anybody
    thread.join(30)
    assert not thread.is_alive()


def test_undisturbed_work_runs_beside_the_main_thread_and_answers_or_raises_there():
    assert undisturbed(lambda: threading.current_thread() is not threading.main_thread())
    with pytest.raises(ZeroDivisionError):
        undisturbed(lambda: 1 // 0)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(undisturbed(lambda: threading.current_thread() is thread)))
    thread.start()
    thread.join()
    assert answers == [True], "where no handler runs no other thread is needed"


def test_work_completes_when_its_caller_was_interrupted():
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        done.wait(30)

    def interrupt() -> None:
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGUSR1)

    def ring(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(InterruptedError):
            undisturbed(work)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "headway-undisturbed" in {thread.name for thread in threading.enumerate()}
    done.set()
    eventually(lambda: "headway-undisturbed" not in {thread.name for thread in threading.enumerate()})


def test_work_is_done_without_a_thread_if_none_can_start(monkeypatch: pytest.MonkeyPatch):
    """As in `atexit` from Python 3.12 on."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert undisturbed(lambda: 5) == 5
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        assert undisturbed(lambda: 6) == 6
