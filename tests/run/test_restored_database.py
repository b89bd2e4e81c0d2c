"""A run whose database goes back in time: an operator restores a backup, or PostgreSQL fails over to a lagging replica."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import headway
from headway.ledger import Ledger
from headway.run import tracking

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

FUNCTION = """
import os, sqlite3, time
from contextlib import closing
from headway.ledger import Ledger

URL = os.environ["TEST_DATABASE"]
TABLES = ("jobs", "progress", "results", "outputs", "attempts", "causes", "dead_letters")

def done():
    with Ledger.open(URL, create=False) as ledger:
        return ledger.job("ads").info().done

def wait_for(count):
    while done() < count:
        time.sleep(0.01)

def save():
    if URL.startswith("sqlite"):
        with closing(sqlite3.connect(URL[10:])) as live, closing(sqlite3.connect("saved.db")) as saved:
            live.backup(saved)
    else:
        import psycopg
        with psycopg.connect(URL) as connection:
            connection.execute(f"LOCK TABLE {', '.join(TABLES)}")
            for table in TABLES:
                connection.execute(f"CREATE TABLE saved_{table} AS SELECT * FROM {table}")

def restore():
    if URL.startswith("sqlite"):
        with closing(sqlite3.connect(URL[10:], timeout=60)) as live, closing(sqlite3.connect("saved.db")) as saved:
            saved.backup(live)
    else:
        import psycopg
        with psycopg.connect(URL) as connection:
            connection.execute(f"LOCK TABLE {', '.join(TABLES)}")
            for table in TABLES:
                connection.execute(f"DELETE FROM {table}")
                connection.execute(f"INSERT INTO {table} OVERRIDING SYSTEM VALUE SELECT * FROM saved_{table}")

def work(item):
    with open("executed", "a") as file:
        file.write(f"{item}\\n")
    if item == 40 and not os.path.exists("40"):
        wait_for(20)
        save()
        open("40", "w").close()
    while item > 70 and not os.path.exists("40"):  # the copy must have fewer records than the restore replaces
        time.sleep(0.01)
    if item == 120 and not os.path.exists("120"):
        wait_for(100)
        restore()
        open("120", "w").close()
    return item

def lose_registration(item):
    if item == 3 and not os.path.exists("3"):
        open("3", "w").close()
        with Ledger.open(URL, create=False) as ledger:
            ledger.database.run(lambda tx: tx.execute("DELETE FROM input_products WHERE idx >= 100"))
            ledger.database.run(lambda tx: tx.execute("UPDATE jobs SET total = 100, sealed = 0"))
    return item

def miscount(item):
    if item == 150 and not os.path.exists("150"):
        open("150", "w").close()
        wait_for(100)
        with Ledger.open(URL, create=False) as ledger:
            ledger.database.run(lambda tx: tx.execute("UPDATE jobs SET done = done - 5"))
    return item
"""

EARLIER_RUN = """

def stop_early(item):
    if item == 40 and not os.path.exists("saved"):
        wait_for(20)
        save()
        open("saved", "w").close()
    if item == 40:
        raise ValueError("not this one")
    if item == 120 and not os.path.exists("restored"):
        wait_for(100)
        restore()
        open("restored", "w").close()
    return item
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "jobs.py").write_text(FUNCTION)
    (tmp_path / "items.jsonl").write_text("".join(f"{n}\n" for n in range(200)))
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/a.db"
    return str(request.getfixturevalue("postgres_with_tables"))


def run(cli: Cli, url: str, function: str = "work", *options: str) -> subprocess.CompletedProcess[str]:
    return cli(
        "run", f"jobs:{function}", "-i", "items.jsonl", "-j", "ads", "-w", "2", "-o", "out.jsonl", "--json",
        "--database", url, *options, env={"TEST_DATABASE": url},
    )  # fmt: skip


def test_items_whose_records_were_lost_run_again(tmp_path: Path, headway_cli: Cli, url: str):
    ended = run(headway_cli, url)
    assert ended.returncode == 0, ended.stderr
    executed = Counter(int(line) for line in (tmp_path / "executed").read_text().split())
    assert set(executed) == set(range(200))
    assert max(executed.values()) == 2, "the restore lost no record"
    with Ledger.open(url) as ledger:
        info = ledger.job("ads").info()
    assert (info.done, info.remaining, info.status) == (200, 0, "completed")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(200))
    assert " 200 done" in ended.stderr
    assert re.search(r"no longer has the records of \d+ items?:", ended.stderr)
    assert json.loads(ended.stdout)["done"] == 200


