"""What long-lived commands do besides: events reach their sinks, and somebody judges the alerts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headway._sql import connect
from headway.cli.services.background import attending
from headway.config import Config
from headway.errors import InvalidInput
from headway.queue.task_queue import TaskQueue
from headway.views.system.alerts import read_alerts
from tests.services.waiting import eventually


def test_beside_the_work_events_are_delivered_and_the_rules_judged_until_it_ends(tmp_path: Path):
    said, sink = tmp_path / "said", tmp_path / "sink"
    sink.write_text(f"#!/bin/sh\ncat >> {said}\n")
    sink.chmod(0o755)
    url = f"sqlite:///{tmp_path}/headway.db"
    others = set(threading.enumerate())  # of tests before this one
    config = Config(cli={"database": url}, environment={"HEADWAY_SINKS": f"command:{sink}"}, directory=tmp_path)
    with connect(url) as store, TaskQueue(store) as queue:
        queue.handler("caption")(lambda task, payload: None)
        with attending(config, store):
            task = queue.submit("caption")
            eventually(lambda: said.exists() and f"{task.id}-1" in said.read_text())
            eventually(lambda: read_alerts(store).checked_at is not None)
            assert read_alerts(store).evaluator is not None
        assert read_alerts(store).evaluator is None  # it gave its place back
    assert set(threading.enumerate()) <= others


def test_limits_that_change_in_the_file_are_seen_by_everybody_who_follows_it(tmp_path: Path):
    """The judging has a copy of the settings: if it took the news of a change, nobody else would hear of it."""
    url = f"sqlite:///{tmp_path}/headway.db"
    file = tmp_path / "headway.toml"
    file.write_text("alert_backlog = 7\n")
    config = Config(cli={"database": url}, environment={}, directory=tmp_path)
    with connect(url) as store, attending(config, store):
        eventually(lambda: [rule for rule in read_alerts(store).rules if (rule.name, rule.limit) == ("backlog", 7.0)])
        file.write_text("alert_backlog = 1234\n")
        eventually(lambda: store.one("SELECT 1 FROM alert_rules WHERE name = 'backlog' AND threshold = 1234"), 60)
        assert config.reload_if_changed() != {}


def test_an_invalid_sink_is_reported_before_the_work_begins(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/headway.db"
    config = Config(cli={"database": url}, environment={"HEADWAY_SINKS": "nowhere:x"}, directory=tmp_path)
    with connect(url) as store, pytest.raises(InvalidInput, match="nowhere"), attending(config, store):
        pytest.fail("it began")
