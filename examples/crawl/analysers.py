"""Fork analysers: each fetches pages, counts their words and reports every page to the finish line."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
import urllib.error

import psycopg
from crawler import fetch

from headway import states
from headway.finishline import FinishLine

DATABASE = os.environ["DATABASE_URL"]
ANALYSERS = int(os.environ.get("ANALYSERS", "3"))
#: Opened once, before the forks. Each child gets connections of its own.
LINE = FinishLine(os.environ["PROJECTS_REDIS_URL"], DATABASE, journal=True, interval=1.0)

# A page that its analyser did not finish within 3 seconds is given to another one.
TAKE = """
UPDATE crawl_pages SET taken_at = now() WHERE (project, path) = (
    SELECT project, path FROM crawl_pages
    WHERE done_at IS NULL AND (taken_at IS NULL OR taken_at < now() - interval '3 seconds')
    ORDER BY taken_at NULLS FIRST LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING project, path
"""


def analyse(task: int) -> None:
    """Work on pages until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    store, tasks = states.open_store(DATABASE, "analysers", num_tasks=ANALYSERS)
    with (
        states.Manager("analysers", task, tasks, store) as manager,
        psycopg.connect(DATABASE, autocommit=True) as database,
    ):
        manager.set_started("pages")
        pages = 0
        while not stop.is_set():
            page = database.execute(TAKE).fetchone()
            if page is None:
                stop.wait(0.1)
                continue
            project, path = page
            words = None
            try:
                words = len(re.sub(r"<[^>]+>", " ", fetch(path)).split())
            except urllib.error.HTTPError as error:
                LINE.item_failed(project, path, error=error)
            else:
                LINE.item_done(project, path)
            # Killed before this line, the page is analysed again. It counts once all the same.
            database.execute(
                "UPDATE crawl_pages SET done_at = now(), words = %s WHERE project = %s AND path = %s",
                (words, project, path),
            )
            pages += 1
            manager.set_state("pages", status=1 + pages)
        manager.set_finished("pages")


def fork(task: int) -> int:
    pid = os.fork()
    if pid:
        print(f"analyser {task} runs as {pid}", flush=True)
        return pid
    code = 1
    try:
        analyse(task)
        code = 0
    except Exception:  # noqa: BLE001
        traceback.print_exc()  # the parent starts another one
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait_for_table() -> None:
    """The crawler creates the table when it first runs."""
    while True:
        with psycopg.connect(DATABASE) as database:
            if database.execute("SELECT to_regclass('crawl_pages')").fetchone() != (None,):
                return
        time.sleep(0.2)


def main() -> None:
    stopping = False
    children: dict[int, int] = {}

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        for pid in children:
            os.kill(pid, signal.SIGTERM)

    LINE.progress("analysers")  # starts the thread that rebuilds projects which Redis lost
    wait_for_table()
    signal.signal(signal.SIGTERM, stop)
    children = {fork(task): task for task in range(ANALYSERS)}
    while children:
        pid, _ = os.wait()
        task = children.pop(pid)
        if not stopping:
            time.sleep(0.2)
            children[fork(task)] = task
    LINE.close()


if __name__ == "__main__":
    main()
