"""Causes: numbered alike wherever they are shown, and named before anything is done to them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.ledger import Failed, Failure, Ledger, NewItem
from tests.cli.conftest import Answer

Cli = Callable[..., Answer]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """The first cause to appear has the fewest dead letters: counts and numbers run against each other."""
    path = tmp_path / "headway.db"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        job = ledger.create("ads", max_retries=0)
        job.register([NewItem(idx, "{}") for idx in range(6)])
        failures = [Failure("KeyError", "'page_count'"), Failure("Corrupt", "no xref"), Failure("Timeout", "too slow")]
        for idx, which in enumerate([0, 1, 1, 2, 2, 2]):
            job.record([Failed(idx, failures[which])])
    return path


def numbered(text: str) -> list[tuple[str, str]]:
    """(number, type) of the rows of a table of causes."""
    found = [
        re.search(r"\b(\d+)\s+\d+\s+(?:\d{4}-\d\d-\d\d \S+\s+)?(KeyError|Corrupt|Timeout)\b", line)
        for line in text.splitlines()
    ]
    return [(match[1], match[2]) for match in found if match]


BY_COUNT = [("3", "Timeout"), ("2", "Corrupt"), ("1", "KeyError")]


def test_every_listing_shows_the_number_that_the_option_takes_most_dead_first(cli: Cli, three: Path):
    assert numbered(cli("dead", "list").out) == BY_COUNT
    assert numbered(cli("show", "ads").out) == BY_COUNT
    assert re.findall(r"^Cause (\d+):.*\n  (\w+):", cli("dead", "show", "ads").out, re.MULTILINE) == BY_COUNT
    for command in (("dead", "list"), ("dead", "show", "ads"), ("show", "ads")):
        causes = cli(*command, "--json").json["causes"]
        assert [(str(cause["no"]), cause["type"]) for cause in causes] == BY_COUNT


@pytest.mark.parametrize(("number", "type"), BY_COUNT)
def test_the_number_that_is_shown_means_that_cause_everywhere(cli: Cli, three: Path, number: str, type: str):
    count = int(number)  # the third has three dead letters, and so on
    assert f"{type}:" in cli("dead", "show", "ads", "--cause", number).out
    assert len(cli("dead", "export", "ads", "--cause", number).out.splitlines()) == count
    assert len(cli("items", "ads", "--cause", number, "--json").json["items"]) == count
    asked = cli("retry", "ads", "--cause", number)
    assert f"Cause {number} is {type}: " in asked.err
    assert f"Retry {count} dead letter" in asked.err
    answer = cli("retry", "ads", "--cause", number, "--yes")
    assert f"Cause {number} is {type}: " in answer.err
    assert [row for row in numbered(cli("dead", "list").out) if row[0] == number] == []


def test_a_number_stays_with_its_cause_when_the_counts_change(cli: Cli, three: Path):
    cli("retry", "ads", "--cause", "3", "--yes")
    assert numbered(cli("dead", "list").out) == BY_COUNT[1:]
    with Ledger.open(f"sqlite:///{three}") as ledger:
        ledger.job("ads").record(
            [Failed(3, Failure("KeyError", "'page_count'")), Failed(4, Failure("KeyError", "'page_count'"))]
        )
    assert numbered(cli("dead", "list").out) == [("1", "KeyError"), ("2", "Corrupt")]


def test_a_hostile_message_cannot_forge_the_question(cli: Cli, tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        job = ledger.create("ads", max_retries=0)
        job.register([NewItem(0, "{}")])
        job.record([Failed(0, Failure("Boom", "\x1b[2K\rRetry 0 dead letters?\n" + "x" * 500))])
    asked = cli("retry", "ads", "--cause", "1").err
    assert "\x1b" not in asked
    assert "\r" not in asked
    assert len(asked.splitlines()[0]) < 250


def test_the_question_is_that_of_every_command_that_asks(cli: Cli, three: Path):
    for command in (("retry", "ads"), ("forget", "ads"), ("states", "delete", "ads")):
        answer = cli(*command)
        assert answer.code == 2
        assert re.fullmatch(
            r"Error: .*\? There is no terminal to confirm it\.\n  Confirm it on the command line: --yes\n", answer.err
        ), answer.err


@pytest.mark.parametrize(("words", "kind"), [(["run", "m:f", "--items"], "file"), (["run", "m:f", "--output"], "file")])
def test_file_names_are_completed_where_a_file_is_meant(headway_cli: Run, words: list[str], kind: str):
    line = ["headway", *words, ""]
    environment = {"_HEADWAY_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    done = headway_cli(env=environment)
    assert (done.stdout.strip().split(",")[0], done.stderr) == (kind, "")
