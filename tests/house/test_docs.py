"""The documents of the house mention what exists, and list everything once."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from headway import _sql
from tools import docs

HOUSE = docs.house_pages()


@pytest.mark.parametrize("page", HOUSE, ids=lambda page: page.name)
def test_what_a_page_for_contributors_mentions_exists(page: Path):
    assert list(docs.broken_mentions(page)) == []
    assert list(docs.broken_links(page)) == []


def test_the_pages_for_contributors_are_there():
    names = {page.name for page in HOUSE}
    assert names >= {
        "CONTRIBUTING.md", "SECURITY.md", "architecture.md", "add-a-store.md", "add-a-verb.md", "add-a-migration.md",
    }  # fmt: skip


def test_the_diagram_shows_every_package_and_module():
    """What is not drawn is what nobody is told of."""
    drawn = (docs.ROOT / "docs" / "architecture.md").read_text("utf-8")
    packages = {path.parent.name for path in docs.SOURCE.glob("*/__init__.py")}
    modules = {path.stem for path in docs.SOURCE.glob("*.py")} - {"__init__", "__main__", "_version"}
    missing = {name for name in packages | modules if not re.search(rf"\bheadway\.{name}\b", drawn)}
    assert missing == set()


@pytest.mark.parametrize(
    "mention",
    [
        "src/headway/ledger/",
        "tests/conftest.py",
        "tests/mutants/",
        "headway.ledger",
        "headway.core.failure.describe",
        "headway.errors.HeadwayError",
        "headway.map",
        "make check",
        "make test",
        "CONTRIBUTING.md",
        "src/headway/_sql/migrations/*.sql",
        "an ordinary `word`",
    ],
)
def test_what_exists_may_be_mentioned(mention: str):
    assert docs.wrong_mention(mention) == ""


@pytest.mark.parametrize(
    "mention",
    [
        "src/headway/nowhere.py",
        "tests/conftest_of_old.py",
        "headway.nowhere",
        "headway.ledger.nowhere",
        "headway.core.failure.nowhere",
        "make coffee",
        "NOTHING.md",
    ],
)
def test_what_does_not_exist_is_told(mention: str):
    assert docs.wrong_mention(mention) != ""


def test_a_list_that_lacks_doubles_or_invents_something_is_told():
    told = list(docs.list_problems("the table", "internals/storage.md", ["a", "b", "b", "d"], {"a", "b", "c"}))
    assert told == [
        "docs/internals/storage.md lists the table b 2 times",
        "docs/internals/storage.md lacks the table c",
        "docs/internals/storage.md lists the table d, which there is not",
    ]


def test_every_table_metric_key_decision_exit_code_and_event_is_listed_once():
    assert list(docs.list_of_everything()) == []
    assert len(docs.tables()) > 15
    assert len(docs.measured()) > 20


def test_hooks_before_a_commit_are_local_and_need_no_network():
    text = (docs.ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert re.findall(r"repo: (.+)", text) == ["local"]
    assert "://" not in text


def documented_columns() -> set[tuple[str, str]]:
    found, table = set(), ""
    for line in (docs.ROOT / "docs" / "reference" / "schema.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            table = line.removeprefix("## ")
        elif column := re.match(r"\| `(\w+)` \|", line):
            found.add((table, column[1]))
    return found


@pytest.mark.req("S3-55")
def test_the_schema_page_lists_every_column_of_a_sqlite_database(tmp_path: Path):
    path = tmp_path / "new.db"
    _sql.connect(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as connection:
        columns = connection.execute(
            "SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c "
            "WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"
        ).fetchall()
    assert documented_columns() == set(columns)


@pytest.mark.req("S3-55")
def test_the_schema_page_lists_every_column_of_a_postgresql_database(postgres_with_tables: str):
    with psycopg.connect(postgres_with_tables) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'headway'"
        ).fetchall()
    only_here = {("transactions", column) for table, column in columns if table == "transactions"}
    assert documented_columns() == set(columns) - only_here