def test_a_run_that_is_stopped_after_a_restore_reports_what_the_ledger_has(tmp_path: Path, headway_cli: Cli, url: str):
    (tmp_path / "jobs.py").write_text(
        (tmp_path / "jobs.py").read_text()
        + "\n\ndef stop(item):\n    if item == 150:\n        raise ValueError('no')\n    return work(item)\n"
    )
    ended = run(headway_cli, url, "stop", "--max-failures", "1", "--retries", "0", "--workers", "1")
    assert ended.returncode == 4, ended.stderr
    with Ledger.open(url) as ledger:
        done = ledger.job("ads").info().done
    assert done < 150
    assert f"is at {done:,} of 200" in ended.stderr


def test_a_record_of_an_item_that_is_no_longer_registered_ends_the_run_and_the_same_command_continues(
    headway_cli: Cli, url: str
):
    ended = run(headway_cli, url, "lose_registration")
    assert ended.returncode == 2, ended.stderr
    assert "is not registered in job ads" in ended.stderr
    assert "run the same command again" in ended.stderr
    ended = run(headway_cli, url, "lose_registration")
    assert ended.returncode == 0, ended.stderr
    with Ledger.open(url) as ledger:
        assert ledger.job("ads").info().done == 200


def test_counters_that_do_not_match_the_items_end_the_run_with_an_error(headway_cli: Cli, url: str):
    ended = run(headway_cli, url, "miscount")
    assert ended.returncode == 1, ended.stderr
    assert "5 items of job ads are neither done nor dead" in ended.stderr
    assert run(headway_cli, url, "miscount").returncode == 0


def test_a_backup_of_an_earlier_run_ends_the_run_and_the_same_command_continues(
    tmp_path: Path, headway_cli: Cli, url: str
):
    (tmp_path / "jobs.py").write_text(FUNCTION + EARLIER_RUN)
    options = ("stop_early", "--workers", "1", "--retries", "0", "--no-last-pass")
    assert run(headway_cli, url, *options, "--max-failures", "1").returncode == 4
    ended = run(headway_cli, url, *options)
    assert ended.returncode == 1, ended.stderr
    assert "restored to a moment before this run of job ads began" in ended.stderr
    assert "Run the same command again" in ended.stderr
    assert "another process" not in ended.stderr
    ended = run(headway_cli, url, *options)
    assert ended.returncode == 3, ended.stderr
    with Ledger.open(url) as ledger:
        info = ledger.job("ads").info()
    assert (info.done, info.dead) == (199, 1)


# ---- loops of the user's own ----------------------------------------------------------------------------------------


def copy(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target, timeout=60)) as new:
        old.backup(new)


def test_a_loop_over_an_open_job_gets_the_items_whose_records_were_lost_again(tmp_path: Path):
    live, saved = tmp_path / "a.db", tmp_path / "saved.db"
    executed: list[int] = []
    with headway.open_job("ads", range(30), database=f"sqlite:///{live}") as job:
        for item in job.remaining():
            with item:
                executed.append(item.index)
            if len(executed) == 10:
                copy(live, saved)
            if len(executed) == 20:
                copy(saved, live)
        assert job.progress().done == 30
    assert executed == [*range(30), *range(10, 20)]


def test_a_tracked_loop_gets_the_items_whose_records_were_lost_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "SHORT_SECONDS", -1.0)  # each item is recorded by itself
    live, saved = tmp_path / "a.db", tmp_path / "saved.db"
    url = f"sqlite:///{live}"
    executed: list[int] = []
    for item in headway.track(list(range(30)), job="ads", database=url, progress="none"):
        executed.append(item)
        if len(executed) == 10:
            copy(live, saved)
        if len(executed) == 20:
            copy(saved, live)
    assert executed == [*range(30), *range(9, 19)], "an item is recorded when the next one is asked for"
    with Ledger.open(url) as ledger:
        assert ledger.job("ads").info().done == 30
