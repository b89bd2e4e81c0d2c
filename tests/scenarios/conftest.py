"""Fixtures of the scenarios."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scenarios.deployment import Deployment


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """`deploy("captions", DATABASE_URL=...)`: a copy of an example, whose processes are ended with the test.

    `deploy("fleet", hostname="paris")`: one of several copies, as a machine of its own.
    """
    deployments: list[Deployment] = []

    def make(example: str, hostname: str = "", **environment: str) -> Deployment:
        deployments.append(Deployment(example, tmp_path / str(len(deployments)), hostname, **environment))
        return deployments[-1]

    yield make
    for deployment in deployments:
        deployment.close()


@pytest.fixture
def chance() -> random.Random:
    """Random choices of the long profile. The seed is printed, and HEADWAY_SCENARIO_SEED replays it."""
    seed = int(os.environ.get("HEADWAY_SCENARIO_SEED") or random.SystemRandom().randrange(10**6))
    print(f"HEADWAY_SCENARIO_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    return random.Random(seed)
