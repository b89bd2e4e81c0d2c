"""Write docs/reference/schema.md: every table and column of a new database, with the comments of the migrations.

    python tools/schema.py > docs/reference/schema.md

`make docs` fails when the page differs from what this prints.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from headway import _sql

MIGRATIONS = Path(_sql.__file__).parent / "migrations"
HEAD = """# Schema

Every table and column of a Headway database. `tools/schema.py` writes this page from a new SQLite file; the column names are
the same on PostgreSQL, in the schema `headway`. What the tables are for: [storage.md](../internals/storage.md).
"""
_TABLE = re.compile(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+) \((.*?)^\)", re.MULTILINE | re.DOTALL)
_ADDED = re.compile(r"ALTER TABLE (\w+) ADD COLUMN (\w+)[^;\n]*;[ ]*-- (?!sqlite|postgresql)(.+)")
_COLUMN = re.compile(r"^\s+([a-z_]+)\s+[A-Z].*?--\s*(?!sqlite\s*$|postgresql\s*$)(\S.*)$", re.MULTILINE)


def meanings() -> dict[tuple[str, str], str]:
    """Return the comment of each column, from the migrations."""
    found = {}
    for path in sorted(MIGRATIONS.glob("*.sql")):
        text = path.read_text("utf-8")
        for table in _TABLE.finditer(text):
            for column in _COLUMN.finditer(table[2]):
                found[table[1], column[1]] = column[2].strip()
        for added in _ADDED.finditer(text):
            found[added[1], added[2]] = added[3].strip()
    return found


def page() -> str:
    """Return the page as Markdown."""
    comments, lines = meanings(), [HEAD]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "headway.db")
        _sql.connect(f"sqlite:///{path}").close()
        with closing(sqlite3.connect(path)) as connection:
            tables = connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            )
            for (table,) in sorted(tables):
                lines += [f"## {table}", "", "| column | type | meaning |", "|---|---|---|"]
                for _, name, kind, required, default, key in connection.execute(f"PRAGMA table_info({table})"):
                    facts = [kind.lower(), "primary key" if key else "not null" if required else ""]
                    facts += [f"default {default}"] if default is not None else []
                    words = ", ".join(filter(None, facts))
                    lines.append(f"| `{name}` | {words} | {comments.get((table, name), '')} |".replace("|  |", "| |"))
                indexes = connection.execute(
                    "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL",
                    (table,),
                )
                lines.append("")
                if statements := [f"{' '.join(statement.split())};" for _, statement in sorted(indexes)]:
                    lines += ["```sql", *statements, "```", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
