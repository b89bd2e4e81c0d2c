"""Events and sinks for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from headway.errors import ServerRefused
from headway.events import CallableSink, Event, Json

#: A new sink is told the last 30 days.
TODAY = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)


def event(number: int = 1, job: str = "ads", **data: Json) -> Event:
    at = TODAY + timedelta(seconds=number)
    return Event(f"e-{number}", "test.happened", at, "tests", job, number, data or {"number": number})


def numbers(*which: int) -> list[Event]:
    return [event(number) for number in which]


class Ear:
    """A sink that remembers what it heard, fails as long as it has ``trouble``, and ``refuses`` some events for good."""

    def __init__(self, name: str = "ear", trouble: BaseException | None = None) -> None:
        self.name = name
        self.trouble = trouble
        self.refuses: set[str] = set()
        self.heard: list[str] = []
        self.tries = 0
        self.job: str | None = None
        self._lock = threading.Lock()

    def deliver(self, found: Event) -> None:
        with self._lock:
            self.tries += 1
            if found.id in self.refuses:
                raise ServerRefused("it will never take this")
            if self.trouble is not None:
                raise self.trouble
            self.heard.append(found.id)

    def close(self) -> None:
        pass


def hanging(name: str, gate: threading.Event, entered: threading.Event) -> CallableSink:
    def call(_: Event) -> None:
        entered.set()
        gate.wait(60)

    return CallableSink(name, call)


def ids(which: Sequence[int]) -> list[str]:
    return [f"e-{number}" for number in which]
