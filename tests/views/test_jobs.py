"""Jobs by id: what a mistyped id costs, and what is suggested for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from headway._sql import Database, connect
from headway.errors import NotFound
from headway.ledger import Ledger
from headway.views.jobs.listing import SUGGESTIONS, find_job


@pytest.fixture(params=["file", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    on_file = request.param == "file"
    url = f"sqlite:///{tmp_path}/jobs.db" if on_file else str(request.getfixturevalue("postgres_url"))
    with connect(url) as opened:
        yield opened


def with_jobs(database: Database, ids: Iterable[str]) -> Ledger:
    """Jobs of these ids, by one statement: every other column is that of a job made by the ledger."""
    ledger = Ledger(database)
    made = ledger.create("pattern").no
    names = [name for name in columns(database) if name not in ("no", "id")]
    rest = ", ".join(names)
    database.run(
        lambda tx: tx.executemany(
            f"INSERT INTO jobs (no, id, {rest}) SELECT ?, ?, {rest} FROM jobs WHERE no = ?",
            [(made + place, id, made) for place, id in enumerate(ids, 1)],
        )
    )
    return ledger


def columns(database: Database) -> list[str]:
    if database.engine == "sqlite":
        return [str(row[1]) for row in database.all("PRAGMA table_info(jobs)")]
    return [
        str(row[0])
        for row in database.all(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'jobs' AND table_schema = current_schema()"
        )
    ]


def test_a_mistyped_id_is_compared_with_few_of_many_jobs(database: Database, monkeypatch: pytest.MonkeyPatch):
    ledger = with_jobs(database, [*(f"import-{number:05}" for number in range(5_000)), "nightly-report"])
    compared: list[int] = []
    match = difflib.get_close_matches

    def counted(word: str, possibilities: list[str], n: int) -> list[str]:
        compared.append(len(possibilities))
        return match(word, possibilities, n)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    for typed, meant in (
        ("import-02500x", "import-02500"),
        ("import_02500", "import-0"),
        ("inghtly-report", "nightly-report"),
    ):
        with pytest.raises(NotFound) as raised:
            find_job(ledger, typed)
        assert f"Did you mean {meant}" in raised.value.hint
    with pytest.raises(NotFound) as raised:
        find_job(ledger, "Zz")
    assert "Did you mean" not in raised.value.hint
    assert len(compared) == 4
    assert max(compared) <= 3 * SUGGESTIONS
