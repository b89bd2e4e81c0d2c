"""An open transaction, and what statements are made of.

Statements are written once, with ``?`` for parameters and in the dialect both engines share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, Protocol

Engine = Literal["sqlite", "postgresql"]
Value = str | int | float | bytes | None
Row = tuple[Any, ...]  # a column's type is said where it is read

#: Rows that `Tx.insert` puts into one statement; more bring nothing.
ROWS_TOGETHER = 50

#: The database's own clock, seconds since 1970, as an expression of each engine.
NOW: dict[Engine, str] = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
}


class Cursor(Protocol):
    """What we use of a DB-API cursor; both drivers have it."""

    @property
    def rowcount(self) -> int: ...
    @property
    def description(self) -> Any: ...
    def fetchone(self) -> Row | None: ...
    def fetchall(self) -> list[Row]: ...
    def __iter__(self) -> Iterator[Row]: ...


class Tx:
    """An open transaction."""

    __slots__ = ("_execute", "_executemany", "engine")

    def __init__(
        self,
        engine: Engine,
        execute: Callable[[str, Sequence[Value]], Cursor],
        executemany: Callable[[str, Iterable[Sequence[Value]]], Cursor],
    ) -> None:
        self.engine = engine
        self._execute = execute
        self._executemany = executemany

    @property
    def for_update(self) -> str:
        """`` FOR UPDATE`` on PostgreSQL; empty on SQLite, where a transaction that writes locks the whole database."""
        return " FOR UPDATE" if self.engine == "postgresql" else ""

    @property
    def clock(self) -> str:
        """The database's clock as an SQL expression, seconds since 1970."""
        return NOW[self.engine]

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> int:
        """Run one statement; how many rows it touched."""
        return self._execute(sql, parameters).rowcount

    def executemany(self, sql: str, rows: Iterable[Sequence[Value]]) -> int:
        """Run one statement for every row; how many rows were touched in all."""
        return self._executemany(sql, rows).rowcount

    def insert(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """Run an INSERT, written for one row, for all of them; how many rows were touched in all.

        Many rows share a statement: on SQLite every statement that a constraint may abort first saves the pages it is
        going to change, which costs more than the row itself.
        """
        many, count, together = _for_many(sql), 0, len(rows) - len(rows) % ROWS_TOGETHER
        for start in range(0, together, ROWS_TOGETHER):
            values = list(chain.from_iterable(rows[start : start + ROWS_TOGETHER]))
            count += self._execute(many, values).rowcount
        if together == len(rows) - 1:
            count += self._execute(sql, rows[-1]).rowcount  # psycopg takes twice as long for many, though they are one
        elif together < len(rows):
            count += self._executemany(sql, rows[together:]).rowcount
        return count

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        return self._execute(sql, parameters).fetchone()

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        return self._execute(sql, parameters).fetchall()

    def returned(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run one statement; the rows it returns, none if it is not one that returns any."""
        cursor = self._execute(sql, parameters)
        # For its description psycopg makes an object of every column, which takes longer than a few rows do.
        returns: Any = getattr(cursor, "rownumber", None) if self.engine == "postgresql" else cursor.description
        return cursor.fetchall() if returns is not None else []

    def now(self) -> float:
        """The database's own time, seconds since 1970. Leases are measured by it, never by a client's clock."""
        row = self.one(f"SELECT {NOW[self.engine]}")
        assert row is not None
        return float(row[0])


@lru_cache(maxsize=64)
def _for_many(sql: str) -> str:
    """``INSERT … VALUES (?, ?) …`` with its row repeated."""
    head, row, tail = re.split(r"(?<=VALUES )(\([^)]*\))", sql, maxsplit=1)
    return head + ", ".join([row] * ROWS_TOGETHER) + tail


def marks(count: int) -> str:
    """``?,?,?`` for an IN list. For none of them ``NULL``: to neither engine that is a syntax error, and no value is in
    it. (Nor is one *not* in it: ``NOT IN`` an empty list must be left out by its caller.)"""
    return ",".join("?" * count) or "NULL"


def listed(engine: Engine, values: Sequence[str] | Sequence[int], kind: str = "text") -> tuple[str, str]:
    """For ``column IN (…)``, a query and its one parameter: of those an engine takes some ten thousand at the most. ``kind``:
    the column's, of PostgreSQL."""
    if engine == "sqlite":
        return "SELECT value FROM json_each(?)", json.dumps(values)
    return f"SELECT unnest(CAST(? AS {kind}[]))", array(values)


def array(values: Sequence[str | float | None]) -> str:
    """An array as PostgreSQL reads it from a text: ``CAST(? AS bigint[])``, ``unnest(CAST(? AS text[]))``. A column of a
    batch as one parameter costs the server a fraction of what the same rows cost as JSON."""
    kinds = set(map(type, values))
    # Most columns are of one kind, and then the interpreter's own loop writes them. A subclass is another kind.
    if kinds <= {int} or kinds <= {float}:
        return "{" + ",".join(map(repr, values)) + "}"
    if kinds == {type(None)}:
        return "{" + ",".join(["NULL"] * len(values)) + "}"
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: str | float | None) -> str:
    if value is None:
        return "NULL"
    # By value: a subclass may write itself in another way (an IntEnum does).
    if isinstance(value, str):
        return '"' + str.replace(value, "\\", "\\\\").replace('"', '\\"') + '"'
    return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)


#: Words that change something. ``FOR UPDATE`` is none of them: it asks for a lock that outlives no single statement.
_CHANGES = re.compile(
    r"\b(INSERT|(?<!FOR )(?<!FOR NO KEY )UPDATE|DELETE|MERGE|CREATE|ALTER|DROP|TRUNCATE|NOTIFY)\b|pg_notify",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"|--[^\n]*")


@lru_cache(maxsize=512)
def check_query(sql: str) -> None:
    """Refuse a statement that writes where only reading is repeated safely. For the programmer who mixes them up."""
    if found := _CHANGES.search(_TEXT.sub("", sql)):
        raise ValueError(f"{found[0]} writes: use Database.write or Database.run, not one() or all().")
