"""The schema: numbered ``migrations/NNNN_name.sql``, applied in order."""

from __future__ import annotations

import re
import sqlite3
from functools import lru_cache
from pathlib import Path

from headway._sql.tx import Engine
from headway.errors import StoreNewer

#: (version, statements)
Steps = list[tuple[int, list[str]]]


@lru_cache(maxsize=2)
def migrations(engine: Engine) -> Steps:
    """Return (version, statements) of every ``migrations/NNNN_name.sql``, in order, for one engine.

    A line that ends in ``-- sqlite`` or ``-- postgresql`` is for that engine only.
    """
    other = "postgresql" if engine == "sqlite" else "sqlite"
    steps = []
    folder = Path(__file__).with_name("migrations")
    files = sorted(entry.name for entry in folder.iterdir())
    for version, name in enumerate((name for name in files if name.endswith(".sql")), start=1):
        assert int(name[:4]) == version, f"{name}: migrations are numbered without gaps"
        text = folder.joinpath(name).read_text("utf-8")
        lines = (line for line in text.splitlines() if not line.rstrip().endswith(f"-- {other}"))
        statement, statements = "", []
        for line in lines:
            code = line.split("--")[0].rstrip()
            if code:
                statement += code + "\n"
            if sqlite3.complete_statement(statement):
                statements.append(statement)
                statement = ""
        steps.append((version, statements))
    return steps


_INDEX = re.compile(r"CREATE INDEX (\w+) ON (\w+)")


def index_name(statement: str) -> str:
    """Return the name of the index that a CREATE INDEX statement builds."""
    found = _INDEX.match(statement)
    assert found is not None
    return found[1]


def without_index_builds(steps: Steps) -> tuple[Steps, list[str]]:
    """Separate the index builds on existing tables from ``steps``, because they block writers.

    Unique indexes stay, because later steps may rely on them. An index that a later step drops is not built at all.
    """
    made = {
        found[1] for _, statements in steps for text in statements if (found := re.match(r"CREATE TABLE (\w+)", text))
    }
    later: dict[str, str] = {}
    kept: Steps = []
    for version, statements in steps:
        here = []
        for text in statements:
            found = _INDEX.match(text)
            if found and found[2] not in made:
                later[found[1]] = text
            elif (dropped := re.match(r"DROP INDEX (\w+)", text)) and dropped[1] in later:
                del later[dropped[1]]
            else:
                here.append(text)
        kept.append((version, here))
    return kept, list(later.values())


def refuse_newer(name: str, found: int, steps: Steps) -> None:
    """Raise `StoreNewer` if a newer release has migrated the database."""
    if found > len(steps):
        raise StoreNewer(f"{name} has schema {found}; this release supports up to {len(steps)}.")
