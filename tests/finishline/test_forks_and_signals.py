"""Prefork servers with threads, and exceptions that strike anywhere: every count is exact, no reply goes astray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from headway import _redis
from headway.finishline import FinishLine, Outcome
from tests.finishline.conftest import OpenLine
from tests.finishline.lines import at_functions, at_line
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.tracing import stop_tracing, untraced_environment
from tests.services.waiting import eventually


def forked(body: Callable[[], object]) -> int:
    """The pid of a child that runs ``body`` and ends with 0 if it returned."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def ended_well(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def prefork(line: FinishLine, *, children: int, threads: int = 8, counts: int = 5) -> None:
    """A server that used its line, then forks workers which start their threads at once."""
    answers: list[Any] = []

    def worker(number: int) -> None:
        gate = threading.Barrier(threads)

        def serve(thread: int) -> None:
            gate.wait()
            for turn in range(counts):
                answer = line.item_done("p", f"{number}.{thread}.{turn}")
                answers.append(answer)

        workers = [threading.Thread(target=serve, args=(thread,)) for thread in range(threads)]
        for each in workers:
            each.start()
        for each in workers:
            each.join(60)
        assert len(answers) == threads * counts
        assert {answer.outcome for answer in answers} == {Outcome.COUNTED}

    for first in range(0, children, 10):
        started = [forked(partial(worker, number)) for number in range(first, min(first + 10, children))]
        line.item_done("p")  # the parent goes on
        assert {ended_well(child) for child in started} == {True}
    assert line.progress("p").done == children * threads * counts + (children + 9) // 10


