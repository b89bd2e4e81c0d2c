"""The import contracts notice what they forbid: each is broken once, all of them in one copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: A file, the line put into it, and how the contracts name that import.
FORBIDDEN = [
    ("ledger/__init__.py", "import sqlite3", "headway.ledger -> sqlite3"),
    (
        "ledger/store/report.py",
        "from headway._sql.sqlite import SQLite",
        "headway.ledger.store.report -> headway._sql.sqlite",
    ),
    ("ledger/content.py", "import headway.cli", "headway.ledger.content -> headway.cli"),
    ("finishline/__init__.py", "import psycopg", "headway.finishline -> psycopg"),
    ("ledger/values.py", "import redis", "headway.ledger.values -> redis"),
    ("run/items.py", "import click", "headway.run.items -> click"),
    (
        "states/manager.py",
        "from headway.states.store.redis import RedisStates",
        "headway.states.manager -> headway.states.store.redis",
    ),
    (
        "watcher/reports.py",
        "from headway.watcher import adapters",
        "headway.watcher.reports -> headway.watcher.adapters",
    ),
    ("telemetry/log.py", "import prometheus_client", "headway.telemetry.log -> prometheus_client"),
    ("errors.py", "from headway import telemetry", "headway.errors -> headway.telemetry"),
    ("states/store/sql.py", "import rq", "headway.states.store.sql -> rq"),
    ("config.py", "import google", "headway.config -> google"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the contracts say of a copy in which all of these are done."""
    place = tmp_path_factory.mktemp("broken")
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    for file, line, _ in FORBIDDEN:
        path = place / "src" / "headway" / file
        path.write_text(f"{path.read_text('utf-8')}\n\ndef _later() -> None:\n    {line}\n", "utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=place, env=os.environ | {"PYTHONPATH": str(place / "src"), "COLUMNS": "200"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("named", [named for _, _, named in FORBIDDEN], ids=lambda text: text.replace(" ", "_"))
def test_a_forbidden_import_is_noticed(found: str, named: str):
    assert f"{named} (l." in found
