"""What the pages say of a queue that was really used, with RQ and without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headway.queue.rq.source import RqSource
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.web.stage import Stage


@pytest.fixture(params=["database", "rq"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TaskQueue]:
    redis = None
    if request.param == "rq":
        redis = request.getfixturevalue("redis_server").url(0)
    with app.build(f"sqlite:///{tmp_path}/headway.db", redis=redis) as made:
        yield made


@pytest.fixture
def pages(queue: TaskQueue, tmp_path: Path) -> Iterator[TestClient]:
    stage = Stage(f"sqlite:///{tmp_path}/headway.db")
    with TestClient(stage.app()) as client:
        yield client
    stage.site.close()


def work_off(queue: TaskQueue) -> None:
    source = RqSource(queue, queue.backend.redis_url, name="w1") if queue.backend.redis_url else None
    Worker(queue, name="w1", source=source).run(burst=True)


def row(html: str, name: str) -> dict[str, str]:
    """The cells of the row that begins with ``name``, by their labels."""
    [found] = [part for part in html.split("<tr")[1:] if f"<b>{name}</b>" in part or f'<b class="m">{name}</b>' in part]
    cells = re.findall(r'<td[^>]*data-l="([^"]*)"[^>]*>(.*?)</td>', found, re.DOTALL)
    return {unescape(label): re.sub(r"<[^>]*>", "", unescape(text)).strip() for label, text in cells}


@pytest.mark.req("S2-37", "S2-38", "S2-39", "S2-53")
def test_a_queue_looks_the_same_whether_workers_hear_of_tasks_through_rq_or_not(queue: TaskQueue, pages: TestClient):
    done = [queue.submit("echo.none", n) for n in range(3)]
    failed = queue.submit("raise.none", "value")
    work_off(queue)
    waiting = [queue.submit("echo.none", n) for n in range(2)]
    gone = queue.submit("echo.none", role="admin")
    queue.cancel(gone.id)

    normal = row(pages.get("/queues").text, "normal")
    counts = ("Waiting", "Done, failed, 1 h", "Users waiting")
    assert [normal[label] for label in counts] == ["2", "3, 1 all failed 3, 1 in total", "no user 2"]
    assert normal["Run p50 · p95"] != "\N{EN DASH}"
    high = row(pages.get("/queues").text, "high")
    assert [high[label] for label in counts] == ["0", "0, 0 0, 0 in total", "\N{EN DASH}"]

    listed = pages.get("/tasks").text
    assert all(task.id in listed for task in (*done, failed, *waiting, gone))
    for status, expected in (("QUEUED", waiting), ("COMPLETED", done), ("FAILED", [failed]), ("CANCELLED", [gone])):
        listed = pages.get("/tasks", params={"status": status}).text
        everyone = (*done, failed, *waiting, gone)
        assert [task.id for task in everyone if f"/tasks/{task.id}" in listed] == [task.id for task in expected]

    told = "notified" if queue.backend.redis_url else "not notified"
    assert f"<dt>RQ</dt><dd>{told}" in pages.get(f"/tasks/{waiting[0].id}").text

    worker = row(pages.get("/workers").text, "w1")
    assert (worker["Completed"], worker["Failed"], worker["State"]) == ("3", "1", "ended")
    kind = row(pages.get("/performance?range=1h").text, "echo.none")
    assert (kind["Done"], kind["Failed attempts"], kind["Succeeded"]) == ("3", "0", "100%")
    assert all(kind[label] not in {"", "\N{EN DASH}"} for label in ("Mean", "Run p50 · p95", "p99"))