@pytest.mark.req("S0-13")
@pytest.mark.parametrize("kind", ["redis", "sqlite-journal"])
def test_forked_workers_that_start_eight_threads_at_once_count_exactly(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p", total=10**6)
    prefork(line, children=20)


@pytest.mark.faults
def test_two_hundred_and_fifty_forks_with_eight_threads_each(open_line: OpenLine):
    line = open_line()
    line.create("p", total=10**6)
    prefork(line, children=250)


def test_a_child_shares_no_socket_with_its_parent(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    line.create("p", total=100)
    line.item_done("p", 0)
    before = {client["addr"] for client in redis_server.client().client_list() if client["name"] == "headway-state"}
    go, done = os.pipe(), os.pipe()

    def worker() -> None:
        line.item_done("p", 1)
        os.write(done[1], b"x")
        os.read(go[0], 1)

    child = forked(worker)
    os.read(done[0], 1)
    now = {client["addr"] for client in redis_server.client().client_list() if client["name"] == "headway-state"}
    assert before < now
    os.write(go[1], b"x")
    assert ended_well(child)
    assert line.item_done("p", 2).done == 3
    for descriptor in (*go, *done):
        os.close(descriptor)


class Late(Exception):  # as a queue's job timeout is called by its own name
    """What a signal handler raises, as RQ's timeout does."""


def interrupt() -> None:
    raise Late


@pytest.mark.parametrize("kind", ["redis", "sqlite-journal"])
def test_an_exception_at_any_line_costs_its_own_call_and_no_other_is_given_its_reply(kind: str, open_line: OpenLine):
    line = open_line(kind)
    line.create("p", total=10**9)
    line.create("q", total=10**9)
    line.items_done("q", range(1000, 1500))
    line.item_done("p", 10**6)
    counted = 1
    for number in range(0, 3_000, 3 if kind == "redis" else 11):
        with at_line(number, interrupt, "finishline", "_redis") as steps, suppress(Late):
            line.item_done("p", number)
        answer = line.item_done("q", number)
        assert (answer.outcome, answer.counted) == (Outcome.COUNTED, 1)
        repeated = line.item_done("p", number)  # as the queue does
        assert repeated.outcome in (Outcome.COUNTED, Outcome.DUPLICATE)
        counted += 1
        assert (repeated.done, line.progress("p").done) == (counted, counted)
        if not steps.reached:
            break
    assert number > 60
    assert line.close(5.0)  # nothing counts as under way


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """`alarm(seconds)`: `Late` is raised in the main thread after that time."""

    def ring(*_: object) -> None:
        raise Late

    def wind(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, ring)
    yield wind
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_reply_that_a_timeout_left_behind_is_never_the_next_calls(
    open_line: OpenLine,
    redis_server: RedisServer,
    tcp_proxy: Callable[[int], TcpProxy],
    alarm: Callable[[float], None],
):
    proxy = tcp_proxy(redis_server.port)
    line = open_line(url=f"redis://127.0.0.1:{proxy.port}/1")
    line.create("p", total=1)
    line.create("q", total=100)
    line.item_done("q", 0)
    proxy.delay(0.3)
    alarm(0.1)
    with pytest.raises(Late):
        line.item_done("p", 1)  # it completes the project, and nobody hears it
    proxy.delay(0)
    answer = line.item_done("q", 1)
    assert (answer.outcome, answer.done) == (Outcome.COUNTED, 2)
    alarm(0)
    # Once more, exactly between the request and the wait for its reply, which comes long after the next request.
    line.create("r", total=1)
    proxy.delay(8)
    with pytest.raises(Late), at_functions("_redis/connections.py", read_response=interrupt):
        line.item_done("r", 1)
    proxy.delay(0)
    answer = line.item_done("q", 2)
    assert (answer.outcome, answer.done) == (Outcome.COUNTED, 3)
    assert line.close()


def test_signals_at_random_moments_neither_crash_the_process_nor_mix_replies_nor_use_up_the_pool(
    redis_server: RedisServer,
):
    """In a process of its own: what goes wrong in a C extension ends all of it."""

    def body() -> None:
        import random

        stop_tracing()  # a signal handler that raises inside a tracer ends the measuring, not the call
        armed = [False]

        def ring(*_: object) -> None:
            if armed[0]:
                armed[0] = False
                raise Late

        signal.signal(signal.SIGALRM, ring)
        client = _redis.connect(redis_server.url(3), role="state", max_connections=20)
        echo = _redis.Script("echo", "return ARGV[1]")
        rng = random.Random(1)
        interrupted = 0
        for number in range(3_000):
            said = answer = str(number)
            try:
                try:
                    armed[0] = True
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 6e-4))
                    if number % 3 == 0:
                        answer = str(client.echo(said))
                    elif number % 3 == 1:
                        answer = echo(client, [], [number])
                    else:
                        pipeline = client.pipeline(transaction=False)
                        pipeline.echo("0")
                        pipeline.echo(said)
                        answer = pipeline.execute()[1]
                finally:
                    armed[0] = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Late:
                interrupted += 1
            assert answer == said
        assert interrupted > 100
        assert client.client_list()[-1]["db"] == "3"  # no connection was used before its handshake was done

    child = forked(body)
    assert ended_well(child)


WAITING = """
import signal, threading
from headway.finishline.server import StateServer
from headway.core.retry import pause

class Late(Exception):
    pass

def ring(*_):
    raise Late

server = StateServer("redis://127.0.0.1:1/1")
signal.signal(signal.SIGALRM, ring)
for number in range(1_000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.000005 + number % 97 * 0.000001)
        while True:
            pause(0.00002, server.halt)  # as every write does between two tries
    except Late:
        pass
closing = threading.Thread(target=server.close, daemon=True)
closing.start()
closing.join(10)
print("hangs" if closing.is_alive() else "closed")
"""


def test_a_call_that_is_interrupted_while_it_waits_to_try_again_does_not_keep_the_line_from_closing():
    command = [sys.executable, "-c", WAITING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=untraced_environment())
    assert done.stdout == "closed\n", done.stderr


def test_an_interrupted_journal_writer_fails_for_itself_alone(open_line: OpenLine):
    """Threads share a transaction; the one that writes it for all is interrupted, and the others count all the same."""
    line = open_line("sqlite-journal")
    line.create("p", total=1000)
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append(line.item_done("p", "other")))

    def join_in() -> None:
        thread.start()
        eventually(lambda: len(line._journal._waiting) == 2)

    with pytest.raises(Late), at_functions("finishline/store/journal.py", _commit=join_in, _write=interrupt):
        line.item_done("p", "mine")
    thread.join(30)
    assert [answer.counted for answer in other] == [1]
    assert line.progress("p").done == 1
    assert line.item_done("p", "mine").done == 2
