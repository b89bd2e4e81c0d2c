"""examples/rate_limited_api: killed twice, resumed, one cause repaired and retried; at the end every price is there once."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from headway.errors import NotFound
from headway.ledger import JobInfo, Ledger
from tests.services.waiting import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "rate_limited_api"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    subprocess.run([sys.executable, "make_products.py"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture
def api(folder: Path) -> Iterator[str]:
    server = subprocess.Popen([sys.executable, "api_server.py", "0"], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.kill()
    server.communicate()


def ask(address: str, method: str = "GET") -> Any:
    with urlopen(Request(address, method=method), timeout=10) as response:
        return json.load(response)


def start(folder: Path, api: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return subprocess.Popen(
        [sys.executable, "prices.py", api], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def info(folder: Path) -> JobInfo:
    with Ledger.open(f"sqlite:///{folder}/headway.db", create=False) as ledger:
        return ledger.job("prices").info()


def has_done(folder: Path, count: int) -> bool:
    try:
        return info(folder).done >= count
    except NotFound:  # the run has not created the database or the job yet
        return False


def prices(folder: Path) -> list[dict[str, str]]:
    with (folder / "prices.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_price_is_there_once_after_two_kills_and_a_repaired_cause(folder: Path, api: str):
    for done in (300, 900):
        run = start(folder, api)
        eventually(partial(has_done, folder, done))
        run.send_signal(signal.SIGKILL)
        run.communicate()
    served = ask(f"{api}/log")
    kept = info(folder).done
    run = start(folder, api)
    output, _ = run.communicate(timeout=60)
    assert "1,980 of 2,000 done, 20 dead (20 x HTTPStatusError: Client error '422" in output, output
    with Ledger.open(f"sqlite:///{folder}/headway.db", create=False) as ledger:
        job = ledger.job("prices")
        (cause,) = [cause for cause in job.causes() if cause.dead]
        assert job.postponed() is None
        assert not [each for each in job.causes() if "429" in each.message], "429 is not a failure"
        ask(f"{api}/repair", "POST")
        assert job.retry_dead(cause=cause.no) == 20
    again, _ = start(folder, api).communicate(timeout=60)
    assert "2,000 of 2,000 done, none dead" in again
    rows = prices(folder)
    assert len(rows) == 2000
    assert {row["sku"]: (row["name"], float(row["price"])) for row in rows} == {
        f"p{n}": (f"Lamp {n}", round(1 + n * 7 % 1000 / 10, 2)) for n in range(2000)
    }
    assert kept >= 900
    twice = [sku for sku, count in ask(f"{api}/log").items() if count > 1]
    assert len(twice) <= 2 * 150, "only what was under way at a kill was asked for again"
    assert sum(served.values()) >= kept


def test_the_user_writes_few_lines_and_no_sleep():
    text = (EXAMPLE / "prices.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 25
    assert "sleep" not in text
