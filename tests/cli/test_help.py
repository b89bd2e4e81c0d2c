"""The help: grouped, with an example for every verb, and the same in the reference."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from headway.cli import COMMANDS, EXAMPLES, SECTIONS, headway
from headway.cli.reference import pages
from headway.config import OPTIONS
from tests.cli.conftest import Answer, every_command

Cli = Callable[..., Answer]
DOCS = Path(__file__).parents[2] / "docs"


def test_the_verbs_are_grouped_by_section(cli: Cli):
    assert list(SECTIONS) == [
        "Run and look", "Control a run", "Repair", "Projects", "States", "Queue", "Watch and serve", "Maintenance",
    ]  # fmt: skip
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(COMMANDS)
    text = cli("--help").out
    assert [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        "Options", *SECTIONS,
    ]  # fmt: skip
    for name in COMMANDS:
        assert f"\n  {name} " in text


def test_a_verb_without_a_section_is_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SECTIONS, "Repair", ("dead",))
    assert "\nOthers:\n  retry " in cli("--help").out


@pytest.mark.parametrize("path", every_command())
def test_the_help_of_every_verb_ends_with_an_example_that_can_be_typed(cli: Cli, path: str):
    lines = cli(*path.split(), "--help").out.splitlines()
    assert lines[-2:] == ["  Example:", f"    {EXAMPLES[path]}"]
    words = shlex.split(EXAMPLES[path].partition(" | ")[0].partition(" > ")[0])
    assert words[0] == "headway"
    assert " ".join(words[1:]).startswith(path)
    with headway.make_context("headway", words[1:]) as context:
        _parse(headway, context, words[1:])


def _parse(group: click.Group, context: click.Context, words: list[str]) -> None:
    name, command, rest = group.resolve_command(context, words)
    assert command is not None
    with command.make_context(name, rest, parent=context) as inner:
        if isinstance(command, click.Group) and rest:
            _parse(command, inner, rest)


def test_every_example_belongs_to_a_verb():
    assert set(EXAMPLES) == set(every_command())


def test_the_reference_is_up_to_date():
    assert (DOCS / "reference" / "cli.md").read_text("utf-8") == "\n".join(pages())


def test_the_reference_lists_every_setting_with_its_names_and_its_default():
    text = "\n".join(pages())
    for option in OPTIONS:
        assert f"| `{option.name}` |" in text
        assert option.variable is None or f"`{option.variable}`" in text


def test_one_option_means_the_same_on_every_verb():
    """--yes, --json, --database, --limit have one help text and one short form everywhere."""
    for name in ("--yes", "--json", "--cause", "--watch"):
        found = {
            (tuple(parameter.opts), parameter.is_flag)
            for command in every_command().values()
            for parameter in command.params
            if isinstance(parameter, click.Option) and name in parameter.opts
        }
        assert len(found) == 1, name


def test_a_misspelt_option_is_answered_with_the_nearest_one_alone(cli: Cli):
    said = cli("run", "--worker", "3", "--items", "x").err
    assert "'--workers'" in said
    assert "--key" not in said


def test_every_verb_that_uses_a_database_takes_it_by_its_short_name(cli: Cli):
    assert "-d, --database" in cli("worker", "--help").out
    refused = cli("worker", "-d", "sqlite:///a.db", "--app", "shop:queue")
    assert (refused.code, "shop:queue names the database" in refused.err) == (2, True)
