"""`headway progress` and `headway project` as people type them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.finishline.conftest import OpenLine
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(headway_cli: Run, redis_server: RedisServer) -> Run:
    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return headway_cli(*arguments, env={"HEADWAY_REDIS": redis_server.url(0)}, **options)

    return run


def test_a_project_from_its_beginning_to_its_end(cli: Run, open_line: OpenLine):
    assert cli("project", "create", "p").stdout == "p  INITIALIZING  0.0 %  0 of 0 done\n"
    assert cli("project", "status", "p", "crawling").stdout == "UPDATED\n"
    assert cli("project", "total", "p", "5").stdout == "UPDATED\n"
    line = open_line()
    line.items_done("p", [1, 2])
    line.item_failed("p", 3)
    shown = cli("progress", "p")
    assert shown.stdout == "p  CRAWLING  60.0 %  3 of 5 done, 1 of them failed\n"
    assert (shown.returncode, shown.stderr) == (0, "")
    assert cli("project", "finish-crawl", "p", "--total", "3").stdout == "COMPLETED\n"
    told = json.loads(cli("progress", "p", "--json").stdout)
    assert told == {
        "schema": "headway.progress/1", "project_id": "p", "status": "DONE", "total": 3, "done": 3, "errors": 1,
        "percent": 100.0, "live": True, "restored": None,
    }  # fmt: skip
    assert cli("progress", "p", "--watch").returncode == 3
    assert cli("project", "delete", "p").returncode == 2  # it does not ask where nobody can answer
    assert cli("project", "delete", "p", "--yes").stdout == "p is deleted.\n"
    gone = cli("progress", "p")
    assert (gone.returncode, gone.stdout) == (2, "p  NOT_FOUND\n")
    assert cli("project", "delete", "p", "--yes").returncode == 2


def test_each_error_has_its_message_and_exit_code(cli: Run, redis_server: RedisServer):
    unknown = cli("project", "total", "nobody", "3")
    assert unknown.returncode == 2
    assert "headway project create nobody" in unknown.stderr
    assert cli("project", "status", "p", "DONE").returncode == 2
    assert cli("progress", "a/b").returncode == 2
    redis_server.stop()
    away = cli("progress", "p")
    assert away.returncode == 6
    assert "cannot be reached" in away.stderr
    assert away.stdout == ""


@pytest.mark.req("S0-31")
def test_creating_while_redis_is_away_is_recorded_and_reported(cli: Run, redis_server: RedisServer, database_url: str):
    redis_server.stop()
    made = cli("project", "create", "p", "--journal", "--database", database_url)
    assert made.returncode == 0
    assert "Redis is away" in made.stderr
    assert cli("project", "create", "q").returncode == 6  # without a record there is nowhere to put it
    redis_server.start()
    assert json.loads(cli("progress", "p", "--json", "-d", database_url).stdout)["live"] is True


def test_watching_shows_each_change_and_ends_with_the_project(
    spawn_cli: Callable[..., subprocess.Popen[str]], open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    line.create("p", total=2)
    process = spawn_cli("progress", "p", "-w", "--every", "0.05", "--projects-redis", redis_server.url(1))
    assert process.stdout is not None
    assert process.stdout.readline() == "p  INITIALIZING  0.0 %  0 of 2 done\n"
    line.item_done("p", 1)
    assert process.stdout.readline() == "p  INITIALIZING  50.0 %  1 of 2 done\n"
    line.item_done("p", 2)
    output, _ = process.communicate(timeout=10)
    assert output == "p  DONE  100.0 %  2 of 2 done\n"
    assert process.returncode == 0


def test_watching_survives_an_outage_and_ends_on_a_signal(
    spawn_cli: Callable[..., subprocess.Popen[str]], open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    line.create("p", total=2)
    process = spawn_cli("progress", "p", "-w", "--every", "0.05", "--projects-redis", redis_server.url(1))
    assert process.stdout is not None
    process.stdout.readline()
    redis_server.stop()
    assert process.stderr is not None
    assert "cannot be reached" in process.stderr.readline()
    redis_server.start()
    line._server.client.hset("smap:proj:p", mapping={"status": "PROCESSING", "total": 7, "done": 1, "errors": 0})
    assert process.stdout.readline() == "p  PROCESSING  14.3 %  1 of 7 done\n"
    process.send_signal(signal.SIGTERM)
    eventually(lambda: process.poll() is not None)
    assert process.returncode == 143
