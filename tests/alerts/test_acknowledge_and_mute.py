"""What people do with alerts: look, acknowledge, mute; by functions and on the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from headway.alerts import acknowledge, mute, unmute
from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.queue.task_queue import TaskQueue
from headway.views.schemas import json_schema
from headway.views.system.alerts import read_alerts
from tests.alerts.conftest import Scene, rules
from tests.services.waiting import eventually
from tests.views.schema_check import problems

OPENED, CLOSED = "alert.opened", "alert.closed"
NOW = rules(open_after=0, close_after=0, backlog=1, delay=100_000)
#: Every command is a process: one engine is enough.
ON_A_FILE = pytest.mark.parametrize("database_url", ["file"], indirect=True)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def backlog(scene: Scene, queue: TaskQueue) -> int:
    """The number of an open alert."""
    queue.submit("caption", 1, id="t")
    scene.evaluator(rules=NOW).tick()
    return scene.alerts()[0].no


def trail(scene: Scene) -> list[tuple[str, str]]:
    rows = scene.store.all("SELECT actor, action FROM audit WHERE action LIKE 'alert.%' ORDER BY seq")
    return [(who, what) for who, what in rows]


def test_an_alert_is_acknowledged_once_and_the_trail_says_by_whom(scene: Scene, backlog: int):
    assert acknowledge(scene.store, backlog, by="anna").acknowledged_by == "anna"
    assert acknowledge(scene.store, backlog, by="bert").acknowledged_by == "anna"
    assert trail(scene) == [("anna", "alert.acknowledge")]
    assert read_alerts(scene.store).alerts[0].acknowledged_by == "anna"


@pytest.mark.parametrize("no", [0, -1, 999, 2**70])
def test_a_missing_alert_cannot_be_acknowledged(scene: Scene, no: int):
    with pytest.raises(NotFound):
        acknowledge(scene.store, no, by="anna")


def test_an_alert_that_is_closed_cannot_be_acknowledged(scene: Scene, queue: TaskQueue, backlog: int):
    queue.cancel("t")
    scene.evaluator(rules=NOW)
    for evaluator in scene._evaluators:
        evaluator.tick()
    with pytest.raises(InvalidInput, match="closed"):
        acknowledge(scene.store, backlog, by="anna")
    assert trail(scene) == []


@pytest.mark.parametrize("by", ["", " ", "x" * 501, "a\0b", "\udcff"])
def test_every_action_needs_a_user_name(scene: Scene, backlog: int, by: str):
    with pytest.raises(InvalidInput):
        acknowledge(scene.store, backlog, by=by)
    with pytest.raises(InvalidInput):
        mute(scene.store, "backlog", seconds=60, by=by)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e12])
def test_a_mute_lasts_for_a_time_that_makes_sense(scene: Scene, seconds: float):
    with pytest.raises(InvalidInput):
        mute(scene.store, "backlog", seconds=seconds, by="anna")
    with pytest.raises(NotFound):
        mute(scene.store, "no-such-rule", seconds=60, by="anna")


def test_a_muted_rule_is_evaluated_without_events(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=NOW)
    mute(scene.store, "backlog", seconds=3600, by="anna")
    queue.submit("caption", 1, id="t")
    scene.pass_time(evaluator, 10)
    (seen,) = read_alerts(scene.store).alerts
    assert seen.muted
    queue.cancel("t")
    scene.pass_time(evaluator, 10)
    assert len(scene.alerts()) == 1
    assert scene.events() == []
    assert trail(scene) == [("anna", "alert.mute")]


def test_an_alert_that_outlasts_its_mute_is_published_once(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=NOW)
    mute(scene.store, "backlog", seconds=60, by="anna")
    queue.submit("caption", 1, id="t")
    scene.pass_time(evaluator, 40)
    assert scene.events() == []
    scene.pass_time(evaluator, 60)
    assert scene.events() == [(OPENED, "backlog", "normal")]


def test_a_mute_of_one_subject_leaves_the_others(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=NOW)
    mute(scene.store, "backlog", seconds=3600, by="anna", subject="low")
    queue.submit("caption", 1, id="a", priority="low")
    queue.submit("caption", 1, id="b", priority="normal")
    scene.pass_time(evaluator, 10)
    assert scene.events() == [(OPENED, "backlog", "normal")]
    assert unmute(scene.store, "backlog", by="bert", subject="low")
    assert not unmute(scene.store, "backlog", by="bert", subject="low")
    scene.pass_time(evaluator, 10)
    assert scene.events() == [(OPENED, "backlog", "normal"), (OPENED, "backlog", "low")]
    assert trail(scene) == [("anna", "alert.mute"), ("bert", "alert.unmute")]


def test_an_alert_muted_after_its_opening_is_published_when_it_closes(scene: Scene, queue: TaskQueue, backlog: int):
    mute(scene.store, "backlog", seconds=3600, by="anna")
    queue.cancel("t")
    scene._evaluators[0].tick()
    assert scene.events() == [(OPENED, "backlog", "normal"), (CLOSED, "backlog", "normal")]


def test_the_view_matches_its_schema_and_marks_unknown_rules(scene: Scene, queue: TaskQueue):
    never = read_alerts(scene.store)
    assert (never.checked_at, never.stale, never.evaluator) == (None, True, None)
    assert {rule.state for rule in never.rules} == {"unknown"}
    queue.submit("caption", 1, id="t")
    evaluator = scene.evaluator(rules=NOW)
    evaluator.tick()
    mute(scene.store, "backlog", seconds=60, by="anna")
    found = read_alerts(scene.store)
    states = {rule.name: rule.state for rule in found.rules}
    assert (states["backlog"], states["delay"], states["worker_lost"]) == ("open", "ok", "off")
    assert states["store_slow"] == "unknown"  # known from the second round on
    assert not found.stale
    assert found.evaluator is not None
    document = json.loads(json.dumps(found.as_json()))
    assert problems(document, json_schema(type(found), document["schema"])) == []
    assert document["alerts"][0]["text"] == "1 task waits in the queue normal."


def test_the_view_is_stale_without_an_evaluator(scene: Scene):
    scene.evaluator(rules=NOW).tick(at=scene.store.now() - 100)
    found = read_alerts(scene.store)
    assert found.stale
    assert {rule.state for rule in found.rules} == {"unknown"}


# ---- the command line -----------------------------------------------------------------------------------------------


@ON_A_FILE
def test_the_command_shows_acknowledges_and_mutes(scene: Scene, backlog: int, headway_cli: Run):
    shown = headway_cli("alerts", "--rules", "-d", scene.url)
    assert "1 task waits in the queue normal." in shown.stdout
    assert "backlog" in shown.stdout
    assert headway_cli("alerts", "ack", str(backlog), "-d", scene.url).returncode == 0
    said = headway_cli("alerts", "mute", "backlog", "--for", "2h", "-d", scene.url)
    assert "for 2 h" in said.stderr
    document = json.loads(headway_cli("alerts", "--json", "-d", scene.url).stdout)
    (alert,) = document["alerts"]
    assert alert["muted"]
    assert alert["acknowledged_by"]
    assert headway_cli("alerts", "unmute", "backlog", "-d", scene.url).returncode == 0
    assert [what for _, what in trail(scene)] == ["alert.acknowledge", "alert.mute", "alert.unmute"]


def test_times_have_a_unit_and_odd_ones_are_refused(monkeypatch: pytest.MonkeyPatch):
    from headway.cli.services.alerts import _span

    anything: Any = None
    good = {"90": 90.0, "90s": 90.0, "30m": 1800.0, "30 min": 1800.0, "2h": 7200.0, "1.5H": 5400.0, "1d": 86_400.0}
    assert {text: _span(anything, anything, text) for text in good} == good
    import click

    for text in ("", "h", "nan", "inf", "-1h", "0s", "1e5", "400d", "2w", "½h", "9" * 30, "1..5h", "2h30m", "\x1b[2J"):
        with pytest.raises(click.BadParameter):
            _span(anything, anything, text)


@ON_A_FILE
def test_the_view_of_a_store_without_evaluations_has_a_hint(scene: Scene, headway_cli: Run):
    shown = headway_cli("alerts", "-d", scene.url)
    assert (shown.returncode, shown.stdout) == (0, "")
    assert "headway alerts watch" in shown.stderr


@ON_A_FILE
def test_watch_judges_in_the_foreground_delivers_to_the_sinks_and_ends_with_a_signal(
    scene: Scene, queue: TaskQueue, spawn_cli: Callable[..., subprocess.Popen[str]]
):
    queue.submit("caption", 1, id="t")
    settings = {
        "HEADWAY_ALERT_BACKLOG": "1",
        "HEADWAY_ALERT_OPEN_AFTER": "0",
        "HEADWAY_SINKS": "log:",
        "HEADWAY_LOG_LEVEL": "info",
    }
    process = spawn_cli("alerts", "watch", "-d", scene.url, env=settings)
    taken = (
        "SELECT 1 FROM outbox o, sinks s WHERE o.type = 'alert.opened' AND (s.since >= o.seq OR EXISTS "
        "(SELECT 1 FROM deliveries d WHERE d.seq = o.seq))"
    )
    eventually(lambda: scene.store.all(taken), 60)
    process.terminate()
    output, errors = process.communicate(timeout=60)
    assert "opened  backlog  1 task waits in the queue normal." in output
    assert "alert.opened" in errors
    assert process.returncode in (0, 143)
    assert scene.events() == [(OPENED, "backlog", "normal")]


@ON_A_FILE
def test_a_bad_setting_stops_the_watch_before_it_begins(scene: Scene, headway_cli: Run):
    answer = headway_cli("alerts", "watch", "-d", scene.url, env={"HEADWAY_ALERT_DELAY": "soon"})
    assert answer.returncode == 2
    assert "HEADWAY_ALERT_DELAY" in answer.stderr
    with pytest.raises(HeadwayError):
        unmute(scene.store, "nothing", by="anna")


@ON_A_FILE
def test_a_watch_whose_reader_left_ends(
    scene: Scene, queue: TaskQueue, spawn_cli: Callable[..., subprocess.Popen[str]]
):
    settings = {"HEADWAY_ALERT_BACKLOG": "1", "HEADWAY_ALERT_OPEN_AFTER": "0"}
    queue.submit("caption", 1, id="t")
    process = spawn_cli("alerts", "watch", "-d", scene.url, env=settings, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
