"""Every ``--json``: it parses, names its schema, and has the published shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.finishline import FinishLine
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.states import Manager, open_store
from headway.views.schemas import documents, json_schema
from tests.cli.conftest import Answer, every_command, takes
from tests.services.redis import RedisServer
from tests.views.schema_check import problems

Cli = Callable[..., Answer]

#: One way to call each command that has --json. The test below says when one is missing.
CALLS: dict[str, list[tuple[str, ...]]] = {
    "jobs": [(), ("--all",)],
    "show": [("ads",)],
    "status": [(), ("ads",)],
    "runs": [("ads",)],
    "items": [("ads",), ("ads", "--limit", "2"), ("ads", "--status", "retrying")],
    "item": [("ads", "44"), ("ads", "3", "--payload"), ("ads", "59")],
    "log": [("ads",)],
    "dead list": [(), ("ads",)],
    "dead show": [("ads",), ("ads", "--cause", "2")],
    "audit": [(), ("ads",)],
    "doctor": [()],
    "config": [(), ("--show-origin",)],
    "progress": [("crawl",), ("nobody",), ("crawl", "--watch")],
    "states show": [("nightly",), ("nightly", "--task", "1")],
    "states jobs": [()],
    "relay": [("--status",), ("--poison", "list")],
    "queues": [()],
    "tasks": [(), ("--status", "failed")],
    "task show": [("t-failed",), ("t-waiting",)],
    "workers": [()],
    "queue settings": [()],
    "token list": [()],
    "alerts": [(), ("--history", "--limit", "5")],
    "run": [],  # its two documents are those of headway.run; tests/run has them
}


@pytest.fixture
def everything(ads: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger, a project and states, all where the settings say."""
    monkeypatch.setenv("HEADWAY_REDIS", redis_server.url(0))
    with FinishLine(redis_server.url(1), checkpointer=False) as line:
        line.create("crawl", 2)
        line.item_done("crawl", 1)
        line.item_failed("crawl", 2)
    store, _ = open_store(f"sqlite:///{ads}", "nightly", 2)
    with Manager("nightly", 1, 2, store) as manager:
        manager.set_started("ingest", payload={"rows": 3})
        manager.set_error(ValueError("disk full"), "export")
    with TaskQueue(f"sqlite:///{ads}") as queue:
        queue.handler("caption", retries=0, isolation="none")(lambda task, payload: 1 / payload)
        queue.submit("caption", 0, id="t-failed", user_id="anna")
        Worker(queue).run(burst=True)
        queue.submit("caption", 1, id="t-waiting", user_id="anna")


def test_every_command_with_json_is_called_here():
    assert set(CALLS) == {path for path, command in every_command().items() if takes(command, "--json")}


@pytest.mark.parametrize(
    ("path", "arguments"), [(path, arguments) for path, calls in CALLS.items() for arguments in calls], ids=str
)
def test_the_json_of_every_command_has_its_published_shape(
    cli: Cli, everything: None, path: str, arguments: tuple[str, ...]
):
    cli("retry", "ads", "--item", "45", "--yes")  # so that the audit trail has a line
    answer = cli(*path.split(), *arguments, "--json")
    assert answer.err == ""
    document = json.loads(answer.out)
    view = documents()[document["schema"]]
    assert problems(document, json_schema(view, document["schema"])) == []


def test_each_line_of_what_follows_has_its_published_shape(cli: Cli, ads: Path):
    from headway.states import StateEvent
    from headway.views.states import event_view

    store, _ = open_store(f"sqlite:///{ads}", "nightly", 1)
    with Manager("nightly", 0, 1, store) as manager:
        state = manager.set_started("ingest")
        events = [StateEvent(manager.get_state(tag="ingest"), replay=True), StateEvent(None), StateEvent(state)]
    views = [event_view(event).as_json() for event in events]
    schema = json_schema(documents()["headway.state-event/1"], "headway.state-event/1")
    assert [problems(json.loads(json.dumps(view)), schema) for view in views] == [[], [], []]
    assert [view["event"] for view in views] == ["replay", "replay_complete", "change"]


def test_exported_dead_letters_have_the_shape_of_dead_letters(cli: Cli, ads: Path):
    from headway.views.jobs.job import DeadLetter

    for line in cli("dead", "export", "ads", "--payload").out.splitlines():
        assert problems(json.loads(line), json_schema(DeadLetter)) == []


def test_states_and_projects_say_the_same_whether_named_by_option_or_by_setting(
    cli: Cli, everything: None, ads: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    by_setting = cli("progress", "crawl", "--json").json
    monkeypatch.delenv("HEADWAY_REDIS")
    assert cli("progress", "crawl", "--json", "--projects-redis", redis_server.url(1)).json == by_setting
    assert (
        cli("states", "nightly", "--json", "--store", f"sqlite:///{ads}").json
        == cli("states", "show", "nightly", "--json").json
    )
