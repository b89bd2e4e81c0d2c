"""A run whose database goes away, or fills its disk, in the middle."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.ledger import Ledger
from tests.services.postgres import PostgresServer
from tests.services.waiting import eventually

Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTION = """
import time

def work(item):
    time.sleep(0.02)
    with open("executed", "a") as file:
        file.write(f"{item}\\n")
"""


def test_a_run_survives_a_restart_of_postgresql(
    tmp_path: Path, spawn_cli: Spawn, postgres_factory: Callable[..., PostgresServer]
):
    server = postgres_factory()
    (tmp_path / "jobs.py").write_text(FUNCTION)
    (tmp_path / "items.jsonl").write_text("".join(f"{n}\n" for n in range(300)))
    url = server.url(server.create_database())
    run = spawn_cli("run", "jobs:work", "-i", "items.jsonl", "-j", "ads", "-w", "2", "--database", url)
    for goal in (30, 120):
        _wait_for_executions(tmp_path, goal)
        server.restart(immediate=True)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 0, said
    with Ledger.open(url) as ledger:
        info = ledger.job("ads").info()
        assert (info.total, info.done, info.failures, info.status) == (300, 300, 0, "completed")
        assert ledger.database.one("SELECT count(*) FROM outbox") == (1,)


@pytest.mark.parametrize("accident", ["removed", "replaced"])
def test_a_run_whose_database_file_is_gone_says_so_and_claims_nothing(tmp_path: Path, spawn_cli: Spawn, accident: str):
    (tmp_path / "jobs.py").write_text(FUNCTION)
    (tmp_path / "items.jsonl").write_text("".join(f"{n}\n" for n in range(10_000)))
    Ledger.open(f"sqlite:///{tmp_path}/other.db").close()
    run = spawn_cli("run", "jobs:work", "-i", "items.jsonl", "-j", "ads", "-w", "2", "--database", "sqlite:///a.db")
    _wait_for_executions(tmp_path, 10)
    if accident == "replaced":
        (tmp_path / "other.db").replace(tmp_path / "a.db")
    else:
        (tmp_path / "a.db").unlink()
    out, said = run.communicate(timeout=60)
    assert run.returncode == 1, said
    assert "a.db" in said
    assert "while it was in use" in said
    assert "Traceback" not in said
    assert " done" not in out
    assert " finished in " not in said


def _wait_for_executions(place: Path, count: int) -> None:
    eventually(lambda: _executed(place) >= count, timeout=30)


def _executed(place: Path) -> int:
    file = place / "executed"
    return len(file.read_text().split()) if file.exists() else 0


@pytest.mark.req("S3-30")
def test_a_full_disk_ends_the_run_with_a_report_and_the_same_command_continues(
    tmp_path: Path, spawn_cli: Spawn, small_disk: Callable[[int], Path]
):
    disk = small_disk(16 * 2**20)
    (tmp_path / "jobs.py").write_text("def work(item):\n    return None\n")
    (tmp_path / "items.jsonl").write_text("".join(json.dumps({"n": n, "pad": "x" * 100}) + "\n" for n in range(12_000)))
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * 15_000_000)
    arguments = (
        "run",
        "jobs:work",
        "-i",
        "items.jsonl",
        "-j",
        "ads",
        "-w",
        "2",
        "--database",
        f"sqlite:///{disk}/a.db",
    )
    full = spawn_cli(*arguments)
    _, said = full.communicate(timeout=60)
    assert full.returncode == 1, said
    assert "no space is left" in said
    assert str(disk) in said
    assert "run the same command again" in said
    assert "Traceback" not in said
    ballast.unlink()
    again = spawn_cli(*arguments)
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0, said
    with Ledger.open(f"sqlite:///{disk}/a.db") as ledger:
        info = ledger.job("ads").info()
        assert (info.total, info.done) == (12_000, 12_000)
        ledger.database.verify()
