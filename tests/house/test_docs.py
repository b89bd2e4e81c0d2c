"""The documents of the house mention what exists, and list everything once."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from headway import _sql
from tools import diagrams, docs

HOUSE = docs.house_pages()


@pytest.mark.parametrize("page", HOUSE, ids=lambda page: page.name)
def test_everything_a_page_for_contributors_mentions_exists(page: Path):
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
def test_an_existing_thing_may_be_mentioned(mention: str):
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
def test_a_mention_of_a_missing_thing_is_reported(mention: str):
    assert docs.wrong_mention(mention) != ""


def test_missing_repeated_and_unknown_entries_of_a_list_are_reported():
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


#: A page that no test names, and blocks of it with what is wrong with them.
PAGE = docs.ROOT / "docs" / "no-such-page.md"
WRONG_BLOCKS = {
    ("python", "print(1)"): "nothing runs",
    ("sh", "true"): "nothing runs",
    ("", "make"): "nothing runs",
    ("python tests/house/test_bench.py", "print(1)"): "nothing runs",
    ("python run oracle", "print(1)"): "nothing runs",
    ("python run", "raise SystemExit('broken')"): "broken",
    ("sh run", "false; true"): "exit 1",
    ("json", "{"): "not valid json",
    ("toml", "a ="): "not valid toml",
    ("yaml", "a: ["): "not valid yaml",
    ("console", "$ headway coffee"): "not valid console",
    ("console", "$ headway jobs --milk"): "not valid console",
}


@pytest.mark.parametrize(("info", "code"), WRONG_BLOCKS, ids=lambda value: value.replace("tests/", ""))
def test_a_block_that_fails_or_that_nothing_runs_is_reported(info: str, code: str):
    assert WRONG_BLOCKS[info, code] in docs.wrong_block(PAGE, info, code + "\n")


@pytest.mark.parametrize(
    ("info", "code"),
    [
        ("python run", "import headway"),
        ("sh run", "headway --version"),
        ("console", "$ headway states nightly | head\nJob nightly"),
        ("console", "$ HEADWAY_TOKEN=... headway jobs"),
        ("json", "[1]"),
        ("text", "anything"),
    ],
)
def test_a_block_that_works_is_not_reported(info: str, code: str):
    assert docs.wrong_block(PAGE, info, code + "\n") == ""


def test_an_example_with_servers_gets_their_addresses(postgres_programs: Path, redis_program: Path):
    code = "import psycopg, redis\nassert redis.Redis.from_url('redis://localhost:6379/0').ping()\n"
    code += "psycopg.connect('postgresql://localhost/headway').close()\n"
    assert docs.wrong_block(PAGE, "python run postgres redis", code) == ""


def test_a_link_to_a_missing_file_or_heading_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Of `a.b` and *c*\n[x](#of-ab-and-c) [y](#nowhere) [z](page.md#of-ab-and-c) [gone](gone.md)\n")
    assert list(docs.broken_links(page)) == ["page.md: no such heading: #nowhere", "page.md: no such file: gone.md"]


def test_long_paragraphs_and_sentences_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n" + "A short sentence. " * 29 + "\n\n```text\n" + "word " * 200 + "\n```\n")
    assert list(docs.heavy_prose(page)) == []
    page.write_text("# Title\n\n" + "A short sentence. " * 31)
    assert "over 90 words" in next(docs.heavy_prose(page))
    page.write_text(("word " * 31 + ".\n\n") * 2)
    assert "over 30 words" in next(docs.heavy_prose(page))


def test_the_prose_of_every_page_is_light_and_its_links_lead_somewhere():
    problems = [problem for page in docs.written_pages() for problem in docs.heavy_prose(page)]
    problems += [problem for page in docs.pages() for problem in docs.broken_links(page)]
    assert problems == []
    assert docs.words() <= docs.MAX_WORDS


def test_every_diagram_has_a_text_alternative_and_colours_for_the_dark():
    for name, picture in diagrams.DRAWN.items():
        drawn = diagrams.draw(picture)
        assert f'<title id="title">{picture.title}</title>' in drawn, name
        assert "<desc" in drawn
        assert "prefers-color-scheme: dark" in drawn
        shown = [
            line for page in docs.pages() for line in page.read_text("utf-8").splitlines() if f"{name}.svg" in line
        ]
        assert shown, name
        assert all(re.search(r"!\[[^\]]{20,}\]", line) for line in shown)


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
