"""The process: what it must be told, how it ends, and with which exit code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import telemetry
from headway._sql import connect
from headway.core.lifecycle import Shutdown
from headway.errors import ConfigError, InvalidInput
from headway.watcher.runner import main, settings_from
from tests.services.waiting import eventually
from tests.watcher.fakes import FakeRedis, ports
from tests.watcher.scene import Scene

ENVIRONMENT = {
    "REDIS_URL": "redis://127.0.0.1:1/0",
    "RQ__QUEUE": "digits",
    "DIGITS_EVENTS_CHANNEL": "digits:events",
    "RQ_WATCHER_STUCK_TIMEOUT_SECONDS": "3600",
}


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    """`main` sends the log to stderr; later tests have theirs as it was. What a failed test left running is ended."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()
    logger = logging.getLogger("headway")
    for handler in [one for one in logger.handlers if isinstance(one.formatter, telemetry.LineFormatter)]:
        logger.removeHandler(handler)
    logger.setLevel("NOTSET")


def start(*command: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "RQ_"))}
    process = subprocess.Popen(
        command, cwd=cwd, env=mine | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    STARTED.append(process)
    return process


@pytest.mark.req("S4-17", "S4-28")
@pytest.mark.parametrize(
    "name", ["REDIS_URL", "RQ__QUEUE", "DIGITS_EVENTS_CHANNEL", "RQ_WATCHER_STUCK_TIMEOUT_SECONDS"]
)
@pytest.mark.parametrize("value", [None, ""])
def test_each_required_setting_is_required(name, value, capfd):
    environment = {key: text for key, text in ENVIRONMENT.items() if key != name}
    if value is not None:
        environment[name] = value
    with pytest.raises(ConfigError, match=name):
        settings_from(environment)
    assert main(environment, ports(FakeRedis())) == 2
    assert capfd.readouterr().err.count(f"The watcher needs {name} in its environment") == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"RQ_WATCHER_STUCK_TIMEOUT_SECONDS": "soon"}, ConfigError),
        ({"RQ_WATCHER_STUCK_TIMEOUT_SECONDS": "-1"}, InvalidInput),
        ({"RQ_WATCHER_SWEEP_SECONDS": "0"}, InvalidInput),
        ({"RQ_WATCHER_FIELDS": "{"}, ConfigError),
        ({"RQ_WATCHER_FIELDS": "[]"}, ConfigError),
        ({"RQ__QUEUE": " , "}, InvalidInput),
        ({"RQ__QUEUE": "q\udcff"}, InvalidInput),
        ({"RQ_WATCHER_FIELDS": '{"a": NaN}'}, ConfigError),
        ({"RQ_WATCHER_FIELDS": '{"a": "\\ud800"}'}, ConfigError),
        ({"RQ_WATCHER_PAGE_SIZE": "inf"}, ConfigError),
        ({"RQ_WATCHER_PAGE_SIZE": "nan"}, ConfigError),
        ({"RQ_WATCHER_PAGE_SIZE": "2.5"}, ConfigError),
        ({"RQ_WATCHER_PAGE_SIZE": "1"}, InvalidInput),
        ({"RQ_WATCHER_STREAM_LENGTH": "-inf"}, ConfigError),
        ({"RQ_WATCHER_SWEEP_SECONDS": "inf"}, InvalidInput),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, error):
    with pytest.raises(error):
        settings_from(ENVIRONMENT | changes)


