"""Databases for the tests of the core."""

from pathlib import Path

import pytest


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address of a database that is not made yet: see databases.everywhere."""
    match request.param:
        case "file":
            return f"sqlite:///{tmp_path}/ledger.db"
        case "memory":
            return "sqlite:///:memory:"
        case _:
            return str(request.getfixturevalue("postgres_url"))
