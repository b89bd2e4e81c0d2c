"""The glossary and the code say the same words."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import headway
from headway import retry
from headway.cli import COMMANDS

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")
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

#: Where one of them is still waiting for its replacement. Only ever gets shorter.
WAITING: dict[str, set[str]] = {
    "_bury": {"ledger/holding.py", "run/pool.py"},
    "_poke": {"run/pool.py"},
    "bell": {"states/sql.py"},
    "ring": {"states/sql.py"},
    "let_go": {"run/pool.py", "run/stock.py"},
    "renew_items": {"ledger/job.py", "run/plan.py"},
    "Books": {"ledger/books.py", "ledger/holding.py", "ledger/job.py", "ledger/records.py"},
    "Desk": {"watcher/executions.py", "watcher/notify.py", "watcher/registry.py"},
    "Talk": {"run/crew.py", "run/pool.py", "run/talk.py"},
    "_Lane": {"finishline/__init__.py"},
    "_pen": {"finishline/record.py"},
    "born": {"states/firestore.py", "states/firestore_values.py"},
    "Miss": {"ledger/values.py", "run/pool.py"},
    "Keeper": {"finishline/__init__.py", "finishline/keeper.py"},
    "keeper": {"finishline/__init__.py", "cli/finishline.py"},
    "Link": {"finishline/__init__.py", "finishline/keeper.py", "finishline/link.py"},
    "told": {
        "events/__init__.py", "finishline/__init__.py", "finishline/record.py", "states/firestore.py",
        "watcher/executions.py",
    },
    "standing": {"finishline/record.py", "states/live.py", "states/redis.py", "states/subscription.py"},
    "_meaning": {"_sql/sqlite.py", "finishline/link.py", "states/firestore.py"},
    "_explained": {"_sql/database.py", "_sql/postgresql.py", "_sql/sqlite.py"},
    "_translated": {
        "events/__init__.py", "states/firestore.py", "states/redis.py", "states/sql.py", "watcher/adapters.py",
    },
}  # fmt: skip


def words() -> list[str]:
    return [match["word"] for match in ROW.finditer(GLOSSARY)]


def test_the_glossary_is_one_table_with_one_row_per_word():
    assert len(words()) > 30
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


def test_the_glossary_names_no_verb_and_no_public_name_that_is_not_there():
    for verb in re.findall(r"`headway ([a-z]+)`", GLOSSARY):
        assert verb in COMMANDS
    for name in re.findall(r"\| `([A-Z]\w+)` \|", GLOSSARY):
        assert name in headway.__all__


def test_private_words_are_no_names_in_the_source():
    found: dict[str, set[str]] = {}
    source = ROOT / "src" / "headway"
    for path in source.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type == tokenize.NAME and token.string in REPLACED:
                found.setdefault(token.string, set()).add(path.relative_to(source).as_posix())
    new = {word: places - WAITING.get(word, set()) for word, places in found.items()}
    assert {word: places for word, places in new.items() if places} == {}, REPLACED


def test_the_page_of_policies_lists_every_named_retry_setting():
    named = {name for name, value in vars(retry).items() if isinstance(value, retry.RetryPolicy)}
    page = (ROOT / "docs" / "policies.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)) == named
    for name in named:
        policy = getattr(retry, name)
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {policy.retries} |" in row
