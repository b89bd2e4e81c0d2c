"""Which starts replace a lost worker: rows of workers on several machines, judged at one moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway._lease import Owner, write_owner
from headway.alerts.lost_workers import departures

NOW = 1_000.0


def row(name: str, host: str, started: float, *, seen: float = NOW, state: str = "idle", ended: float | None = None):
    owner = replace(Owner.current(), host=host, machine=host, space=host)
    return (name, write_owner(owner), "urgent,high", state, None, None, started, seen, ended, "[]")


def lost(*rows: tuple[object, ...]) -> list[str]:
    """Return the names of workers that are lost and not replaced."""
    return sorted(one.name for one in departures(rows, NOW, limit=30) if not one.is_replaced)


DEAD = (
    row("p1", "paris", 0, seen=100, state="lost", ended=130),
    row("p2", "paris", 0, seen=100, state="lost", ended=130),
)


@pytest.mark.req("S2-40")
def test_a_further_worker_of_another_machine_does_not_hide_that_a_machine_died():
    rome, london = row("r1", "rome", 0), row("l1", "london", 0)
    assert lost(*DEAD, rome, london, row("r2", "rome", 110), row("l2", "london", 110)) == ["p1", "p2"]


def test_a_worker_that_moved_to_a_new_machine_is_not_lost():
    assert lost(*DEAD, row("r1", "rome", 0), row("m1", "milan", 140), row("m2", "milan", 141)) == []
    assert lost(*DEAD, row("r1", "rome", 0), row("m1", "milan", 140)) == ["p1"]


def test_a_machine_that_came_back_is_not_lost():
    assert lost(*DEAD, row("p3", "paris", 150), row("p4", "paris", 150)) == []


def test_a_restart_of_another_machine_does_not_hide_that_a_machine_died():
    before = row("r1", "rome", 0, state="ended", seen=300, ended=300)
    assert lost(*DEAD, before, row("r2", "rome", 310), row("r3", "rome", 310)) == ["p1", "p2"]


def test_machines_that_lost_power_together_are_not_lost_after_they_came_back():
    rome = row("r1", "rome", 0, seen=101, state="lost", ended=130)
    assert lost(*DEAD, rome) == ["p1", "p2", "r1"]
    assert lost(*DEAD, rome, row("r2", "rome", 150), row("p3", "paris", 150)) == ["p1"]
