"""The watcher's record in SQL: tables ``watched``, ``followed`` and ``watchers``. SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from headway._sql import Database, Tx, marks
from headway.watcher.store.contract import Follow, Registry, Seen, batches, stored_name


class SqlProcessedStore:
    """A `ProcessedStore` in a database."""

    def __init__(self, database: Database, queue: str) -> None:
        self._database = database
        self._queue = queue

    def baseline(self, now: float) -> float:
        def work(tx: Tx) -> float:
            tx.execute("INSERT INTO watchers VALUES (?, ?) ON CONFLICT DO NOTHING", (self._queue, now))
            return _first(tx.one("SELECT baseline FROM watchers WHERE queue = ?", (self._queue,)))

        return self._database.run(work, operation="watcher.baseline")

    def look(self, registry: Registry, members: Sequence[str]) -> dict[str, Seen]:
        found: dict[str, Seen] = {}
        for batch in batches(members):
            names = {stored_name(member): member for member in batch}
            for name, score, seen, at in self._database.all(
                "SELECT member, score, seen, at FROM watched WHERE queue = ? AND registry = ? "
                f"AND member IN ({marks(len(names))})",
                (self._queue, registry, *names),
            ):
                found[names[name]] = Seen(names[name], float(score), str(seen), float(at))
        return found

    def newest(self, registry: Registry) -> float:
        query = "SELECT coalesce(max(at), 0) FROM watched WHERE queue = ? AND registry = ?"
        return _first(self._database.one(query, (self._queue, registry)))

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        def work(tx: Tx) -> None:
            tx.executemany(
                "INSERT INTO watched VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (queue, registry, member) "
                "DO UPDATE SET score = excluded.score, seen = excluded.seen, at = excluded.at, found = excluded.found",
                [
                    (self._queue, registry, stored_name(row.member), row.score, stored_name(row.seen), row.at, row.at)
                    for row in rows
                ],
            )
            tx.executemany(
                "DELETE FROM followed WHERE queue = ? AND member = ?",
                [(self._queue, stored_name(member)) for member in unfollow],
            )
            tx.executemany(
                "INSERT INTO followed (queue, member, kind, event, since) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (queue, member) "
                "DO UPDATE SET kind = excluded.kind, event = excluded.event, since = excluded.since",
                [(self._queue, stored_name(one.member), one.kind, one.event, one.since) for one in follow],
            )

        self._database.run(work, operation="watcher.mark")

    def follows(self) -> list[Follow]:
        query = "SELECT member, kind, event, since FROM followed WHERE queue = ? ORDER BY member"
        return [
            Follow(str(member), str(kind), str(event), float(since))
            for member, kind, event, since in self._database.all(query, (self._queue,))
        ]

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        self._each("UPDATE watched SET found = ?", (now,), registry, members, operation="watcher.found")

    def stale(self, registry: Registry, before: float, count: int) -> list[str]:
        query = (
            "SELECT member FROM watched WHERE queue = ? AND registry = ? AND found < ? ORDER BY found, member LIMIT ?"
        )
        return [str(member) for (member,) in self._database.all(query, (self._queue, registry, before, count))]

    def forget(self, registry: Registry, members: Sequence[str]) -> None:
        self._each("DELETE FROM watched", (), registry, members, operation="watcher.forget")

    def _each(
        self, change: str, values: tuple[float, ...], registry: Registry, members: Sequence[str], *, operation: str
    ) -> None:
        """Apply a change to the rows of the members, in one transaction."""

        def work(tx: Tx) -> None:
            for batch in batches(members):
                tx.execute(
                    f"{change} WHERE queue = ? AND registry = ? AND member IN ({marks(len(batch))})",
                    (*values, self._queue, registry, *map(stored_name, batch)),
                )

        if members:
            self._database.run(work, operation=operation)


def _first(row: Sequence[float] | None) -> float:
    assert row is not None, "an aggregate returns a row, and so does a row that was just written"
    return float(row[0])
