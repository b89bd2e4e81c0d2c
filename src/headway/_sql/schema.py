"""The schema: numbered ``migrations/NNNN_name.sql``, applied in order."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from pathlib import Path

from headway._sql.tx import Engine
from headway.errors import StoreNewer


@lru_cache(maxsize=2)
def migrations(engine: Engine) -> list[tuple[int, list[str]]]:
    """(version, statements) of every ``migrations/NNNN_name.sql``, in order, for one engine.

    A line that ends in ``-- sqlite`` or ``-- postgresql`` is for that engine alone; no other difference exists.
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


def refuse_newer(name: str, found: int, steps: list[tuple[int, list[str]]]) -> None:
    if found > len(steps):
        raise StoreNewer(f"{name} has schema {found}; this headway knows up to {len(steps)}.")
