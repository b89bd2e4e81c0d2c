"""A queue on each engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.queue.taskqueue import TaskQueue


@pytest.fixture(params=["file", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"sqlite:///{tmp_path}/queue.db"
    return str(request.getfixturevalue("postgres_with_tables"))


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with TaskQueue(database_url) as made:
        made.handler("caption", retries=3, retry_delay=0.01)(lambda task, payload: payload)
        made.handler("resize", retries=0)(lambda task, payload: payload)
        yield made


@pytest.fixture
def crowd(database_url: str) -> Iterator[TaskQueue]:
    """A queue without a limit per user."""
    with TaskQueue(database_url, per_user=None) as made:
        made.handler("caption", retries=3, retry_delay=0.01)(lambda task, payload: payload)
        made.handler("resize", retries=0)(lambda task, payload: payload)
        yield made
