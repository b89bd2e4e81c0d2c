"""The checkpointer's rounds: one of many does them, and a checkpoint never goes back."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from headway.finishline import FinishLine, Progress, Status
from tests.finishline.conftest import OpenLine
from tests.finishline.lines import at_line
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


def questions(server: RedisServer) -> int:
    stats: Any = server.client().info("commandstats")
    return int(stats.get("cmdstat_hgetall", {"calls": 0})["calls"])


def test_one_of_many_checkpointers_does_a_round(open_line: OpenLine, redis_server: RedisServer):
    lines = [open_line("sqlite") for _ in range(5)]
    lines[0].create("p", total=10)
    lines[0].item_done("p", 1)
    redis_server.client().config_resetstat()
    for line in lines:
        assert line.checkpointer is not None
        line.checkpointer.tick()
    assert questions(redis_server) == 1
    assert lines[0]._records is not None
    row = lines[0]._records.find("p")
    assert row is not None
    assert row.done == 1


def test_a_checkpointer_whose_process_was_killed_is_replaced_at_once(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite", interval=600.0)
    assert line.checkpointer is not None
    line.create("p", total=10)
    child = os.fork()
    if child == 0:
        line.checkpointer.tick()
        os._exit(0)
    os.waitpid(child, 0)
    assert redis_server.client(1).ttl("smap:checkpointer") > 500
    line.item_done("p", 1)
    line.checkpointer.tick()
    assert line._records is not None
    row = line._records.find("p")
    assert row is not None
    assert row.done == 1


def test_a_checkpoint_never_goes_back(open_line: OpenLine):
    """Two checkpointers may work beside each other after an outage; the slower one read less."""
    line = open_line("sqlite")
    line.create("p", total=10)
    assert line._records is not None
    early = line._records.find("p")
    assert early is not None
    line._records.checkpoint([(early, Progress(Status.INITIALIZING, 10, 7, 2))])
    line._records.checkpoint([(early, Progress(Status.INITIALIZING, 10, 5, 1))])
    row = line._records.find("p")
    assert row is not None
    assert (row.done, row.errors) == (7, 2)


def test_a_fork_does_not_wait_for_a_checkpointer_whose_database_is_silent(
    redis_server: RedisServer, postgres_with_tables: str, postgres_server: PostgresServer
):
    proxy = TcpProxy(postgres_server.port)
    through_proxy = postgres_with_tables.replace(str(postgres_server.port), str(proxy.port))
    line = FinishLine(redis_server.url(1), through_proxy, journal=True, interval=0.01)

    def waiting_round() -> FrameType | None:
        """The frame of the checkpointer's round, if it waits for PostgreSQL."""
        assert line._checkpointing is not None
        thread = line._checkpointing.thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        waits = False
        while frame is not None and frame.f_code.co_name != "_round":
            waits = waits or "psycopg" in frame.f_code.co_filename
            frame = frame.f_back
        return frame if waits else None

    try:
        line.create("p", total=10)
        proxy.black_hole()
        held = eventually(waiting_round)
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert waiting_round() is held  # it still waits
    finally:
        proxy.pass_through()
        proxy.cut()
        line.close()
        proxy.close()


def test_a_child_forked_during_a_round_uses_the_line_as_its_own(open_line: OpenLine, redis_server: RedisServer):
    """The parent's checkpointer may hold any of its locks at that moment; the child must not need one of them."""
    line = open_line("postgres-journal")
    line.create("p", total=1000)
    assert line.checkpointer is not None
    for step in range(0, 200, 7):
        failed: list[int] = []

        def fork(step: int = step, failed: list[int] = failed) -> None:
            child = os.fork()
            if child == 0:
                try:
                    line.item_done("p", step)
                    os._exit(0)
                finally:
                    os._exit(1)
            failed.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        redis_server.client(1).delete("smap:checkpointer")
        with at_line(step, fork, "finishline/checkpointer.py") as steps:
            line.checkpointer.tick()
        if not steps.reached:
            break
        assert failed == [0]
    assert step > 30
    assert line.progress("p").done == step // 7
