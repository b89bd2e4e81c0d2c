"""SIGKILL at each numbered step between an item's end and its event's delivery: one completion, one event id.

Names of the points are the steps of the model in tests/models/finishline.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from headway.events import CallableSink, Event, RedisOutbox, Relay
from headway.finishline import FinishLine, Outcome, Status, _Lane
from tests.finishline.conftest import OpenLine, events
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

fork = multiprocessing.get_context("fork")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def then_die(step: Callable[..., Any]) -> Callable[..., Any]:
    def after(*arguments: Any, **options: Any) -> None:
        step(*arguments, **options)
        die()

    return after


def before_commit(line: FinishLine) -> None:
    line._journal.write = die  # type: ignore[method-assign, assignment]  # the process dies here


def after_commit(line: FinishLine) -> None:
    line._journal.write = then_die(line._journal.write)  # type: ignore[method-assign]  # as above


def before_count(line: FinishLine) -> None:
    _Lane.run = die  # type: ignore[method-assign]  # as above; this is a forked child


def after_count(line: FinishLine) -> None:
    _Lane.run = then_die(_Lane.run)  # type: ignore[method-assign]  # as above


def before_note(line: FinishLine) -> None:
    line._note_completion = die  # type: ignore[method-assign]  # as above


def after_note(line: FinishLine) -> None:
    line._note_completion = then_die(line._note_completion)  # type: ignore[method-assign]  # as above


WORKER_POINTS = {
    "redis": [before_count, after_count],
    "sqlite-journal": [before_commit, after_commit, before_count, after_count, before_note, after_note],
}
CASES = [(kind, point) for kind, points in WORKER_POINTS.items() for point in points]


def killed(body: Callable[[], object]) -> None:
    """``body`` in a process of its own that does not survive it."""
    process = fork.Process(target=body, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def crash_and_redeliver(line: FinishLine, server: RedisServer, point: Callable[[FinishLine], None], name: str) -> None:
    line.create(name, total=2)
    line.item_done(name, 1)

    def worker() -> None:
        line._begin_process()
        point(line)
        line.item_failed(name, 2)

    killed(worker)
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


@pytest.mark.req("S0-15", "S0-16")
@pytest.mark.parametrize(("kind", "point"), CASES, ids=[f"{kind} {point.__name__}" for kind, point in CASES])
def test_a_worker_killed_at_any_step_leaves_one_completion_and_one_event(
    kind: str, point: Callable[[FinishLine], None], open_line: OpenLine, redis_server: RedisServer
):
    crash_and_redeliver(open_line(kind), redis_server, point, "p")


class Points(RedisOutbox):
    """An outbox whose process dies at one step."""

    point = ""

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        found = super().waiting(sink, limit)
        if self.point == "after taking" and found:
            die()
        return found

    def delivered(self, sink: str, handle: str) -> None:
        if self.point == "after delivering":
            die()
        super().delivered(sink, handle)
        if self.point == "after acknowledging":
            die()


RELAY_POINTS = ["after taking", "after delivering", "after acknowledging", "before noting", "before trimming"]


def crash_the_relay(line: FinishLine, point: str, name: str) -> list[str]:
    """Event ids as they were delivered, by the relay that died and by its successor."""
    line.create(name, total=1)
    assert line.item_done(name, 1).completed
    heard: Any = fork.Queue()

    def tell(event: Event) -> None:
        heard.put(event.id)
        heard.close()
        heard.join_thread()  # it is on its way before the process dies

    def relay() -> None:
        told = die if point == "before noting" else then_die(line._delivered) if point == "before trimming" else None
        outbox = Points(line._link.client, on_delivered=told)
        outbox.point = point
        doomed = Relay(outbox, [CallableSink("listener", tell)])
        for _ in range(3):
            doomed.tick()

    killed(relay)
    ids: list[str] = []
    if point != "after taking":
        ids.append(heard.get(timeout=10))
    outbox = RedisOutbox(line._link.client, on_delivered=line._delivered)
    successor = Relay(outbox, [CallableSink("listener", lambda event: ids.append(event.id))])
    for _ in range(3):
        successor.tick()
    return ids


@pytest.mark.req("S0-15")
@pytest.mark.parametrize("point", RELAY_POINTS)
def test_a_relay_killed_at_any_step_is_followed_by_one_that_leaves_nothing_untold(
    point: str, open_line: OpenLine, redis_server: RedisServer
):
    ids = crash_the_relay(open_line("sqlite"), point, "p")
    assert len(set(ids)) == 1
    assert len(ids) == (2 if point == "after delivering" else 1)
    eventually(lambda: events(redis_server) == [])


@pytest.mark.faults
def test_every_crash_point_a_hundred_times(open_line: OpenLine, redis_server: RedisServer):
    lines = {kind: open_line(kind) for kind in WORKER_POINTS}
    for cycle in range(100):
        for kind, point in CASES:
            crash_and_redeliver(lines[kind], redis_server, point, f"{kind}.{point.__name__}.{cycle}")
        for point_name in RELAY_POINTS:
            name = f"relay.{point_name.replace(' ', '-')}.{cycle}"
            assert len(set(crash_the_relay(lines["redis"], point_name, name))) == 1
