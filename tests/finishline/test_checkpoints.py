"""The checkpointer's rounds: one of many does them, and a checkpoint never goes back."""

from __future__ import annotations

from typing import Any

from headway.finishline import Progress, Status
from tests.finishline.conftest import OpenLine
from tests.services.redis import RedisServer


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
    import os

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
