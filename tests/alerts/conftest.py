"""A store on each engine, and a deployment in it whose alerts are judged at moments the test names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway._sql import Database, connect
from headway.alerts import Alert, Evaluator, Rules
from headway.alerts.store.alerts import closed_alerts, open_alerts
from headway.queue.task_queue import TaskQueue
from tests.queue.nursery import Forked, Nursery


@pytest.fixture(params=["file", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"sqlite:///{tmp_path}/alerts.db"
    return str(request.getfixturevalue("postgres_with_tables"))


@pytest.fixture
def store(database_url: str) -> Iterator[Database]:
    with connect(database_url) as opened:
        yield opened


class Scene:
    """The store, judged every ten seconds of a clock that the test moves."""

    def __init__(self, store: Database, url: str) -> None:
        self.store, self.url = store, url
        self.now = store.now() + 1.0
        self._evaluators: list[Evaluator] = []

    def evaluator(self, **options: Any) -> Evaluator:
        self._evaluators.append(Evaluator(self.store, **options))
        return self._evaluators[-1]

    def pass_time(self, evaluator: Evaluator, seconds: float) -> None:
        """Rounds at ten seconds' distance, the last of them after so many seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 10.0, end)
            evaluator.tick(at=self.now)

    def open(self) -> list[tuple[str, str]]:
        with self.store.read() as tx:
            return [(alert.rule, alert.subject) for alert in open_alerts(tx)]

    def alerts(self) -> list[Alert]:
        """Open and closed, in the order of their opening."""
        with self.store.read() as tx:
            return sorted([*open_alerts(tx), *closed_alerts(tx, 1000)])

    def events(self) -> list[tuple[str, str, str]]:
        """(type, rule, subject) of what was decided to be told."""
        rows = self.store.all("SELECT type, data FROM outbox WHERE type LIKE 'alert.%' ORDER BY seq")
        found = [(type, json.loads(data)) for type, data in rows]
        return [(type, data["rule"], data["subject"]) for type, data in found]

    def close(self) -> None:
        for evaluator in self._evaluators:
            evaluator.close()


@pytest.fixture
def scene(store: Database, database_url: str) -> Iterator[Scene]:
    made = Scene(store, database_url)
    yield made
    made.close()


@pytest.fixture
def queue(store: Database) -> TaskQueue:
    made = TaskQueue(store, per_user=None)
    made.handler("caption", retries=0, isolation="none")(lambda task, payload: 1 / payload)
    return made


def rules(open_after: float = 60.0, close_after: float = 120.0, **limits: float) -> Rules:
    """These rules; the others are off."""
    return Rules(limits=limits, open_after=open_after, close_after=close_after)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def spawn(nursery: Nursery, database_url: str, store: Database) -> Iterator[Callable[[str], Forked]]:
    """Starts a worker process of the queue."""
    started: list[Forked] = []

    def start(name: str) -> Forked:
        started.append(nursery.start(name, url=database_url, redis=None, drain=5.0))
        return started[-1]

    yield start
    for child in started:
        child.kill()
