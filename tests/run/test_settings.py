"""Settings of `headway run`, `headway.map`, `headway.open_job` and `headway.track`: one set, from the same places."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.errors import ConfigError
from headway.ledger import Ledger

SETTINGS = {
    "workers": "3",
    "mode": "thread",
    "retries": "4",
    "retry_delay": "0.25",
    "timeout": "50",
    "rate": "400",
    "max_failures": "7",
}
USED = {
    "workers": 3,
    "mode": "thread",
    "retries": 4,
    "retry_delay": 0.25,
    "timeout": 50.0,
    "rate": 400.0,
    "max_failures": 7,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_of_last_run(job: str) -> dict[str, Any]:
    with Ledger.open("sqlite:///headway.db") as ledger:
        return dict(ledger.job(job).runs()[-1].settings)


def double(n: int) -> int:
    return 2 * n


def test_map_takes_every_setting_of_a_run_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"HEADWAY_{name.upper()}", value)
    headway.map(double, [1, 2], job="ads", progress="none")
    assert settings_of_last_run("ads") == USED


def test_map_takes_every_setting_of_a_run_from_the_file_and_an_argument_wins(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    (here / "headway.toml").write_text("".join(f'{name} = "{value}"\n' for name, value in SETTINGS.items()))
    monkeypatch.setenv("HEADWAY_RETRIES", "5")
    headway.map(double, [1, 2], job="ads", progress="none", workers=2, rate=90)
    assert settings_of_last_run("ads") == USED | {"retries": 5, "workers": 2, "rate": 90.0}


def test_run_and_map_use_the_same_settings(
    here: Path, headway_cli: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
):
    (here / "work.py").write_text("def double(n):\n    return 2 * n\n")
    (here / "items.jsonl").write_text("1\n2\n")
    environment = {f"HEADWAY_{name.upper()}": value for name, value in SETTINGS.items()}
    done = headway_cli("run", "work:double", "--items", "items.jsonl", "--job", "cli", env=environment)
    assert done.returncode == 0, done.stderr
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    headway.map(double, [1, 2], job="map", progress="none")
    assert settings_of_last_run("cli") == settings_of_last_run("map") == USED


def test_progress_of_map_and_track_follows_the_settings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HEADWAY_PROGRESS", "json")
    headway.map(double, [1, 2], job="ads", workers=1)
    assert [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()][-1] == "end"
    list(headway.track([1, 2], job="loop"))
    assert [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()][-1] == "end"
    list(headway.track([1, 2], job="quiet", progress="none"))
    assert capfd.readouterr().err == ""


def test_retries_of_an_open_job_follow_the_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_RETRIES", "0")
    with headway.open_job("ads", [1]) as job:
        for item in job.remaining():
            with item:
                raise ValueError("no")
        assert job.progress().dead == 1


def test_a_bad_variable_is_an_error_of_map_before_anything_is_written(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_RATE", "fast")
    with pytest.raises(ConfigError, match=r"HEADWAY_RATE: rate must be a number above 0 \(got 'fast'\)"):
        headway.map(double, [1, 2], job="ads", progress="none")
    assert not (here / "headway.db").exists()


def test_a_delay_of_retries_is_given_on_the_command_line(
    here: Path, headway_cli: Callable[..., subprocess.CompletedProcess[str]]
):
    (here / "items.jsonl").write_text("1\n")
    (here / "work.py").write_text("def double(n):\n    return 2 * n\n")
    words = ("run", "work:double", "--items", "items.jsonl", "--job", "ads")
    assert headway_cli(*words, "--retry-delay", "0.5").returncode == 0
    assert settings_of_last_run("ads")["retry_delay"] == 0.5
    refused = headway_cli(*words, "--retry-delay", "-1")
    assert (refused.returncode, "retry_delay must be a number from 0" in refused.stderr) == (2, True)


@pytest.mark.parametrize("progress", ["plain", "json"])
def test_a_misspelt_variable_is_one_line_on_the_terminal(
    here: Path, headway_cli: Callable[..., subprocess.CompletedProcess[str]], progress: str
):
    (here / "items.jsonl").write_text("1\n")
    (here / "work.py").write_text("def double(n):\n    return 2 * n\n")
    said = "HEADWAY_WOKERS is not a setting and is ignored. Did you mean HEADWAY_WORKERS?"
    done = headway_cli(
        "run", "work:double", "--items", "items.jsonl", "--progress", progress, env={"HEADWAY_WOKERS": "4"}
    )
    assert done.returncode == 0
    if progress == "json":
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert [line["message"] for line in lines if line["event"] == "warning"] == [said]
    else:
        assert f"Warning: {said}\n" in done.stderr
        assert ".py:" not in done.stderr
    jobs = headway_cli("jobs", env={"HEADWAY_WOKERS": "4"})
    assert jobs.stderr == f"Warning: {said}\n"
