"""The blocks of docs/howto/flask.md and docs/howto/fastapi.md are applications that work."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from headway.queue.flask import Headway
from headway.queue.task import Status
from headway.queue.worker.worker import Worker
from headway.testing import eager

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"


def block(page: str, word: str) -> str:
    text = (HOWTO / page).read_text("utf-8")
    [found] = [code for code in re.findall(r"```python run\n(.*?)```", text, re.DOTALL) if word in code]
    return str(found)


async def post(app: Any, path: str) -> tuple[int, Any]:
    """One request, as a server hands it to an application; its lifespan around it."""
    sent: list[dict[str, Any]] = []
    ended = asyncio.Event()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    events = [{"type": "lifespan.startup"}]

    async def next_event() -> dict[str, Any]:
        if not events:
            await ended.wait()
            return {"type": "lifespan.shutdown"}
        return events.pop()

    started = asyncio.Event()

    async def answered(message: dict[str, Any]) -> None:
        assert not message["type"].endswith("failed"), message
        started.set()

    lifespan = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, next_event, answered))
    await started.wait()
    await app(scope, receive, send)
    ended.set()
    await lifespan
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body)


@pytest.mark.req("S2-13")
def test_the_fastapi_application_of_the_documentation_submits_and_closes_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(block("fastapi.md", "submitter"), "shop.py", "exec"), names)
    queue = names["queue"]
    status, task = asyncio.run(post(names["app"], "/captions/p7"))
    assert (status, task["status"], task["queue"]) == (202, "QUEUED", "normal")
    assert queue.get(task["id"]).as_json() == task, "it opens again when it is used again"
    Worker(queue).run(burst=True)
    row = queue.database.one("SELECT status, result FROM tasks")
    assert row == ("COMPLETED", '"p7: a boat"')
    queue.close()


@pytest.mark.req("S2-17")
def test_the_flask_application_of_the_documentation_runs_inside_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(block("flask.md", "def create_app"), "shop.py", "exec"), names)
    queue = names["headway"]
    task = names["app"].test_client().post("/captions/p8").json
    Worker(queue, context=queue.context).run(burst=True)
    assert queue.database.one("SELECT result FROM tasks WHERE id = ?", (task["id"],)) == ('"p8: a boat"',)
    assert queue.get(task["id"]).status is Status.COMPLETED
    queue.close()


def test_an_application_made_inside_an_eager_queue_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    queue = Headway()
    queue.handler("caption")(lambda task, payload: payload)
    with eager(queue):
        made = Flask("shop")
        made.config["HEADWAY_REDIS"] = "redis://127.0.0.1:1/0"
        queue.init_app(made)
        assert queue.get(queue.submit("caption").id).status is Status.COMPLETED
    assert list(tmp_path.iterdir()) == []
