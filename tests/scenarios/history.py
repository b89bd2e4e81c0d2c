"""Checks of a whole history, read from the tables and from Redis by plain SQL and commands: nothing here asks Headway."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from redis import Redis

ENDED = ("COMPLETED", "FAILED", "CANCELLED")


def rows(database: str, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Run a query with `?` parameters on a SQLite file or a PostgreSQL database of Headway."""
    if database.startswith("sqlite:///"):
        path = Path(database.removeprefix("sqlite:///"))
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(statement, values).fetchall()
    with psycopg.connect(database, options="-c search_path=headway") as server:
        return server.execute(statement.replace("?", "%s").encode(), values).fetchall()


def assert_tasks_ended_exactly_once(database: str, accepted: Iterable[str]) -> dict[str, str]:
    """Fail unless each accepted task exists, ended, and wrote one event of its end. Return status by id."""
    status = dict(rows(database, "SELECT id, status FROM tasks"))
    accepted = list(accepted)
    assert len(accepted) == len(set(accepted)), "an id was given out twice"
    assert not set(accepted) - status.keys(), "an accepted task is lost"
    assert {id: status[id] for id in accepted if status[id] not in ENDED} == {}, "an accepted task never ended"
    ends: dict[str, list[str]] = defaultdict(list)
    for id, type in rows(database, "SELECT job, type FROM outbox WHERE type LIKE ? ORDER BY seq", "task.%"):
        ends[id].append(type)
    for id in accepted:
        final = [type for type in ends[id] if type.removeprefix("task.").upper() in ENDED]
        assert final == [f"task.{status[id].lower()}"], (id, status[id], ends[id])
    return status


def assert_one_active_task_per_user(database: str) -> None:
    """Fail if two tasks of one user were accepted and not ended at one moment, by the order of their events.

    The times of the rows cannot tell: a submission reads the clock, then waits for the commit of the task that ends.
    """
    found = rows(
        database,
        "SELECT t.user_id, min(o.seq), max(CASE WHEN t.ended_at IS NOT NULL THEN o.seq END), t.id"
        " FROM tasks t JOIN outbox o ON o.job = t.id AND o.source = 'headway.queue'"
        " WHERE t.user_id IS NOT NULL AND t.role = 'user' GROUP BY t.user_id, t.id ORDER BY t.user_id, min(o.seq)",
    )
    for (user, _, ended, id), (next_user, accepted, _, next_id) in itertools.pairwise(found):
        if user == next_user:
            assert ended is not None, f"{user}: {id} has not ended and {next_id} was accepted"
            assert ended < accepted, f"{user}: {id} and {next_id} were active at one moment"


def assert_nothing_held(database: str) -> None:
    """Fail if a job, an item, a block, a task or a worker's row is still held after every process has ended."""
    held = {
        "jobs": rows(database, "SELECT id FROM jobs WHERE holder IS NOT NULL"),
        "progress": rows(database, "SELECT job, idx FROM progress WHERE holder IS NOT NULL"),
        "blocks": rows(database, "SELECT job, no FROM blocks"),
        "tasks": rows(database, "SELECT id FROM tasks WHERE holder IS NOT NULL OR status = 'RUNNING'"),
    }
    assert not any(held.values()), held


def assert_counters_match_items(database: str, job: str) -> Counter[str]:
    """Fail unless the counters of a job's row agree with its items. Return the number of items by status."""
    [(no, total, done, dead)] = rows(database, "SELECT no, total, done, dead FROM jobs WHERE id = ?", job)
    by_status: Counter[str] = Counter(
        dict(rows(database, "SELECT status, count(*) FROM progress WHERE job = ? GROUP BY status", no))
    )
    [(registered,)] = rows(database, "SELECT count(*) FROM input_products WHERE job = ?", no)
    [(letters,)] = rows(database, "SELECT count(*) FROM dead_letters WHERE job = ?", no)
    assert (total, done, dead) == (registered, by_status["done"], letters)
    return by_status


def assert_projects_counted_exactly(database: str, expected: dict[str, int]) -> None:
    """Fail unless each project is DONE and its counters agree with its journal and with what was counted."""
    for project, items in expected.items():
        [(no, status, total, done, errors)] = rows(
            database, "SELECT no, status, total, done, errors FROM projects WHERE id = ?", project
        )
        [(journal,)] = rows(database, "SELECT count(*) FROM project_counts WHERE project = ?", no)
        [(failed,)] = rows(database, "SELECT sum(failed) FROM project_counts WHERE project = ?", no)
        assert (status, total, done, journal) == ("DONE", items, items, items), project
        assert errors == failed, project


def assert_every_event_at(sink: Sequence[dict[str, Any]], expected: Iterable[str], name: str) -> None:
    """Fail unless a receiver got every expected event id, each under one content (deliveries may repeat)."""
    contents: dict[str, set[str]] = defaultdict(set)
    for event in sink:
        contents[event["id"]].add(json.dumps(event, sort_keys=True))
    missing = set(expected) - contents.keys()
    assert not missing, f"{name} never got {len(missing)} events: {sorted(missing)[:5]}"
    changed = {id for id, bodies in contents.items() if len(bodies) > 1}
    assert not changed, f"{name} got different contents under one id: {sorted(changed)[:5]}"


def assert_redis_keeps_nothing(client: Redis, *secrets: str) -> None:
    """Fail if a task is left in RQ's queues, a key of one user or task never expires, or a key holds one of these texts."""
    for key in client.scan_iter("*"):
        assert not key.startswith(b"rq:queue:"), f"{key!r} has {client.lrange(key, 0, -1)}"
        if key.startswith((b"headway:", b"rq:job:", b"rq:results:", b"rq:worker:")):  # a user's, a task's, a worker's
            assert client.ttl(key) > 0, f"{key!r} never expires"
        content = client.dump(key) or b""
        if client.type(key) == b"hash":
            content += repr(client.hgetall(key)).encode()
        for secret in secrets:
            assert secret.encode() not in key + content, f"{key!r} holds {secret!r}"


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
