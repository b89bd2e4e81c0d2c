"""The import contracts notice what they forbid: each is broken once, in a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ledger/__init__.py", "import sqlite3"),
        ("ledger/__init__.py", "from headway._sql.sqlite import SQLite"),
        ("ledger/__init__.py", "import headway.cli"),
        ("finishline/__init__.py", "import psycopg"),
        ("ledger/values.py", "import redis"),
        ("run/items.py", "import click"),
        ("states/manager.py", "from headway.states.redis import RedisStates"),
        ("watcher/logic.py", "from headway.watcher import adapters"),
        ("telemetry/log.py", "import prometheus_client"),
        ("errors.py", "from headway import telemetry"),
        ("states/sql.py", "import rq"),
        ("config.py", "import google"),
    ],
    ids=lambda text: text.replace(" ", "_"),
)
def test_a_forbidden_import_is_noticed(tmp_path: Path, file: str, line: str):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "src" / "headway" / file
    path.write_text(f"{path.read_text('utf-8')}\n\ndef _later() -> None:\n    {line}\n", "utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert " 1 broken" in done.stdout or " 2 broken" in done.stdout
