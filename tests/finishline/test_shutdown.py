"""SIGTERM: nothing new is accepted, what is under way ends within 5 s, nothing acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.core.lifecycle import Shutdown
from headway.errors import Stopping
from headway.finishline import Answer
from tests.finishline.conftest import OpenLine
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

ROOT = Path(__file__).parents[2]

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def spawn_worker() -> Iterator[Spawn]:
    processes: list[subprocess.Popen[bytes]] = []

    def spawn(*arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.finishline.worker", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        # Without a buffer nothing beyond this line is taken away from `communicate`.
        assert process.stdout.readline() == b"ready\n"
        return process

    yield spawn
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ours(server: RedisServer) -> list[object]:
    return [client for client in server.client().client_list() if client["name"].startswith("headway")]


def ended(process: subprocess.Popen[bytes], timeout: float = 30) -> str:
    """Its output, once it has ended."""
    return process.communicate(timeout=timeout)[0].decode()


def acknowledged(output: str) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("ack")]


@pytest.mark.req("S0-34", "S0-36", "S0-37")
@pytest.mark.parametrize("kind", ["redis", "sqlite-journal"])
def test_a_signalled_process_refuses_new_calls_closes_its_connections_and_loses_no_count(
    kind: str, open_line: OpenLine, redis_server: RedisServer, spawn_worker: Spawn, database_url: str
):
    line = open_line(kind)
    line.create("p", total=10**7)
    database = [database_url] if kind != "redis" else []
    workers = [spawn_worker(redis_server.url(1), "p", str(number * 10**6), *database) for number in range(2)]
    eventually(lambda: line.progress("p").done > 20)
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    outputs = [ended(worker) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    acks = [number for output in outputs for number in acknowledged(output)]
    assert all(output.splitlines()[-2:] == ["refused", "drained"] for output in outputs)
    # An item may be counted whose acknowledgement the signal cut off; none is acknowledged and not counted.
    assert len(acks) <= line.progress("p").done <= len(acks) + len(workers)
    assert all(line.item_done("p", number).counted == 0 for number in acks)
    line.close()
    assert eventually(lambda: not ours(redis_server))


@pytest.mark.req("S0-35", "S0-37")
def test_a_slow_call_that_is_under_way_is_finished(
    open_line: OpenLine, redis_server: RedisServer, spawn_worker: Spawn, tcp_proxy: Callable[[int], TcpProxy]
):
    line = open_line()
    line.create("p", total=10**7)
    proxy = tcp_proxy(redis_server.port)
    worker = spawn_worker(f"redis://127.0.0.1:{proxy.port}/1", "p", "0")
    eventually(lambda: line.progress("p").done > 5)
    proxy.delay(1.0)
    before = line.progress("p").done
    eventually(lambda: line.progress("p").done > before)  # counted, and the answer is under way for a second
    worker.send_signal(signal.SIGTERM)
    output = ended(worker)
    assert worker.returncode == 0
    assert output.splitlines()[-1] == "drained"
    assert len(acknowledged(output)) == line.progress("p").done  # its answer was awaited


@pytest.mark.req("S0-35")
def test_closing_grants_calls_under_way_up_to_five_seconds(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    watching = open_line()
    proxy = tcp_proxy(redis_server.port)
    line = open_line(url=f"redis://127.0.0.1:{proxy.port}/1", timeout=60.0)
    line.create("p", total=5)
    line.item_done("p", 0)
    proxy.delay(2.5)
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(line.item_done("p", 1)))
    thread.start()
    eventually(lambda: watching.progress("p").done == 2)  # counted; the answer takes longer
    assert line.close()
    thread.join(60)
    assert [answer.done for answer in answers] == [2]


@pytest.mark.req("S0-34", "S0-35")
def test_a_backoff_ends_at_once_and_the_process_within_its_budget(
    open_line: OpenLine, redis_server: RedisServer, spawn_worker: Spawn
):
    line = open_line()
    line.create("p", total=10**7)
    worker = spawn_worker(redis_server.url(1), "p", "0")
    eventually(lambda: line.progress("p").done > 5)
    redis_server.stop()
    time.sleep(0.3)  # now it waits its first second
    began = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    output = ended(worker)
    assert time.monotonic() - began < 5.0
    assert worker.returncode == 0
    assert output.splitlines()[-2:] == ["refused", "drained"]


def test_a_wait_between_tries_is_interrupted_by_the_shutdown_of_its_own_process(
    open_line: OpenLine, redis_server: RedisServer
):
    shutdown = Shutdown()
    line = open_line(shutdown=shutdown)
    line.create("p", total=2)
    redis_server.stop()
    outcome: list[BaseException] = []

    def count() -> None:
        try:
            line.item_done("p", 1)
        except Stopping as error:
            outcome.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    eventually(lambda: line._server.away)
    began = time.monotonic()
    shutdown.request()
    thread.join(5)
    assert time.monotonic() - began < 4.0  # not 7
    assert len(outcome) == 1
    assert line.close()


def test_close_waits_for_calls_under_way_no_longer_than_it_is_granted(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    proxy = tcp_proxy(redis_server.port)
    line = open_line(url=f"redis://127.0.0.1:{proxy.port}/1", timeout=60.0)
    line.create("p", total=5)
    line.item_done("p", 0)  # it has a connection, and the server knows the script
    proxy.delay(600.0)  # nobody hears an answer any more
    outcome: list[BaseException] = []

    def count() -> None:
        try:
            line.item_done("p", 1)
        except Stopping as error:
            outcome.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    eventually(lambda: redis_server.client(1).hget("smap:proj:p", "done") == "2")  # it is under way
    assert not line.close(0.2)
    with pytest.raises(Stopping):
        line.item_done("p", 2)
    thread.join(60)
    assert len(outcome) == 1
    proxy.cut()
    eventually(lambda: not ours(redis_server))


@pytest.mark.faults
def test_two_hundred_signals_at_random_moments_end_in_time_and_lose_nothing(
    open_line: OpenLine, redis_server: RedisServer, spawn_worker: Spawn
):
    line = open_line()
    line.create("p", total=10**9)
    rng = random.Random(7)
    longest, counted = 0.0, 0
    for cycle in range(200):
        worker = spawn_worker(redis_server.url(1), "p", str(cycle * 10**5))
        time.sleep(rng.uniform(0, 0.1))
        if cycle % 4 == 0:
            os.kill(redis_server.pid, signal.SIGSTOP)
        began = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        output = ended(worker)
        longest = max(longest, time.monotonic() - began)
        redis_server.sigcont()
        assert worker.returncode == 0
        counted += len(acknowledged(output))
        assert line.progress("p").done >= counted
    assert longest < 5.0
