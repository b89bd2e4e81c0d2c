"""Many processes at once, lost replies, redelivery: the counters stay exact and one completion is told."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import psycopg
import pytest

from headway.core.retry import RetryPolicy
from headway.errors import NotFound
from headway.finishline import FinishLine, Outcome, Status
from tests.finishline.conftest import OpenLine, events
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

AT_ONCE = RetryPolicy(retries=20, base=0.002, cap=0.01)

fork = multiprocessing.get_context("fork")


def in_processes(work: Callable[[int], None], count: int) -> None:
    """`work(0)`, `work(1)`, … each in a forked process; every one must end well."""
    processes: list[BaseProcess] = [fork.Process(target=work, args=(number,), daemon=True) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


@pytest.mark.req("S0-13")
@pytest.mark.parametrize(("kind", "processes"), [("redis", 100), ("sqlite-journal", 25)])
def test_a_hundred_processes_leave_exactly_a_hundred(kind: str, processes: int, open_line: OpenLine):
    line = open_line(kind)
    line.create("p", total=1000)

    def work(number: int) -> None:
        line.item_done("p")  # the parent's object, used after the fork

    in_processes(work, processes)
    assert line.progress("p").done == processes


def test_processes_forked_from_one_with_a_keeper_use_the_line_as_their_own(open_line: OpenLine):
    line = open_line("sqlite-journal", checkpointer=True, interval=0.05)
    line.create("p", total=40)
    line.item_done("p", 0)
    assert line._checkpointing is not None
    assert line._checkpointing.thread is not None

    def work(number: int) -> None:
        for item in range(10):
            line.item_done("p", number * 10 + item)
        assert line._checkpointing is not None
        assert line._checkpointing.thread is not None
        assert line._checkpointing.thread.is_alive()  # its own: threads do not survive a fork
        assert line.close()

    in_processes(work, 4)
    assert line.progress("p").done == 40
    assert line.progress("p").status is Status.DONE


@pytest.mark.req("S0-13")
def test_processes_that_journal_the_same_items_crosswise_agree_and_do_not_lock_each_other_out(open_line: OpenLine):
    line = open_line("postgres-journal")
    line.create("p", total=60)
    line.create("q", total=60)

    def work(number: int) -> None:
        rng = random.Random(number)
        items = list(range(60))
        rng.shuffle(items)
        names = ["p", "q"] if number % 2 else ["q", "p"]
        for start in range(0, 60, 15):
            for name in names:
                call = line.items_done if number < 2 else line.items_failed
                call(name, items[start : start + 15])

    in_processes(work, 4)
    assert line._database is not None
    for name in ("p", "q"):
        progress = line.progress(name)
        [[failed]] = line._database.all(
            "SELECT sum(failed) FROM project_counts JOIN projects ON no = project WHERE id = ?", (name,)
        )
        assert (progress.status, progress.done, progress.errors) == (Status.DONE, 60, failed)


def race(rounds: int, workers: int, url: str, *, seed: int) -> list[tuple[str, int]]:
    """Each round is a project that ``workers`` processes work off together: some items fail, every item is
    delivered to two of them, and the crawl ends last. Returns (project, completions answered) per round."""
    names = [f"round{number}" for number in range(rounds)]
    gate = fork.Barrier(workers)
    answers: Any = fork.Queue()
    line = FinishLine(url)
    for name in names:
        line.create(name)
        line.set_status(name, Status.CRAWLING)

    def work(worker: int) -> None:
        rng = random.Random(seed + worker)
        won = []
        for name in names:
            items = [worker, (worker + 1) % workers]
            rng.shuffle(items)
            gate.wait()
            if worker == 0:
                won.append((name, line.finish_crawl(name, total=workers).completed))
            for item in items:
                call = line.item_failed if item % 4 == 3 else line.item_done
                won.append((name, call(name, item).completed))
        answers.put([name for name, completed in won if completed])

    processes: list[BaseProcess] = [fork.Process(target=work, args=(number,), daemon=True) for number in range(workers)]
    for process in processes:
        process.start()
    winners = [name for _ in processes for name in answers.get(timeout=100)]
    for process in processes:
        process.join(30)
    line.close()
    return [(name, winners.count(name)) for name in names]


@pytest.mark.req("S0-16")
def test_eight_racing_workers_complete_each_of_200_projects_exactly_once(redis_server: RedisServer):
    rounds = race(200, 8, redis_server.url(1), seed=1)
    assert {completions for _, completions in rounds} == {1}
    state = redis_server.client(1)
    told = [event["job"] for event in events(redis_server)]
    assert sorted(told) == sorted(name for name, _ in rounds)
    assert {tuple(sorted(state.hgetall(f"smap:proj:{name}").items())) for name, _ in rounds} == {
        (("done", "8"), ("errors", "2"), ("status", "DONE"), ("total", "8"))
    }


@pytest.mark.req("S0-12")
def test_clients_killed_at_any_moment_never_leave_an_error_without_its_item(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    line.create("p", total=10**6)

    def work(number: int) -> None:
        while True:
            line.item_failed("p")

    rng = random.Random(2)
    state = redis_server.client(1)
    for _ in range(20):
        process = fork.Process(target=work, args=(0,), daemon=True)
        process.start()
        _wait_for_a_count(state)
        process.join(rng.uniform(0.0, 0.03))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        counts = state.hgetall("smap:proj:p")
        assert counts["done"] == counts["errors"]


def _wait_for_a_count(state: Any) -> None:
    """A kill tells something only once its victim is at work."""
    before = int(state.hget("smap:proj:p", "done"))
    eventually(lambda: int(state.hget("smap:proj:p", "done")) > before, timeout=20)


@pytest.mark.req("S0-11", "S0-14", "S0-16")
@pytest.mark.parametrize("kind", ["redis", "sqlite-journal"])
@pytest.mark.parametrize("named", [True, False], ids=["item ids", "no ids"])
def test_replies_lost_after_the_server_applied_the_call_leave_every_count_exact(
    kind: str,
    named: bool,
    open_line: OpenLine,
    redis_server: RedisServer,
    tcp_proxy: Callable[[int], TcpProxy],
    each_thread: Callable[..., list[Any]],
):
    proxy = tcp_proxy(redis_server.port)
    line = open_line(kind, url=f"redis://127.0.0.1:{proxy.port}/1", retry=AT_ONCE)
    line.create("p", total=200)
    line.item_done("p", 999)  # the script is known, so that what is dropped below is the answer to a count
    proxy.drop_replies(every=10, to=b"EVALSHA")

    def work(worker: int) -> list[Any]:
        first = worker * 50
        return [line.item_done("p", number if named else None) for number in range(first, first + 50)]

    answers = [answer for part in each_thread(work, 4) for answer in part]
    proxy.pass_through()
    progress = line.progress("p")
    assert (progress.done, progress.errors, progress.status) == (201, 0, Status.DONE)
    assert sorted(answer.done for answer in answers) == list(range(2, 202))
    assert sum(answer.completed for answer in answers) == 1
    assert {answer.outcome for answer in answers} == {Outcome.COUNTED, Outcome.COMPLETED}
    assert redis_server.client(1).xlen("smap:events") == 1
    assert proxy.connections > 15  # replies were lost indeed


@pytest.mark.req("S0-14")
def test_a_call_whose_reply_was_lost_learns_that_it_completed_the_project(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    proxy = tcp_proxy(redis_server.port)
    line = open_line(url=f"redis://127.0.0.1:{proxy.port}/1", retry=AT_ONCE)
    calls: dict[str, Callable[[str], Any]] = {
        "item": lambda name: line.item_done(name, 1),
        "call": line.item_done,
        "total": lambda name: line.set_total(name, 1),
        "crawl": line.finish_crawl,
        "status": lambda name: line.set_status(name, Status.PROCESSING),
    }
    for name, call in calls.items():
        line.create(name, total=0 if name == "total" else 1)
        if name not in ("item", "call"):
            line.set_status(name, Status.CRAWLING if name != "total" else Status.INITIALIZING)
            line.item_done(name, 1)
        proxy.drop_replies(every=2, to=b"EVALSHA")
        proxy._answers = 1  # the very next one is lost
        assert call(name).completed, name
        proxy.pass_through()
    assert redis_server.client(1).xlen("smap:events") == len(calls)


@pytest.mark.parametrize(("kind", "number"), [("redis", 1), ("sqlite", 2)])
def test_a_deletion_whose_reply_was_lost_still_says_that_there_was_a_project(
    kind: str, number: int, open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    proxy = tcp_proxy(redis_server.port)
    line = open_line(kind, url=f"redis://127.0.0.1:{proxy.port}/1", retry=AT_ONCE)
    line.create("another")
    assert line.delete("another")  # the server knows the scripts
    line.create("p", total=1)
    proxy.drop_replies(every=100, to=b"EVALSHA")
    proxy._answers = 100 - number
    assert line.delete("p")
    assert proxy._answers > 100 - number + 1  # it was asked once more
    proxy.pass_through()
    assert not line.delete("p")


def test_a_project_deleted_while_its_items_are_journaled_costs_no_other_project_its_counts(
    open_line: OpenLine, postgres_with_tables: str
):
    """They share one transaction."""
    line = open_line("postgres-journal")
    for name in ("busy", "gone", "kept"):
        line.create(name, total=2)

    def waits_for_a_lock(look: psycopg.Connection) -> bool:
        found = look.execute(
            "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
            "WHERE NOT l.granted AND a.datname = current_database()"
        ).fetchone()
        return found is not None and found[0] > 0

    with (
        psycopg.connect(postgres_with_tables, autocommit=True) as look,
        psycopg.connect(postgres_with_tables) as first,
        psycopg.connect(postgres_with_tables) as second,
        ThreadPoolExecutor(3) as threads,
    ):
        first.execute("SELECT 1 FROM headway.projects WHERE id = 'busy' FOR UPDATE")
        second.execute("DELETE FROM headway.projects WHERE id = 'gone'")
        busy = threads.submit(line.item_done, "busy", 1)
        eventually(lambda: waits_for_a_lock(look))
        gone, kept = threads.submit(line.item_done, "gone", 1), threads.submit(line.item_done, "kept", 1)
        eventually(lambda: len(line._journal._waiting) == 2)
        first.rollback()
        assert busy.result(30).counted == 1
        eventually(lambda: waits_for_a_lock(look))
        second.commit()
        assert kept.result(30).counted == 1
        with pytest.raises(NotFound):
            gone.result(30)


@pytest.mark.faults
def test_ten_thousand_counts_with_every_tenth_reply_lost(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    total = int(os.environ.get("HEADWAY_FAULT_OPS", "10000"))
    proxy = tcp_proxy(redis_server.port)
    line = open_line(url=f"redis://127.0.0.1:{proxy.port}/1", retry=AT_ONCE)
    line.create("p", total=total)
    line.set_total("p", total)
    proxy.drop_replies(every=10, to=b"EVALSHA")
    completed = sum(line.item_done("p", number if number % 2 else None).completed for number in range(total))
    proxy.pass_through()
    assert (line.progress("p").done, completed) == (total, 1)


@pytest.mark.faults
def test_a_thousand_finish_races_complete_once_each(redis_server: RedisServer):
    for seed in range(5):
        redis_server.client(1).flushdb()
        rounds = race(200, 8, redis_server.url(1), seed=seed * 100)
        assert {completions for _, completions in rounds} == {1}
        assert redis_server.client(1).xlen("smap:events") == 200
