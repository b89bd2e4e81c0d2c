"""An open transaction, and the parts of statements that depend on the engine.

Statements use ``?`` for parameters and the dialect that both engines share.
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
Row = tuple[Any, ...]  # the reader of a column knows its type

#: Rows per statement of `Tx.insert`. More are not faster.
ROWS_TOGETHER = 50

#: The database's own clock, seconds since 1970, as an expression of each engine.
NOW: dict[Engine, str] = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
}


class Cursor(Protocol):
    """The part of a DB-API cursor that we use."""

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
    def skip_locked(self) -> str:
        """`for_update` that passes over rows which another transaction has locked."""
        return " FOR UPDATE SKIP LOCKED" if self.engine == "postgresql" else ""

    @property
    def clock(self) -> str:
        """The database's clock as an SQL expression, seconds since 1970."""
        return NOW[self.engine]

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> int:
        """Run one statement. Return the number of rows it changed."""
        return self._execute(sql, parameters).rowcount

    def executemany(self, sql: str, rows: Iterable[Sequence[Value]]) -> int:
        """Run one statement for every row of parameters. Return the number of rows changed in all."""
        return self._executemany(sql, rows).rowcount

    def insert(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """Run an INSERT that is written for one row for all ``rows``. Return the number of rows changed.

        Many rows share a statement: SQLite saves the pages that a statement is going to change if a constraint may abort
        it, which costs more than the row itself.
        """
        many, count, together = _for_many(sql), 0, len(rows) - len(rows) % ROWS_TOGETHER
        for start in range(0, together, ROWS_TOGETHER):
            values = list(chain.from_iterable(rows[start : start + ROWS_TOGETHER]))
            count += self._execute(many, values).rowcount
        if together == len(rows) - 1:
            count += self._execute(sql, rows[-1]).rowcount  # executemany of one row takes psycopg twice as long
        elif together < len(rows):
            count += self._executemany(sql, rows[together:]).rowcount
        return count

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        """Run a query. Return its first row, or None."""
        return self._execute(sql, parameters).fetchone()

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run a query. Return its rows."""
        return self._execute(sql, parameters).fetchall()

    def returned(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run one statement. Return its rows, or an empty list if it returns none."""
        cursor = self._execute(sql, parameters)
        # psycopg builds the description from one object per column, which takes longer than a few rows do.
        returns: Any = getattr(cursor, "rownumber", None) if self.engine == "postgresql" else cursor.description
        return cursor.fetchall() if returns is not None else []

    def now(self) -> float:
        """Return the database's time, seconds since 1970. Leases are measured by it, never by a client's clock."""
        row = self.one(f"SELECT {NOW[self.engine]}")
        assert row is not None
        return float(row[0])


@lru_cache(maxsize=64)
def _for_many(sql: str) -> str:
    """Return ``INSERT … VALUES (?, ?) …`` with its row repeated."""
    head, row, tail = re.split(r"(?<=VALUES )(\([^)]*\))", sql, maxsplit=1)
    return head + ", ".join([row] * ROWS_TOGETHER) + tail


def marks(count: int) -> str:
    """Return ``?,?,?`` for an IN list, or ``NULL`` for an empty one, which no value is in.

    No value is *not* in it either: the caller must omit a ``NOT IN`` with an empty list.
    """
    return ",".join("?" * count) or "NULL"


def listed(engine: Engine, values: Sequence[str] | Sequence[int], kind: str = "text") -> tuple[str, str]:
    """Return a subquery for ``column IN (…)`` and its one parameter. An engine accepts only some ten thousand parameters.

    ``kind`` is the column's type in PostgreSQL.
    """
    if engine == "sqlite":
        return "SELECT value FROM json_each(?)", json.dumps(values)
    return f"SELECT unnest(CAST(? AS {kind}[]))", array(values)


def array(values: Sequence[str | float | None]) -> str:
    """Encode an array as PostgreSQL parses it from text: ``CAST(? AS bigint[])``, ``unnest(CAST(? AS text[]))``.

    A batch's column as one array costs the server a fraction of the same rows as JSON.
    """
    kinds = set(map(type, values))
    # Most columns have one type, and map() formats them quickly. A subclass is another type.
    if kinds <= {int} or kinds <= {float}:
        return "{" + ",".join(map(repr, values)) + "}"
    if kinds == {type(None)}:
        return "{" + ",".join(["NULL"] * len(values)) + "}"
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: str | float | None) -> str:
    if value is None:
        return "NULL"
    # A subclass may have another repr (an IntEnum does).
    if isinstance(value, str):
        return '"' + str.replace(value, "\\", "\\\\").replace('"', '\\"') + '"'
    return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)


#: Keywords of statements that write. ``FOR UPDATE`` only locks, and not beyond its statement.
_CHANGES = re.compile(
    r"\b(INSERT|(?<!FOR )(?<!FOR NO KEY )UPDATE|DELETE|MERGE|CREATE|ALTER|DROP|TRUNCATE|NOTIFY)\b|pg_notify",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"|--[^\n]*")


@lru_cache(maxsize=512)
def check_query(sql: str) -> None:
    """Raise `ValueError` for a statement that writes. `Database.one` and `all` may execute a statement twice."""
    if found := _CHANGES.search(_TEXT.sub("", sql)):
        raise ValueError(f"{found[0]} writes: use Database.write or Database.run, not one() or all().")
