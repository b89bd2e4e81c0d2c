"""SIGKILL between any two lines from an item's end to its event's delivery: one completion, one event id."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headway.events import CallableSink, Event, RedisOutbox, Relay
from headway.finishline import FinishLine, Outcome, Status
from headway.finishline.rebuild import LEASE_SECONDS
from tests.finishline.conftest import OpenLine, events
from tests.finishline.lines import at_line, die
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

#: Far more lines than any of the calls below runs.
MANY = 5_000


def killed_at(number: int, body: Callable[[], object], *parts: str) -> bool:
    """``body`` in a forked process that is killed before its n-th line in these parts; False when it has fewer."""
    child = os.fork()
    if child == 0:
        try:
            with at_line(number, die, *parts):
                body()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def redeliver(line: FinishLine, server: RedisServer, name: str) -> None:
    redelivered = line.item_failed(name, 2)
    assert redelivered.outcome in (Outcome.COMPLETED, Outcome.DUPLICATE, Outcome.COUNTED)
    progress = line.progress(name)
    assert (progress.status, progress.done, progress.errors) == (Status.DONE, 2, 1)
    heard: list[Event] = []
    relay = line.relay([CallableSink("listener", heard.append)])
    relay.tick()
    relay.tick()
    assert [event.job for event in heard] == [name]
    assert events(server) == []


def crash_and_redeliver(line: FinishLine, server: RedisServer, *, step: int) -> int:
    """A worker is killed at every ``step``-th line of its last count; how many were tried."""
    for tried, number in enumerate(range(0, MANY, step)):
        name = f"p{number}"
        line.create(name, total=2)
        line.item_done(name, 1)
        if not killed_at(number, partial(line.item_failed, name, 2), "finishline", "_redis"):
            return tried
        redeliver(line, server, name)
    raise AssertionError("it has no end")


@pytest.mark.req("S0-15", "S0-16")
@pytest.mark.parametrize(("kind", "step"), [("redis", 13), ("sqlite-journal", 37)])
def test_a_worker_killed_at_any_line_leaves_one_completion_and_one_event(
    kind: str, step: int, open_line: OpenLine, redis_server: RedisServer
):
    assert crash_and_redeliver(open_line(kind), redis_server, step=step) > 5


def crash_the_relay(line: FinishLine, server: RedisServer, *, step: int) -> int:
    """A relay is killed at every ``step``-th line; its successor leaves nothing undelivered, and no event has two ids."""
    state: Any = server.client(1)
    for tried, number in enumerate(range(0, MANY, step)):
        name = f"p{number}"
        line.create(name, total=1)
        assert line.item_done(name, 1).completed
        heard = CallableSink("listener", partial(_note, server, name))

        def doomed(heard: CallableSink = heard) -> None:
            relay = line.relay([heard])
            for _ in range(3):
                relay.tick()

        died = killed_at(
            number,
            doomed,
            "events",
            "finishline/line.py",
            "finishline/commands.py",
            "finishline/creation.py",
            "finishline/store/records.py",
        )
        successor = Relay(_outbox_of(line), [heard])
        eventually(partial(_empties, successor, state))
        ids = server.client(2).lrange(name, 0, -1)
        assert len(set(ids)) == 1
        assert len(ids) <= 2
        if not died:
            return tried
    raise AssertionError("it has no end")


def _note(server: RedisServer, name: str, event: Event) -> None:
    server.client(2).rpush(name, event.id)


def _empties(relay: Relay, state: Any) -> bool:
    relay.tick()
    return not state.xlen("smap:events")


def _outbox_of(line: FinishLine) -> RedisOutbox:
    """As `FinishLine.relay` makes it."""
    return line.outbox()


@pytest.mark.req("S0-15")
def test_a_relay_killed_at_any_line_is_followed_by_one_that_leaves_nothing_undelivered(
    open_line: OpenLine, redis_server: RedisServer
):
    assert crash_the_relay(open_line("sqlite"), redis_server, step=23) > 5


def crash_the_rebuild(line: FinishLine, server: RedisServer, *, step: int) -> int:
    """Whoever rebuilds a lost project is killed at every ``step``-th line."""
    for tried, number in enumerate(range(0, MANY, step)):
        name = f"p{number}"
        line.create(name, total=4)
        line.items_done(name, [1, "two", 3])
        server.client(1).delete(*server.client(1).keys(f"smap:proj:{name}*"))
        died = killed_at(number, partial(line.progress, name), "finishline", "_lease.py")
        began = time.monotonic()
        answer = line.items_done(name, [1, "two", 3, 4])
        assert time.monotonic() - began < LEASE_SECONDS / 2  # the lease of the dead one is not waited for
        assert (answer.outcome, answer.done, answer.counted) == (Outcome.COMPLETED, 4, 1)
        if not died:
            return tried
    raise AssertionError("it has no end")


def test_a_rebuild_killed_at_any_line_leaves_no_lease_to_wait_for(open_line: OpenLine, redis_server: RedisServer):
    assert crash_the_rebuild(open_line("sqlite-journal"), redis_server, step=19) > 10


@pytest.mark.faults
def test_every_line_of_them_all(open_line: OpenLine, redis_server: RedisServer):
    crash_and_redeliver(open_line("redis"), redis_server, step=1)
    redis_server.client().flushall()
    crash_and_redeliver(open_line("sqlite-journal"), redis_server, step=1)
    crash_the_rebuild(open_line("sqlite-journal"), redis_server, step=1)
    crash_the_relay(open_line("sqlite-journal"), redis_server, step=1)
