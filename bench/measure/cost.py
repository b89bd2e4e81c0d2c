"""What a stretch of work cost PostgreSQL, Redis and the processes that did it, by the counts that the servers and the
kernel keep. Such counts carry over to another machine and to a loaded one; rates do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psycopg
from redis import Redis

#: Settings that the server needs for the counts.
COUNTING = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "top",
    "max_connections": "400",
}
#: The question is the meter's own: its statements are told from the others by its user.
USER = "meter"

#: Every transaction that writes begins with this one, in the round trip of its BEGIN.
_REMEMBER = "UPDATE headway.transactions SET no%"
#: One for every group of items recorded together, and one for every claim (or look at the job) under its row.
_GROUP = "UPDATE blocks SET done = done + %"
_LOCK = "%FROM jobs WHERE no = %FOR UPDATE"


@dataclass(frozen=True, slots=True)
class Cost:
    """Counts since the servers started; the difference of two is the cost of what lies between."""

    statements: float
    round_trips: float
    transactions: float
    #: Times that items were recorded under a block, and times that the job's row was locked.
    groups: float
    locks: float
    wal_bytes: float
    wal_page_images: float
    server_cpu: float
    worker_cpu: float
    redis_commands: float

    def __sub__(self, before: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(Cost)))

    def per(self, count: float) -> dict[str, float]:
        return {name: value / count for name, value in asdict(self).items()}


class Meter:
    """Reads the counts of one database, one Redis and two trees of processes."""

    def __init__(self, url: str, redis: str, server: int) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements SCHEMA public")
            if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (USER,)).fetchone() is None:
                connection.execute(f"CREATE ROLE {USER} LOGIN SUPERUSER".encode())
        self._connection = psycopg.connect(url, user=USER, autocommit=True)
        self._redis = Redis.from_url(redis)
        self._server = server
        self.worker: int | None = None
        self.most_connections = 0

    def close(self) -> None:
        self._connection.close()
        self._redis.close()

    def ask(self, question: str, *parameters: object) -> Any:
        row = self._connection.execute(question.encode(), parameters).fetchone()
        return None if row is None else row[0] if len(row) == 1 else row

    def connections(self) -> int:
        """Those of this database but ours; the most that was ever seen is remembered."""
        found = int(
            self.ask("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename <> %s", USER)
        )
        self.most_connections = max(self.most_connections, found)
        return found

    def read(self) -> Cost:
        calls, begins, groups, locks = self.ask(
            "SELECT coalesce(sum(calls), 0), coalesce(sum(calls) FILTER (WHERE query LIKE %s), 0), "
            "coalesce(sum(calls) FILTER (WHERE query LIKE %s), 0), coalesce(sum(calls) FILTER (WHERE query LIKE %s), 0) "
            "FROM pg_stat_statements s JOIN pg_roles r ON r.oid = s.userid JOIN pg_database d ON d.oid = s.dbid "
            "WHERE r.rolname <> %s AND d.datname = current_database()",
            _REMEMBER, _GROUP, _LOCK, USER,
        )  # fmt: skip
        wal, images = self.ask("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn, (SELECT wal_fpi FROM pg_stat_wal)")
        committed = self.ask(
            "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements s JOIN pg_roles r ON r.oid = s.userid "
            "JOIN pg_database d ON d.oid = s.dbid WHERE query = 'COMMIT' AND rolname <> %s AND datname = current_database()",
            USER,
        )
        commands = int(self._redis.info("stats")["total_commands_processed"])
        return Cost(
            float(calls), float(calls - begins), float(committed), float(groups), float(locks), float(wal),
            float(images), cpu(self._server), cpu(self.worker) if self.worker else 0.0, float(commands),
        )  # fmt: skip

    def statements(self, most: int = 40) -> list[tuple[str, int, float, float]]:
        """(statement, calls, milliseconds each, WAL bytes each), those first that took longest together."""
        rows = self._connection.execute(
            "SELECT query, calls, mean_exec_time, wal_bytes / calls FROM pg_stat_statements s "
            "JOIN pg_roles r ON r.oid = s.userid JOIN pg_database d ON d.oid = s.dbid "
            "WHERE r.rolname <> %s AND d.datname = current_database() ORDER BY total_exec_time DESC LIMIT %s",
            (USER, most),
        ).fetchall()
        return [(" ".join(query.split()), calls, each, float(wal)) for query, calls, each, wal in rows]

    def bytes_on_disk(self, tables: Sequence[str]) -> dict[str, int]:
        return {table: int(self.ask("SELECT pg_total_relation_size(%s)", f"headway.{table}")) for table in tables}


def cpu(root: int) -> float:
    """Seconds of processor time of a process and of all below it, ended ones included if somebody waited for them."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        pid = int(path.parent.name)
        children.setdefault(int(words[1]), []).append(pid)
        used[pid] = sum(int(word) for word in words[11:15])
    total, found = 0, [root]
    while found:
        pid = found.pop()
        total += used.get(pid, 0)
        found += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")
