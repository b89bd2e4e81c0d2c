"""What a command says to type next works as it stands, also where the database was named by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headway.cli
from headway.core.text import with_option
from headway.ledger import Ledger, NewItem
from tests.cli.conftest import Answer

Cli = Callable[..., Answer]

OPTION = "--database 'sqlite:///my jobs.db'"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path}/my jobs.db") as ledger:
        job = ledger.create("ads.2026")
        job.register([NewItem(0, '"a"'), NewItem(1, '"b"')])
        yield ledger


def hinted(answer: Answer) -> list[str]:
    """The commands in what it said, each with what follows it on its line."""
    return re.findall(r"headway [^\n]*", answer.err)


def test_suggested_commands_contain_the_given_database(cli: Cli, elsewhere: Ledger):
    assert hinted(cli("show", "x", "-d", "sqlite:///my jobs.db")) == [f"headway jobs {OPTION}"]
    assert hinted(cli("item", "ads.2026", "x", "--database", "sqlite:///my jobs.db")) == [
        f"headway items ads.2026 {OPTION}"
    ]
    job = elsewhere.job("ads.2026")
    elsewhere.hold(job, {})
    (refused,) = hinted(cli("forget", "ads.2026", "--yes", "-d", "sqlite:///my jobs.db"))
    assert refused == f"headway show JOB {OPTION}"


def test_a_pause_says_how_to_go_on_there(cli: Cli, elsewhere: Ledger):
    elsewhere.hold(elsewhere.job("ads.2026"), {"mode": "process", "workers": 1})
    answer = cli("pause", "ads.2026", "-d", "sqlite:///my jobs.db")
    assert hinted(answer) == [f"headway resume ads.2026 {OPTION}"]
    assert cli("resume", "ads.2026", "-d", "sqlite:///my jobs.db").code == 0


def test_a_database_that_the_settings_name_is_found_by_itself(
    cli: Cli, elsewhere: Ledger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_DATABASE", "sqlite:///my jobs.db")
    assert hinted(cli("item", "ads.2026", "x")) == ["headway items ads.2026"]
    assert elsewhere.job("ads.2026").info().total == 2


def test_a_password_in_the_address_is_not_shown(cli: Cli):
    answer = cli("jobs", "-d", "postgresql://anna:secret-word@127.0.0.1:1/x")
    assert "secret-word" not in answer.err


COMMANDS = {
    "See: headway show a.b. It is freed.": "See: headway show a.b -d X. It is freed.",
    "headway stop a    Then again.": "headway stop a -d X    Then again.",
    "Remove it: headway states delete a; then": "Remove it: headway states delete a -d X; then",
    "(see headway relay --status)": "(see headway relay --status -d X)",
    "headway items a --after 7": "headway items a --after 7 -d X",
    "Start a job first (headway run ...), or": "Start a job first (headway run -d X ...), or",
    "headway runs a\nheadway jobs": "headway runs a -d X\nheadway jobs -d X",
}


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_ends_where_its_sentence_does(text: str):
    assert with_option(text, "-d X", lambda _: True) == COMMANDS[text]


@pytest.mark.parametrize(
    "text",
    [
        "Continue it:  headway run m:f -i x -d sqlite:///a.db",
        "Continue it:  headway run m:f -i x --database=sqlite:///a.db",
        "Continue it:  headway run -i x -- cat {}",  # everything after -- is the program's
        "See how it looks: headway demo --open",
        "pip install --upgrade headway-jobs and again",
    ],
)
def test_a_command_that_names_a_database_or_takes_none_stays_as_it_is(text: str):
    assert with_option(text, OPTION, headway.cli._takes_database) == text