def test_every_setting_is_read():
    settings = settings_from(
        ENVIRONMENT
        | {
            "RQ__QUEUE": "digits, letters",
            "RQ_WATCHER_EVENT": "a.failed",
            "RQ_WATCHER_OUTCOME_EVENT": "a.outcome",
            "RQ_WATCHER_FIELDS": '{"site": "north"}',
            "RQ_WATCHER_PAYLOAD_FIELDS": "user_id,model",
            "RQ_WATCHER_STREAM": "log",
            "RQ_WATCHER_STREAM_LENGTH": "10",
            "RQ_WATCHER_PAGE_SIZE": "50",
            "RQ_WATCHER_SWEEP_SECONDS": "60",
            "RQ_WATCHER_PING_SECONDS": "20",
            "RQ_WATCHER_LOST_GRACE_SECONDS": "3",
        }
    )
    assert settings.queues == ("digits", "letters")
    assert (settings.form.failed, settings.form.outcome) == ("a.failed", "a.outcome")
    assert settings.form.fields == {"site": "north"}
    assert settings.form.payload_fields == ("user_id", "model")
    assert (settings.stream, settings.stream_length, settings.page_size) == ("log", 10, 50)
    assert (settings.sweep_s, settings.ping_s, settings.lost_grace_s) == (60, 20, 3)
    assert settings_from(ENVIRONMENT).form.failed == "digits.train.failed.v1"


def test_a_setting_may_have_the_end_of_line_of_the_file_it_comes_from():
    assert settings_from({name: f"{text}\n" for name, text in ENVIRONMENT.items()}) == settings_from(ENVIRONMENT)


