"""Lists on the terminal are bounded and say how to see the rest; items are called by their key or content."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.ledger import Ledger
from headway.run.display.estimate import RunSnapshot
from headway.run.display.summary import MOST_CAUSES, summary
from tests.cli.conftest import Answer

Cli = Callable[..., Answer]
CITIES = [f"{first}{second}{third}" for first in "abcde" for second in "klmno" for third in "xy"]


def fails(city: str) -> None:
    raise LookupError(f"no such city: {city}")


def refuses(_: object) -> None:
    raise ValueError("refused")


@pytest.fixture
def many_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 50 items, each dead of a message of its own."""
    monkeypatch.chdir(tmp_path)
    headway.map(fails, CITIES, job="ads", retries=0, last_pass=False, workers=1, progress="none")


def test_a_summary_names_ten_causes_and_the_number_of_others(many_causes: None):
    with Ledger.open("sqlite:///headway.db") as ledger:
        causes = ledger.job("ads").causes()
    assert len(causes) == 50
    lines = summary("ads", RunSnapshot(50, 0, 0, 0, 0, 50, 50), seconds=1.0, retries=0, causes=causes, options="-d x")
    assert sum("LookupError" in line for line in lines) == MOST_CAUSES
    assert lines[-2] == "  ... and 40 more causes:  headway dead list ads -d x"


def test_dead_show_shows_twenty_causes_and_how_to_see_the_others(cli: Cli, many_causes: None):
    out = cli("dead", "show", "ads").out
    assert out.count("Cause ") == 20
    assert "... and 30 more causes." in out
    assert "headway dead list ads --limit 50" in out
    assert "headway dead show ads --cause 21" in out
    assert cli("dead", "show", "ads", "--cause", "33").out.startswith("Cause 33: 1 dead")
    assert len(cli("dead", "show", "ads", "--json").json["causes"]) == 50


def test_dead_list_is_bounded_and_shows_the_number_of_others(cli: Cli, many_causes: None):
    short = cli("dead", "list", "ads", "--limit", "5")
    assert len(short.out.splitlines()) == 6
    assert short.err == "45 more causes:  headway dead list ads --limit 50\n"
    assert cli("dead", "list", "ads", "--limit", "50").err == ""


def test_an_unknown_cause_does_not_list_all_causes(cli: Cli, many_causes: None):
    said = cli("dead", "show", "ads", "--cause", "99").err
    assert "20 and 30 more)" in said


def test_jobs_and_runs_are_bounded_and_show_the_number_of_others(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        headway.map(abs, [1], job=f"job-{number}", workers=1, progress="none")
        headway.map(abs, [1], job="often", workers=1, progress="none")
    jobs = cli("jobs", "--limit", "2")
    assert len(jobs.out.splitlines()) == 3
    assert jobs.err == "2 more jobs:  headway jobs --limit 4\n"
    assert len(cli("jobs", "--json").json["jobs"]) == 4
    runs = cli("runs", "often", "--limit", "1")
    assert [line.split()[0] for line in runs.out.splitlines()] == ["RUN", "3"]
    assert runs.err == "2 earlier runs:  headway runs often --limit 3\n"


def test_items_without_a_key_are_called_by_their_content(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    items: list[Any] = ["invoices/2026/a.pdf", {"file": "b.pdf", "password": "hunter2hunter2"}, "x" * 500]
    headway.map(refuses, items, job="ads", retries=0, last_pass=False, workers=1, progress="none")
    listed = cli("items", "ads", "--status", "dead").out
    shown = cli("dead", "show", "ads").out
    for text in (listed, shown):
        assert "invoices/2026/a.pdf" in text
        assert '{"file": "b.pdf", "password": "***"}' in text
        assert "hunter2" not in text
    assert listed.splitlines()[0].split()[:2] == ["IDX", "ITEM"]
    assert "payload" not in cli("items", "ads", "--json").out


def returned(item: Any) -> Any:
    return {"size": len(item)}


@pytest.mark.parametrize(
    "items", [["a.pdf", "bb.pdf"], [{"name": "a"}, {"name": "b", "n": [1]}]], ids=["texts", "dicts"]
)
def test_results_stand_beside_the_items_they_came_from(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: list[Any]
):
    monkeypatch.chdir(tmp_path)
    headway.map(returned, items, job="ads", workers=1, progress="none")
    lines = [json.loads(line) for line in cli("results", "ads", "--with-input").out.splitlines()]
    assert [(line["input"], line["result"]) for line in lines] == [(item, returned(item)) for item in items]
    rows = list(csv.DictReader(io.StringIO(cli("results", "ads", "--with-input", "--format", "csv").out)))
    if isinstance(items[0], str):
        assert [(row["input"], row["size"]) for row in rows] == [("a.pdf", "5"), ("bb.pdf", "6")]
    else:
        assert [(row["input.name"], row["input.n"], row["size"]) for row in rows] == [("a", "", "1"), ("b", "[1]", "2")]
    assert "input" not in cli("results", "ads", "--format", "csv").out
