"""Discover the pages of a site: python crawler.py PROJECT"""

from __future__ import annotations

import os
import re
import sys
import urllib.error
import urllib.request

import psycopg
from redis import Redis
from rq import Queue

from headway.finishline import FinishLine, Status

SITE = os.environ["SITE_URL"]
TABLE = """
CREATE TABLE IF NOT EXISTS crawl_pages (
    project text, path text, taken_at timestamptz, done_at timestamptz, words integer, PRIMARY KEY (project, path)
)
"""


def fetch(path: str) -> str:
    with urllib.request.urlopen(SITE + path, timeout=5) as answer:
        return str(answer.read().decode())


def discover(project: str, database: psycopg.Connection) -> int:
    """Follow links and store every page as soon as it is found. Return how many there are."""
    found, frontier = {"/0"}, ["/0"]
    while frontier:
        path = frontier.pop(0)
        database.execute(
            "INSERT INTO crawl_pages (project, path) VALUES (%s, %s) ON CONFLICT DO NOTHING", (project, path)
        )
        try:
            text = fetch(path)
        except urllib.error.HTTPError:
            continue  # an analyser reports the dead link
        fresh = [link for link in re.findall(r'href="([^"]+)"', text) if link not in found]
        found.update(fresh)
        frontier += dict.fromkeys(fresh)
    return len(found)


def main() -> None:
    project = sys.argv[1]
    with (
        FinishLine(os.environ["PROJECTS_REDIS_URL"], os.environ["DATABASE_URL"], journal=True) as line,
        psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database,
    ):
        database.execute("SELECT pg_advisory_lock(4711)")  # two crawlers must not create the table at one moment
        database.execute(TABLE)
        database.execute("SELECT pg_advisory_unlock(4711)")
        line.create(project)
        line.set_status(project, Status.CRAWLING)
        total = discover(project, database)
        line.finish_crawl(project, total=total)
        Queue("digests", connection=Redis.from_url(os.environ["REDIS_URL"])).enqueue(
            "digests.write", project, job_id=f"digest-{project}"
        )
        print(f"{project}: {total} pages")


if __name__ == "__main__":
    main()
