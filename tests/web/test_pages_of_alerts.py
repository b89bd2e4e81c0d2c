"""The page of alerts, and what can be done about one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headway.alerts import Evaluator, Rules
from headway.errors import NotFound
from headway.queue.task_queue import TaskQueue
from headway.web.api import actions
from headway.web.api.problems import Forbidden
from headway.web.site import User
from tests.web import scene
from tests.web.stage import Stage

OPERATOR, VIEWER = User("olga", "operator"), User("vera", "viewer")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(f"sqlite:///{tmp_path}/headway.db")
    with TaskQueue(stage.url, per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: None)
        queue.submit_many([{"kind": "caption", "id": f"t{n}"} for n in range(12)])
    yield stage
    stage.site.close()


def judge(stage: Stage) -> None:
    database = stage.site.reader.database
    evaluator = Evaluator(database, Rules(limits={"backlog": 10.0}, open_after=0.0))
    evaluator.tick()
    evaluator.tick()
    evaluator.close()


@pytest.mark.req("S2-40")
def test_the_page_says_what_is_open_since_when_and_whether_anybody_looks(stage: Stage):
    with TestClient(stage.app()) as client:
        assert "The rules were never evaluated" in client.get("/alerts").text
        judge(stage)
        page = client.get("/alerts").text
        assert "1 open alert" in page
        assert "12" in page
        assert "/actions/acknowledge" in page
        stage.role = "viewer"
        assert "/actions/" not in client.get("/alerts").text


def test_the_overview_names_an_open_alert_that_it_would_not_see_by_itself(stage: Stage):
    with TestClient(stage.app()) as client:
        assert "Event lag" not in client.get("/").text
        stage.site.reader.database.write(
            "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) VALUES "
            "('event_lag', 'webhook', 'warning', 'The sink webhook is <b>behind</b>.', 400, 400, 300, ?)",
            (stage.site.reader.database.now(),),
        )
        page = client.get("/").text
        assert "Event lag" in page
        assert "The sink webhook is &lt;b&gt;behind&lt;/b&gt;" in page
        actions.mute(stage.site.reader, OPERATOR, "event_lag", seconds=60)
        assert "Event lag" not in client.get("/").text


def test_an_alert_that_somebody_sees_to_is_still_on_the_overview_and_needs_nobody_else(stage: Stage):
    """A queue that waits too long is told by its alert alone: nothing else on the page says it."""
    database = stage.site.reader.database
    database.write(
        "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) VALUES "
        "('store_slow', 'database', 'warning', 'A small transaction takes 2 s.', 2, 2, 1, ?)",
        (database.now(),),
    )
    with TestClient(stage.app()) as client:
        before = client.get("/").text
        assert "Store slow" in before
        [alert] = [one for one in stage.site.reader.alerts().alerts if one.rule == "store_slow"]
        assert f'name="alert" value="{alert.no}"' in before
        needs = int(re.findall(r"<h1>(\d+) issues? needs? attention", before)[0])
        actions.acknowledge(stage.site.reader, OPERATOR, alert.no)
        after = client.get("/").text
        assert "Store slow" in after
        assert "acknowledged by olga" in after
        left = re.findall(r"<h1>(\d+) issues? needs? attention", after)
        assert int(left[0] if left else 0) == needs - 1
        assert f'name="alert" value="{alert.no}"' not in after


def test_a_delay_that_has_an_alert_is_said_on_the_overview_once(stage: Stage):
    database = stage.site.reader.database
    scene.change(database, "UPDATE tasks SET run_at = run_at - 600, created_at = created_at - 600")
    evaluator = Evaluator(database, Rules(limits={"delay": 300.0}, open_after=0.0))
    evaluator.tick()
    evaluator.tick()
    evaluator.close()
    with TestClient(stage.app()) as client:
        alone = client.get("/").text
        assert "No worker" in alone
        assert "Delay" not in alone  # it is why they wait
        assert "/actions/acknowledge" in alone
        stage.site.reader.queue.pause("normal", reason="backup", by="ana")
        paused = client.get("/").text
        assert "paused by ana" in paused
        assert "Delay" not in paused


def test_an_operator_acknowledges_mutes_and_unmutes_and_a_viewer_does_not(stage: Stage):
    judge(stage)
    reader = stage.site.reader
    [alert] = reader.alerts().alerts
    for call in (
        lambda: actions.acknowledge(reader, VIEWER, alert.no),
        lambda: actions.mute(reader, VIEWER, "backlog", seconds=60),
        lambda: actions.unmute(reader, VIEWER, "backlog"),
    ):
        with pytest.raises(Forbidden):
            call()
    assert reader.activity().activity == ()
    actions.acknowledge(reader, OPERATOR, alert.no)
    actions.mute(reader, OPERATOR, "backlog", seconds=7200, subject=alert.subject)
    [alert] = reader.alerts().alerts
    assert (alert.acknowledged_by, alert.muted) == ("olga", True)
    assert actions.unmute(reader, OPERATOR, "backlog", subject=alert.subject).touched == 1
    assert actions.unmute(reader, OPERATOR, "backlog").touched == 0
    with pytest.raises(NotFound):
        actions.acknowledge(reader, OPERATOR, 99)
    with pytest.raises(NotFound):
        actions.mute(reader, OPERATOR, "no such rule", seconds=60)
    assert len(reader.activity().activity) == 3


def storm(stage: Stage, count: int = 19) -> None:
    database = stage.site.reader.database
    for number in range(count):
        database.write(
            "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) VALUES "
            "('worker_lost', ?, 'warning', ?, 60, 60, 30, ?)",
            (f"vm.{number}", f"Worker vm.{number} gave no sign of life.", database.now()),
        )


def test_an_alert_storm_is_acknowledged_at_once_and_an_alert_that_came_later_is_not(stage: Stage):
    storm(stage)
    with TestClient(stage.app()) as client:
        page = client.get("/alerts").text
        assert "Acknowledge all 19" in page
        overview = client.get("/").text
        assert "19 issues. The first: Worker vm.0 gave no sign of life" in overview
        [shown] = set(re.findall(r'name="alerts" value="([\d ]+)"', page))
        assert shown in overview
        reader = stage.site.reader
        reader.database.write("UPDATE alerts SET closed_at = opened_at WHERE no = ?", (int(shown.split()[0]),))
        reader.database.write(
            "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) VALUES "
            "('delay', 'low', 'warning', 'late', 60, 60, 30, 0)"
        )
        acted = actions.FORMS["acknowledge"](reader, OPERATOR, {"alerts": shown}, [])
        assert acted.text.startswith("18 alerts acknowledged. 1 alert skipped")
        left = [alert.rule for alert in reader.alerts().alerts if not alert.acknowledged_by]
        assert left == ["delay"]
        assert "1 issue needs attention" in client.get("/").text or "No worker" in client.get("/").text
        with pytest.raises(Forbidden):
            actions.FORMS["acknowledge"](reader, VIEWER, {"alerts": shown}, [])


def test_the_overview_has_the_alerts_about_new_errors_that_no_dead_letter_shows(stage: Stage):
    """Each run was retried and succeeded, so nothing failed permanently, and the alert is open all the same."""
    stage.site.reader.database.write(
        "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) VALUES "
        "('new_cause', 'c1', 'warning', 'New in task bake: OSError: cold at bakery.py:bake', 1, 1, 1, 60)"
    )
    with TestClient(stage.app()) as client:
        assert "New in task bake: OSError: cold at bakery.py:bake" in client.get("/alerts").text
        page = client.get("/").text
        assert "New in task bake: OSError: cold at bakery.py:bake" in page
        assert "1 issue needs attention" in page or "No worker" in page


@pytest.mark.parametrize(
    ("rule", "subject", "path"),
    [
        ("stalled_job", "ads/1", "/jobs/ads%2F1"),
        ("worker_lost", "vm.1", "/workers#vm.1"),
        ("delay", "low", "/queues/low"),
        ("backlog", "high", "/queues/high"),
        ("failure_spike", "job ads", "/jobs/ads#causes"),
        ("failure_spike", "task caption", "/dead#tasks"),
        ("no_handler", "urgent caption", "/workers#start"),
        ("new_cause", "0123456789abcdef", "/dead"),
        ("event_lag", "webhook", "/about#store"),
    ],
)
def test_every_alert_links_to_the_page_that_cures_it(stage: Stage, rule: str, subject: str, path: str):
    stage.site.reader.database.write(
        "INSERT INTO alerts (rule, subject, severity, text, value, peak, threshold, opened_at) VALUES "
        "(?, ?, 'warning', 'something', 60, 60, 30, 0)",
        (rule, subject),
    )
    with TestClient(stage.app()) as client:
        assert f'href="{path}"' in client.get("/alerts").text


def test_a_snooze_lasts_as_long_as_was_chosen(stage: Stage):
    judge(stage)
    reader = stage.site.reader
    with TestClient(stage.app()) as client:
        assert '<option value="240">4 hours</option>' in client.get("/alerts").text
    fields = {"rule": "backlog", "subject": "normal", "minutes": "240"}
    assert "4 h" in actions.FORMS["mute"](reader, OPERATOR, fields, []).text
