"""``headway states`` as a person or a script uses it."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.states import ERROR, Manager, open_store
from tests.services.waiting import eventually

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/headway.db"


@pytest.fixture
def managers(url: str) -> Any:
    store, _ = open_store(url, "nightly", 2)
    yield [Manager("nightly", task, 2, store) for task in range(2)]
    store.close()


def test_a_job_is_shown_as_a_table_with_its_lowest_state_and_its_worst_error(managers: list[Manager], headway_cli: Run):
    managers[0].set_warning("slow\x1b[31m", "ingest")
    managers[1].set_error(ValueError("disk full"), "ingest")
    managers[1].set_finished("export")
    done = headway_cli("states", "nightly")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        ["TASK", "TAG", "STATUS"],
        ["0", "ingest", "-2"],
        ["1", "export", "finished"],
        ["1", "ingest", "-1"],
    ]
    assert "\x1b" not in done.stdout + done.stderr
    assert "The lowest is task 0 ingest: -2" in done.stderr
    assert "Worst error: task 1 ingest: -1 (\U0001f534 disk full)" in done.stderr


def test_json_has_stable_keys_and_scopes_narrow_it(managers: list[Manager], headway_cli: Run):
    managers[0].set_started("ingest", payload={"rows": 3})
    managers[1].set_finished("ingest")
    managers[1].set_started("export")
    answer = json.loads(headway_cli("states", "nightly", "--json").stdout)
    assert answer.keys() == {"schema", "job", "num_tasks", "state", "counts", "worst_error", "states"}
    assert (answer["schema"], answer["num_tasks"], answer["worst_error"]) == ("headway.states/1", 2, None)
    assert answer["states"][0].keys() == {
        "job_id", "task_id", "tag", "status", "message", "timestamp", "version", "event_id", "payload",
        "schema_version",
    }  # fmt: skip
    assert answer["states"][0]["payload"] == {"rows": 3}
    narrowed = json.loads(headway_cli("states", "nightly", "--task", "1", "--tag", "export", "--json").stdout)
    assert [(state["task_id"], state["tag"]) for state in narrowed["states"]] == [(1, "export")]
    assert narrowed["state"]["status"] == 1


@pytest.mark.req("S1-63")
def test_following_shows_current_states_and_then_every_change(
    managers: list[Manager], spawn_cli: Callable[..., subprocess.Popen[str]]
):
    managers[0].set_started("ingest")
    process = spawn_cli("states", "nightly", "--follow", "--json")
    lines: list[dict[str, Any]] = []
    output = process.stdout
    assert output is not None
    reader = threading.Thread(target=lambda: lines.extend(map(json.loads, output)))
    reader.start()
    eventually(lambda: len(lines) >= 2, 30)
    assert [line["event"] for line in lines] == ["replay", "replay_complete"]
    managers[1].set_started("export")
    managers[0].set_finished("ingest")
    eventually(lambda: len(lines) >= 4, 30)
    assert [(line["event"], line["state"]["tag"]) for line in lines[2:]] == [("change", "export"), ("change", "ingest")]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    reader.join(20)


def test_waiting_ends_with_0_when_all_have_finished(managers: list[Manager], spawn_cli: Any):
    managers[0].set_finished("ingest")
    process = spawn_cli("states", "wait", "nightly", "--tag", "ingest", "--timeout", "60")
    managers[1].set_finished("ingest")
    assert process.wait(60) == 0
    assert "All 2 tasks of nightly have reached finished with ingest." in process.stderr.read()


def test_waiting_ends_with_3_at_an_error_and_with_1_when_it_takes_too_long(managers: list[Manager], headway_cli: Run):
    managers[0].set_finished("ingest")
    late = headway_cli("states", "wait", "nightly", "--tag", "ingest", "--status", "started", "--timeout", "0.05")
    assert late.returncode == 1
    assert "1 of 2 tasks have not reached 'ingest': 1." in late.stderr
    managers[1].set_state("ingest", status=ERROR, message="broken")
    failed = headway_cli("states", "wait", "nightly", "--tag", "ingest")
    assert failed.returncode == 3
    assert "Task 1 reported an error for 'ingest': broken" in failed.stderr


def test_unknown_jobs_and_invalid_options_are_reported(managers: list[Manager], headway_cli: Run, tmp_path: Path):
    missing = headway_cli("states", "nothing")
    assert missing.returncode == 2
    assert "no job 'nothing'" in missing.stderr
    assert headway_cli("states", "wait", "nightly", "--tag", "a", "--status", "soon").returncode == 2
    assert headway_cli("states", "nightly", "--task", "9").returncode == 2
    elsewhere = headway_cli("states", "nightly", "--store", f"sqlite:///{tmp_path}/other.db")
    assert elsewhere.returncode == 2
    assert not (tmp_path / "other.db").exists()


@pytest.mark.req("S1-61", "S1-62")
def test_jobs_are_listed_deleted_after_a_yes_and_purged(managers: list[Manager], headway_cli: Run, url: str):
    managers[0].set_started("ingest")
    open_store(url, "old", 1)[0].close()
    assert [line.split("\t")[:2] for line in headway_cli("states", "jobs").stdout.splitlines()] == [
        ["nightly", "2"],
        ["old", "1"],
    ]
    refused = headway_cli("states", "delete", "nightly")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert headway_cli("states", "delete", "old", "--mark", "--yes").returncode == 0
    assert json.loads(headway_cli("states", "jobs", "--json").stdout)["jobs"][1]["deleted"] is True
    assert headway_cli("states", "purge", "--older-than", "30").stdout.split() == ["old"]
    assert headway_cli("states", "delete", "nightly", "--yes").returncode == 0
    assert headway_cli("states", "jobs").stdout == ""


def test_the_store_may_be_set_apart_from_the_database(managers: list[Manager], headway_cli: Run, url: str):
    managers[0].set_started("ingest")
    env = {"HEADWAY_DATABASE": "sqlite:///nowhere.db", "HEADWAY_STATES": url}
    assert headway_cli("states", "nightly", env=env).returncode == 0


@pytest.mark.parametrize("days", ["nan", "-1", "inf", "1e300"])
def test_an_age_that_is_none_is_refused_in_one_line(managers: list[Manager], headway_cli: Run, days: str):
    refused = headway_cli("states", "purge", "--older-than", days)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    waiting = headway_cli("states", "wait", "nightly", "--tag", "a", "--timeout", "nan")
    assert waiting.returncode == 2
    assert "Traceback" not in waiting.stderr
