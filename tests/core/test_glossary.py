"""The glossary and the code say the same words."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import headway
from headway.cli import COMMANDS
from headway.core import retry

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8")
ROW = re.compile(r"^\| \*\*(?P<word>[^*]+)\*\* \| (?P<is>[^|]+) \| (?P<met>[^|]*) \|$", re.MULTILINE)

#: Private words, and the common one that is used for each. None of them is a name in the source.
REPLACED = {
    "_bury": "charge_lost, worker_ended",
    "_poke": "wake",
    "bell": "wake",
    "ring": "wake",
    "let_go": "release, drop",
    "take_leave": "release",
    "renew_items": "replace_items",
    "Books": "Recorder",
    "book": "meta",
    "Desk": "context",
    "Talk": "messages",
    "_Lane": "caller",
    "_pen": "lock",
    "born": "started, created",
    "Miss": "the outcomes of a failed attempt",
    "Fault": "Failure",
    "Keeper": "Checkpointer",
    "keeper": "checkpointer",
    "Link": "connection",
    "told": "delivered, reported",
    "standing": "current",
    "meaning": "translate",
    "_meaning": "translate",
    "_explained": "translate",
    "_translated": "translate",
}


def words() -> list[str]:
    return [match["word"] for match in ROW.finditer(GLOSSARY)]


def test_the_glossary_is_one_table_with_one_row_per_word():
    assert 20 <= len(words()) <= 25
    assert len(set(words())) == len(words())
    table = GLOSSARY[GLOSSARY.index("| word |") :].split("\n\n")[0]
    assert len(table.splitlines()) == len(words()) + 2
    assert len(re.findall(r"^\|---", GLOSSARY, re.MULTILINE)) == 1


def test_every_public_name_and_every_verb_is_in_the_glossary():
    met = " ".join(match["met"] for match in ROW.finditer(GLOSSARY))
    for name in headway.__all__:
        assert name == "__version__" or f"`{name}`" in met, name
    for verb in COMMANDS:
        assert f"`headway {verb}`" in met, verb


def test_every_verb_and_public_name_in_the_glossary_exists():
    for verb in re.findall(r"`headway ([a-z]+)`", GLOSSARY):
        assert verb in COMMANDS
    for name in re.findall(r"\| `([A-Z]\w+)` \|", GLOSSARY):
        assert name in headway.__all__


def test_no_name_in_the_source_is_a_private_word():
    found: dict[str, set[str]] = {}
    source = ROOT / "src" / "headway"
    for path in source.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type == tokenize.NAME and token.string in REPLACED:
                found.setdefault(token.string, set()).add(path.relative_to(source).as_posix())
    assert found == {}, REPLACED


def test_the_page_of_policies_lists_every_named_retry_setting():
    named = {name for name, value in vars(retry).items() if isinstance(value, retry.RetryPolicy)}
    page = (ROOT / "docs" / "explanation" / "guarantees.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)) == named
    for name in named:
        policy = getattr(retry, name)
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {policy.retries} |" in row