@pytest.mark.req("S4-28")
def test_a_preflight_that_fails_ends_it_with_exit_code_2_and_one_message(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(ENVIRONMENT, ports(FakeRedis(flags="E"))) == 2
    errors = capfd.readouterr().err
    assert errors.count("does not announce") == 1
    assert errors.count("CONFIG SET notify-keyspace-events Kz") == 1


@pytest.mark.req("S4-28")
def test_a_stop_after_one_round_is_exit_code_0(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    redis, shutdown = FakeRedis(), Shutdown()
    redis.on_publish = shutdown.request
    redis.fail("a", "1-0")
    assert main(ENVIRONMENT | {"HEADWAY_LOG_FORMAT": "json"}, ports(redis), shutdown) == 0
    assert len(redis.published) == 1
    assert (tmp_path / "headway.db").exists()


@pytest.mark.req("S4-27")
def test_an_error_of_a_command_is_logged_once_and_ends_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    redis = FakeRedis()
    redis.fail("a", "1-0")

    def refuse() -> None:
        raise ConfigError("OOM command not allowed")

    redis.on_publish = refuse
    assert main(ENVIRONMENT, ports(redis)) == 2
    assert capfd.readouterr().err.count("OOM command not allowed") == 1


@pytest.mark.req("S4-01", "S4-30")
@pytest.mark.parametrize("store", ["", "redis"])
def test_the_command_watches_until_it_is_stopped(scene: Scene, tmp_path, store):
    watcher = start(
        str(Path(sys.executable).parent / "rq_keyspace_watcher"),
        cwd=tmp_path,
        **ENVIRONMENT | {"REDIS_URL": scene.url, "RQ_WATCHER_STORE": store},
    )
    eventually(lambda: scene.redis.pubsub_numpat() == 3 or watcher.poll() is not None, 30)
    scene.burst(1)
    scene.events.expect(("burst-00000", "failed"))
    watcher.send_signal(signal.SIGTERM)
    _, errors = watcher.communicate(timeout=10)
    assert watcher.returncode == 0
    assert errors.count("reported") == 1
    assert (tmp_path / "headway.db").exists() is (store == "")


@pytest.mark.req("S4-12", "S4-20")
def test_headway_watch_ends_with_a_clear_error_when_it_is_cut_off(scene: Scene, tmp_path):
    watcher = start(
        sys.executable, "-m", "headway", "watch", "--redis-url", scene.url, "--queue", "digits",
        "--channel", "digits:events", "--stuck-timeout", "60", "--stream", "log", "--store", "redis",
        cwd=tmp_path,
    )  # fmt: skip
    eventually(lambda: scene.redis.pubsub_numpat() == 3 or watcher.poll() is not None, 30)
    (link,) = [one for one in scene.redis.client_list() if one["name"] == "headway-watcher" and one["psub"] != "0"]
    scene.redis.client_kill_filter(_id=link["id"])
    _, errors = watcher.communicate(timeout=10)
    assert watcher.returncode == 6
    assert errors.count("cannot be reached") == 1
    assert "Traceback" not in errors


@pytest.mark.req("S4-12")
def test_without_a_redis_it_ends_with_exit_code_6_and_no_secret_in_its_message(tmp_path):
    watcher = start(
        sys.executable, "-m", "headway", "watch", cwd=tmp_path,
        **ENVIRONMENT | {"REDIS_URL": "redis://:hunter2222@127.0.0.1:1/0"},
    )  # fmt: skip
    _, errors = watcher.communicate(timeout=30)
    assert watcher.returncode == 6
    assert errors.count("cannot be reached") == 1
    assert "hunter2222" not in errors


@pytest.mark.req("S4-12")
@pytest.mark.parametrize("url", ["nonsense", "redis://h:port/1", "redis://:qqq#zzz@h/0", "redis://h/0?protocol=3"])
@pytest.mark.parametrize("store", ["", "redis"])
def test_an_address_that_makes_no_sense_is_exit_code_2_and_one_message(tmp_path, url, store):
    watcher = start(
        sys.executable, "-m", "headway", "watch", cwd=tmp_path,
        **ENVIRONMENT | {"REDIS_URL": url, "RQ_WATCHER_STORE": store},
    )  # fmt: skip
    _, errors = watcher.communicate(timeout=30)
    assert watcher.returncode == 2
    assert errors.count("REDIS_URL is not a valid address") == 1
    assert "Traceback" not in errors
    assert "qqq" not in errors
    assert "zzz" not in errors


@pytest.mark.parametrize("store", ["", "redis"])
def test_a_stop_during_a_long_catch_up_ends_it_and_the_next_run_continues(scene: Scene, tmp_path, store):
    ids = scene.burst(3_000)
    environment = ENVIRONMENT | {
        "REDIS_URL": scene.url, "RQ_WATCHER_STORE": store, "RQ_WATCHER_PAGE_SIZE": "10", "PYTHONWARNINGS": "error",
    }  # fmt: skip
    command = ("sh", "-c", f"exec {sys.executable} -m headway watch 2>>log")  # nobody empties a pipe meanwhile
    watcher = start(*command, cwd=tmp_path, **environment)
    eventually(lambda: scene.events.hear(most=1), 120)
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(60) == 0
    assert 0 < len(scene.events.hear()) < len(ids)
    assert ": watching" not in (tmp_path / "log").read_text()  # it had not caught up yet
    watcher = start(*command, cwd=tmp_path, **environment)
    scene.events.expect(*[(job_id, "failed") for job_id in ids], timeout=120)
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(60) == 0


def test_started_where_the_ends_of_children_are_ignored_it_knows_how_the_programs_of_its_sinks_end(tmp_path):
    """Some supervisors leave SIGCHLD ignored to what they start."""
    begin = (
        "import atexit, signal; from headway.watcher.runner import script; "
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "atexit.register(lambda: print(signal.getsignal(signal.SIGCHLD).name)); script()"
    )
    watcher = start(sys.executable, "-c", begin, cwd=tmp_path)
    assert watcher.communicate(timeout=60)[0] == "SIG_DFL\n"


def test_events_are_put_into_the_outbox_when_sinks_are_configured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    redis, shutdown = FakeRedis(), Shutdown()
    redis.on_publish = shutdown.request
    redis.fail("a", "1-0")
    assert main(ENVIRONMENT | {"HEADWAY_SINKS": "log:"}, ports(redis), shutdown) == 0
    with connect(f"sqlite:///{tmp_path}/headway.db") as database:
        assert [job for (job,) in database.all("SELECT job FROM outbox")] == ["a"]


def test_with_its_record_in_redis_it_logs_that_sinks_get_no_events(scene: Scene, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutdown = Shutdown()
    shutdown.request()
    changes = {"REDIS_URL": scene.url, "RQ_WATCHER_STORE": "redis", "HEADWAY_SINKS": "log:"}
    assert main(ENVIRONMENT | changes, shutdown=shutdown) == 0
    assert "sinks receive no events" in capfd.readouterr().err


def test_the_example_runs_and_its_events_are_those_it_expects():
    example = Path(__file__).parents[2] / "examples" / "training" / "run.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("digits.train.failed.v1") == 5
