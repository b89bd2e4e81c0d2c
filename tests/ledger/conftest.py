"""One ledger per engine: what holds for one must hold for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.ledger import Job, Ledger, NewItem

ENGINES = ["sqlite", "memory", "postgresql"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if engine == "postgresql":
        return str(request.getfixturevalue("postgres_with_tables"))
    return "sqlite:///:memory:" if engine == "memory" else f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with Ledger.open(url) as opened:
        yield opened


@pytest.fixture
def job(ledger: Ledger) -> Job:
    """A sealed job of ten items, max_retries 2."""
    made = ledger.create("ads")
    made.register(NewItem(idx, f'{{"n":{idx}}}') for idx in range(10))
    made.seal()
    return made
