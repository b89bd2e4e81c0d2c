"""The least that two processes can do: claim chunks of items from a SQLite file and record each item, durably.

No payloads, no attempts, no causes, no lease that anybody renews, nobody to notice a killed process. What a run of
headway reaches is compared with this.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import time
from pathlib import Path

CHUNK = 500

_SCHEMA = """
CREATE TABLE chunks (no INTEGER PRIMARY KEY, first INTEGER, after INTEGER, state TEXT, worker INTEGER, until REAL);
CREATE INDEX free_chunks ON chunks (no) WHERE state = 'free';
CREATE TABLE items (job INTEGER, idx INTEGER, status TEXT, PRIMARY KEY (job, idx)) WITHOUT ROWID;
CREATE TABLE jobs (no INTEGER PRIMARY KEY, total INTEGER, done INTEGER, finished INTEGER);
"""


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=60)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def register(path: Path, count: int) -> None:
    connection = connect(path)
    connection.executescript(_SCHEMA)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO jobs VALUES (1, ?, 0, 0)", (count,))
    chunks = [(first, min(count, first + CHUNK)) for first in range(0, count, CHUNK)]
    connection.executemany("INSERT INTO chunks (first, after, state) VALUES (?, ?, 'free')", chunks)
    connection.execute("COMMIT")
    connection.close()


def run(path: Path, processes: int, limit: float) -> float:
    """Seconds until all is recorded, the start of the processes included."""
    fork = multiprocessing.get_context("fork")
    began = time.monotonic()
    workers = [fork.Process(target=_work, args=(path, number, began + limit)) for number in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(limit + 10)
    seconds = time.monotonic() - began
    connection = connect(path)
    total, done, finished = connection.execute("SELECT total, done, finished FROM jobs").fetchone()
    (items,) = connection.execute("SELECT count(*) FROM items").fetchone()
    connection.close()
    assert (items, done, finished) == (total, total, 1), "the bare loop lost something"
    return seconds


def _work(path: Path, number: int, end: float) -> None:
    connection = connect(path)
    while time.monotonic() < end:
        connection.execute("BEGIN IMMEDIATE")
        claimed = connection.execute(
            "UPDATE chunks SET state = 'claimed', worker = ?, until = ? "
            "WHERE no = (SELECT no FROM chunks WHERE state = 'free' LIMIT 1) RETURNING no, first, after",
            (number, time.time() + 60),
        ).fetchone()
        connection.execute("COMMIT")
        if claimed is None:
            return
        no, first, after = claimed
        rows = []
        for idx in range(first, after):
            _noop(idx)
            rows.append((idx,))
        connection.execute("BEGIN IMMEDIATE")
        new = connection.executemany("INSERT OR IGNORE INTO items VALUES (1, ?, 'done')", rows).rowcount
        (left,) = connection.execute(
            "UPDATE jobs SET done = done + ? WHERE no = 1 RETURNING total - done", (new,)
        ).fetchone()
        if left == 0 and new:
            connection.execute("UPDATE jobs SET finished = finished + 1 WHERE no = 1")
        connection.execute("UPDATE chunks SET state = 'done' WHERE no = ?", (no,))
        connection.execute("COMMIT")


def _noop(item: object) -> None:
    pass


def start_programs(count: int, processes: int, limit: float) -> float:
    """How many times a second ``true`` can be started and waited for, by loops that do nothing else: what the machine allows
    anybody who runs so many at once."""
    fork = multiprocessing.get_context("fork")
    began = time.monotonic()
    loops = [fork.Process(target=_start_programs, args=(count // processes, began + limit)) for _ in range(processes)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(limit + 10)
    assert all(loop.exitcode == 0 for loop in loops), "a program was not run"
    return count // processes * processes / (time.monotonic() - began)


def _start_programs(count: int, end: float) -> None:
    path, environment = shutil.which("true") or "true", dict(os.environb)
    for number in range(count):
        assert time.monotonic() < end, "it takes too long"
        assert os.waitpid(os.posix_spawn(path, ["true", str(number)], environment), 0)[1] == 0
