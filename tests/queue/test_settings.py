"""Settings of the queue: where they come from, what is refused, and what changes while workers run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from flask import Flask

from headway.config import PROFILES, Config
from headway.errors import ConfigError, InvalidInput, Unavailable
from headway.queue.flask import Headway
from headway.queue.settings import LIVE, LiveSettings
from headway.queue.task import Status, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
KEY = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
#: An application that goes by the settings.
SHOP = """
from headway.queue import TaskQueue
queue = TaskQueue.from_settings()
queue.handler("caption", isolation="none")(lambda task, payload: payload)
"""
Spawn = Callable[..., subprocess.Popen[str]]
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which no setting is made."""
    monkeypatch.chdir(tmp_path)
    for option in ("DATABASE", "REDIS", "PROFILE"):
        monkeypatch.delenv(f"HEADWAY_{option}", raising=False)
    return tmp_path


def handle(queue: TaskQueue) -> TaskQueue:
    queue.handler("caption", isolation="none")(lambda task, payload: payload)
    return queue


# ---- where they come from --------------------------------------------------------------------------------------------


@pytest.mark.req("S2-42")
@pytest.mark.parametrize("per_user", ["1", "2", "none"])
@pytest.mark.parametrize("keys", ["", KEY])
def test_the_environment_configures_a_queue(
    home: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer, per_user: str, keys: str
):
    monkeypatch.setenv("HEADWAY_DATABASE", "sqlite:///tasks.db")
    monkeypatch.setenv("HEADWAY_REDIS", redis_server.url(0))
    monkeypatch.setenv("HEADWAY_QUEUE_PER_USER", per_user)
    monkeypatch.setenv("HEADWAY_QUEUE_KEYS", keys)
    with handle(TaskQueue.from_settings()) as queue:
        assert queue.backend.redis_url == redis_server.url(0)
        for n in range({"1": 1, "2": 2}.get(per_user, 5)):
            queue.submit("caption", {"secret": n}, user_id="anna")
        if per_user != "none":
            with pytest.raises(UserBusy):
                queue.submit("caption", user_id="anna")
        [(payload,), *_] = queue.database.all("SELECT payload FROM tasks")
        assert ("secret" in payload) == (keys == "")
    assert (home / "tasks.db").exists()


@pytest.mark.req("S2-42")
@pytest.mark.parametrize(
    ("environment", "redis"),
    [
        ({}, None),
        ({"HEADWAY_REDIS": "redis://h:1/2"}, "redis://h:1/2"),
        ({"HEADWAY_REDIS": "redis://h:1/2", "HEADWAY_QUEUE_REDIS": "redis://h:1/3"}, "redis://h:1/3"),
        ({"HEADWAY_REDIS": "redis://h:1/2", "HEADWAY_QUEUE_MODE": "database"}, None),
        ({"HEADWAY_REDIS": "redis://h:1/2", "HEADWAY_QUEUE_MODE": "hybrid"}, "redis://h:1/2"),
    ],
)
def test_a_redis_is_used_where_one_is_named_and_the_mode_wants_it(home: Path, environment: dict[str, str], redis: str):
    assert TaskQueue.from_settings(Config(environment=environment)).backend.redis_url == redis


@pytest.mark.req("S2-42")
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("QUEUE_MODE", "fast", "one of auto, rq, database, hybrid"),
        ("QUEUE_PER_USER", "0", "at least 1"),
        ("QUEUE_PER_USER", "many", "whole number"),
        ("QUEUE_PER_USER", "10001", "at most 10,000"),
        ("QUEUE_KEYS", "abc", "not a Fernet key"),
        ("QUEUE_MODE", "rq", "needs a Redis"),
        ("QUEUE_WORKERS", "0", "at least 1"),
        ("QUEUE_MEMORY_LIMIT", "1", "at least 10"),
        ("QUEUE_DRAIN", "-1", "from 0"),
        ("QUEUE_DRAIN", "nan", "from 0"),
        ("QUEUE_TIMEOUT", "0", "above 0"),
    ],
)
def test_a_bad_setting_is_one_error_before_anything_is_connected(home: Path, name: str, value: str, says: str):
    environment = {f"HEADWAY_{name}": value}
    with pytest.raises((ConfigError, InvalidInput), match=says):
        TaskQueue.from_settings(Config(environment=environment))
    with pytest.raises((ConfigError, InvalidInput), match=says):
        Headway(application(**environment))
    assert list(home.iterdir()) == []


def application(**config: Any) -> Flask:
    made = Flask("shop")
    made.config.update(config)
    return made


@pytest.mark.req("S2-42")
def test_an_application_says_the_same_things_and_goes_before_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_QUEUE_PER_USER", "7")
    monkeypatch.setenv("HEADWAY_QUEUE_WORKERS", "3")
    (home / "headway.toml").write_text('queue_drain = 9\nqueue_workers = 4\ndatabase = "sqlite:///file.db"\n')
    with Headway(application(HEADWAY_QUEUE_PER_USER=2, HEADWAY_QUEUE_KEYS=[KEY, KEY.encode()])) as queue:
        handle(queue)
        found = queue.backend.worker_config({"queue_batch": 5})
        assert (found["queue_per_user"], found["queue_workers"], found["queue_drain"]) == (2, 3, 9.0)
        assert (found["queue_batch"], found.texts("queue_keys")) == (5, (KEY, KEY))
        for _ in range(2):
            queue.submit("caption", user_id="anna")
        with pytest.raises(UserBusy):
            queue.submit("caption", user_id="anna")
    with pytest.raises(ConfigError, match="HEADWAY_QUEUE_PERUSER") as refused:
        Headway(application(HEADWAY_QUEUE_PERUSER=2))
    assert "HEADWAY_QUEUE_PER_USER" in refused.value.hint


def test_what_the_settings_say_cannot_be_said_a_second_time(home: Path):
    with pytest.raises(InvalidInput, match="per_user"):
        TaskQueue.from_settings(per_user=2)


@pytest.mark.req("S2-42")
def test_keys_are_shown_to_nobody(home: Path, headway_cli: Cli):
    shown = headway_cli("config", "--show-origin", env={"HEADWAY_QUEUE_KEYS": KEY})
    assert 'queue_keys = "***"    # HEADWAY_QUEUE_KEYS' in shown.stdout
    assert KEY not in shown.stdout + shown.stderr


@pytest.mark.req("S2-44")
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_each_profile_boots(home: Path, headway_cli: Cli, profile: str):
    (home / "shop.py").write_text(SHOP)
    with handle(TaskQueue("sqlite:///headway.db")) as queue:
        task = queue.submit("caption")
        environment = {"HEADWAY_PROFILE": profile}
        answer = headway_cli("worker", "--app", "shop:queue", "--burst", env=environment)
        assert (answer.returncode, queue.get(task.id).status) == (0, Status.COMPLETED), answer.stderr
    shown = json.loads(headway_cli("queue", "settings", "--json", env=environment).stdout)
    found = {one["name"]: (one["value"], one["origin"]) for one in shown["settings"]}
    assert found.keys() == LIVE.keys()
    for name in LIVE:
        if f"queue_{name}" in PROFILES[profile]:
            assert found[name] == (PROFILES[profile][f"queue_{name}"], f"profile {profile}")


@pytest.mark.req("S2-44")
def test_a_profile_is_weaker_than_the_file_and_its_table_is_stronger(home: Path):
    (home / "headway.toml").write_text("queue_workers = 3\n[profiles.production]\nqueue_drain = 7\n")
    found = Config(environment={"HEADWAY_PROFILE": "production"})
    assert (found["queue_workers"], found["queue_drain"], found["queue_max_workers"]) == (3, 7.0, 8)
    with pytest.raises(ConfigError, match="development, production, staging"):
        Config(environment={"HEADWAY_PROFILE": "live"})


# ---- live ------------------------------------------------------------------------------------------------------------


class Clock:
    """A look is due whenever the test says so."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def _trail(queue: TaskQueue) -> list[str]:
    return [action for (action,) in queue.database.all("SELECT action FROM audit ORDER BY seq")]


@pytest.mark.req("S2-43")
def test_a_setting_in_sql_goes_before_the_file_and_a_bad_one_leaves_the_one_before(
    home: Path, database_url: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "headway")
    with TaskQueue(database_url) as queue:
        live = LiveSettings(lambda: queue.database, Config(environment={"HEADWAY_QUEUE_BATCH": "20"}), clock=Clock())
        assert live.refresh()
        assert not live.refresh()
        assert (live.in_force.batch, live.in_force.memory_limit) == (20, 500 * 2**20)
        queue.set("batch", 30, by="root")
        queue.set("memory_limit", "100", by="root")
        assert live.refresh()
        assert (live.in_force.batch, live.in_force.memory_limit) == (30, 100 * 2**20)
        (home / "headway.toml").write_text("queue_cancel_grace = 1.5\nqueue_batch = 99\n")
        assert live.refresh()
        assert (live.in_force.batch, live.in_force.cancel_grace) == (30, 1.5)

        caplog.clear()
        queue.database.write("UPDATE task_settings SET value = 'many' WHERE name = 'batch'")
        (home / "headway.toml").write_text("queue_cancel_grace = -1\n")
        for _ in range(3):
            assert not live.refresh()
        assert (live.in_force.batch, live.in_force.cancel_grace) == (30, 1.5)
        assert [("invalid" in record.message, record.levelname) for record in caplog.records] == [(True, "WARNING")] * 2

        assert not queue.unset("drain", by="root"), "it was not set"
        assert _trail(queue) == ["queue.set", "queue.set"]
        assert queue.unset("batch", by="root")
        assert _trail(queue) == ["queue.set", "queue.set", "queue.unset"]
        (home / "headway.toml").unlink()
        assert live.refresh()
        assert (live.in_force.batch, live.in_force.cancel_grace) == (20, 5.0)
        assert not queue.unset("batch", by="root")
        trail = queue.database.all("SELECT actor, action, detail FROM audit ORDER BY seq")
        assert [(actor, action) for actor, action, _ in trail] == [
            ("root", "queue.set"),
            ("root", "queue.set"),
            ("root", "queue.unset"),
        ]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("bacth", 5, "'bacth' is not a setting"),
        ("batch", "many", "whole number"),
        ("batch", True, "whole number"),
        ("batch", 0, "at least 1"),
        ("batch", "9" * 5000, "whole number"),
        ("drain", float("nan"), "from 0"),
        ("drain", None, "from 0"),
        ("app.per_user", 5, "is not a setting"),
        ("x" * 5000, 5, "is not a setting"),
    ],
)
def test_a_setting_that_is_not_acceptable_is_refused_and_changes_nothing(
    queue: TaskQueue, name: str, value: object, says: str
):
    with pytest.raises(InvalidInput, match=says) as refused:
        queue.set(name, value)
    assert refused.value.hint
    assert len(str(refused.value)) < 300
    assert queue.database.all("SELECT name FROM task_settings") == []


@pytest.mark.req("S2-43")
def test_the_longest_run_and_the_memory_limit_change_under_a_running_worker(home: Path, database_url: str):
    with app.build(database_url) as queue:
        live = LiveSettings(lambda: queue.database, Config(environment={}), clock=Clock())
        worker = Worker(queue, live=live)
        queue.submit("sleep.fork", 0.01, id="before")
        worker.tick()
        queue.set("timeout", 0.6)
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # a task's process begins as large as its worker
        queue.set("memory_limit", pages * os.sysconf("SC_PAGE_SIZE") // 2**20 + 100)
        queue.submit("hog.fork", id="hog")
        queue.submit("patient.fork", str(home / "begun"), id="long")
        worker.tick()
        worker.tick()
        outcomes = "SELECT t.id, a.outcome FROM task_attempts a JOIN tasks t ON t.no = a.task"
        runs: dict[str, str] = dict(queue.database.all(outcomes))
        assert queue.get("before").status is Status.COMPLETED
        assert runs["long"] == "timeout"
        assert runs["hog"] in ("memory", "timeout")  # whichever comes first on a slow machine


@pytest.fixture
def shop(home: Path, postgres_url: str) -> Iterator[tuple[TaskQueue, dict[str, str]]]:
    """An application in a directory, and the environment in which its workers are started."""
    (home / "shop.py").write_text(f"from tests.queue.app import build\nqueue = build({postgres_url!r})\n")
    with app.build(postgres_url) as queue:
        yield queue, {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}


def living(queue: TaskQueue) -> dict[str, int]:
    rows = queue.database.all("SELECT name, pid FROM task_workers WHERE ended_at IS NULL")
    return dict(rows)


def follow(process: subprocess.Popen[str]) -> list[str]:
    """What a process says, line by line, as it comes."""
    lines: list[str] = []
    assert process.stderr is not None
    threading.Thread(target=lambda stream: lines.extend(iter(stream.readline, "")), args=(process.stderr,)).start()
    return lines


@pytest.mark.req("S2-43")
def test_workers_are_added_and_their_settings_change_without_a_restart(
    shop: tuple[TaskQueue, dict[str, str]], home: Path, spawn_cli: Spawn, headway_cli: Cli, postgres_url: str
):
    queue, environment = shop
    supervisor = spawn_cli("worker", "--app", "shop:queue", env=environment)
    said = follow(supervisor)
    first = eventually(lambda: living(queue), 60)
    answer = headway_cli("queue", "set", "workers", "2", "-d", postgres_url)
    assert answer.returncode == 0, answer.stderr
    eventually(lambda: len(living(queue)) == 2, 60)
    both = living(queue)
    assert first.items() <= both.items(), "the first one goes on, in the same process"
    queue.database.write("UPDATE task_settings SET value = '-5' WHERE name = 'workers'")
    (home / "headway.toml").write_text("queue_timeout = 0.5\n")

    def a_run_took_too_long() -> bool:
        if not queue.list(status=Status.QUEUED) and not queue.list(status=Status.RUNNING):
            queue.submit("progress.fork", 0.2)  # takes two seconds
        return any("TimedOut" in (task.error or "") for task in queue.list(status=Status.FAILED))

    eventually(a_run_took_too_long, 60)
    eventually(lambda: any("a setting is invalid" in line for line in said), 60)
    assert living(queue).items() == both.items(), "the refused number of workers changed nothing"
    assert supervisor.poll() is None
    supervisor.terminate()
    assert supervisor.wait(60) == 0


@pytest.mark.req("S2-45", "S2-33")
def test_another_redis_in_the_file_is_used_without_a_restart(
    home: Path, postgres_url: str, redis_factory: Callable[..., RedisServer], spawn_cli: Spawn
):
    old, new = redis_factory(), redis_factory()
    settings = home / "headway.toml"
    settings.write_text(f'database = "{postgres_url}"\nredis = "{old.url(0)}"\n')
    (home / "shop.py").write_text(SHOP)
    with handle(TaskQueue.from_settings()) as queue:
        supervisor = spawn_cli("worker", "--app", "shop:queue", stderr=subprocess.DEVNULL)
        eventually(lambda: old.client().smembers("rq:workers"), 60)
        first = queue.submit("caption", 1)
        eventually(lambda: queue.get(first.id).status is Status.COMPLETED, 60)
        [pid] = living(queue).values()
        settings.write_text(f'database = "{postgres_url}"\nredis = "{new.url(0)}"\n')
        eventually(lambda: new.client().smembers("rq:workers"), 60)
        old.kill9()
        eventually(lambda: queue.hints is not None and queue.backend.redis_url == new.url(0), 60)
        queue.pause("normal", reason="look at the hint", by="root")
        second = queue.submit("caption", 2)
        assert new.client().exists(f"rq:job:{second.id}"), "the submitter tells the new one"
        queue.resume("normal")
        eventually(lambda: queue.get(second.id).status is Status.COMPLETED, 60)
        assert list(living(queue).values()) == [pid], "the worker is the same process"
        supervisor.terminate()
        supervisor.wait(60)


def test_a_file_that_names_another_database_or_a_bad_redis_changes_nothing(
    home: Path, caplog: pytest.LogCaptureFixture
):
    settings = home / "headway.toml"
    settings.write_text('database = "sqlite:///a.db"\nredis = "redis://127.0.0.1:1/0"\n')
    with handle(TaskQueue.from_settings()) as queue:
        task = queue.submit("caption")
        for bad in (
            'database = "sqlite:///b.db"\n',
            "queue_mode = 'rq'\n",
            "redis = 'nonsense'\n",
            "[",
            "queue_keys='x'",
        ):
            settings.write_text(
                f"{bad if 'database' in bad else 'database = ' + repr('sqlite:///a.db') + chr(10) + bad}"
            )
            queue.backend.refresh()
            assert queue.get(task.id).id == task.id
        assert not (home / "b.db").exists()
    said = [record.message for record in caplog.records if "headway.toml" in record.message]
    assert len(said) == 5, said


# ---- connecting ------------------------------------------------------------------------------------------------------


@pytest.mark.req("S2-03")
@pytest.mark.parametrize("state", ["up", "down"])
def test_who_is_reached_is_said_when_the_workers_start(
    home: Path, redis_factory: Callable[..., RedisServer], spawn_cli: Spawn, state: str
):
    redis = redis_factory()
    if state == "down":
        redis.kill9()
    (home / "shop.py").write_text(SHOP)
    environment = {"HEADWAY_REDIS": redis.url(0), "HEADWAY_DATABASE": "sqlite:///q.db"}
    supervisor = spawn_cli("worker", "--app", "shop:queue", env=environment)
    said = follow(supervisor)
    expected = "Redis is connected" if state == "up" else "Redis is unreachable at the start"
    eventually(lambda: any(expected in line for line in said), 60)
    assert any("the database is connected" in line for line in said)
    supervisor.terminate()
    assert supervisor.wait(60) == 0


@pytest.mark.req("S2-61")
def test_workers_authenticate_at_the_database_and_a_wrong_password_ends_them(
    home: Path, postgres_factory: Callable[..., PostgresServer], headway_cli: Cli
):
    server = postgres_factory()
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE app LOGIN PASSWORD 'right-geheim' SUPERUSER")
        rules = server.directory / "data" / "pg_hba.conf"
        rules.write_text(f"host all app 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        connection.execute("SELECT pg_reload_conf()")
    url = server.url().replace("headway@", "app:{}@")

    def refused() -> bool:
        try:
            psycopg.connect(url.format("wrong-geheim")).close()
        except psycopg.OperationalError:
            return True
        return False

    eventually(refused)
    (home / "shop.py").write_text(SHOP)
    with handle(TaskQueue(url.format("right-geheim"))) as queue:
        task = queue.submit("caption")
        for password, code, status in (("wrong-geheim", 6, Status.QUEUED), ("right-geheim", 0, Status.COMPLETED)):
            environment = {"HEADWAY_DATABASE": url.format(password)}
            answer = headway_cli("worker", "--app", "shop:queue", "--burst", env=environment)
            assert (answer.returncode, queue.get(task.id).status) == (code, status), answer.stderr
            assert "geheim" not in answer.stderr
    with TaskQueue(url.format("wrong-geheim")) as wrong, pytest.raises(Unavailable, match="refused the connection"):
        wrong.list()


# ---- what an application says of itself ------------------------------------------------------------------------------


@pytest.mark.req("S2-21", "S2-57")
def test_ids_come_from_the_applications_own_hook_and_the_same_row_is_updated(database_url: str):
    made: list[str] = []

    def caption_security_manager() -> str:
        made.append(f"secure-{len(made)}")
        return made[-1]

    with handle(TaskQueue(database_url, new_id=caption_security_manager)) as queue:
        tasks = [queue.submit("caption", n) for n in range(2)]
        assert [task.id for task in tasks] == made == ["secure-0", "secure-1"]
        before = queue.database.all("SELECT no, id, version FROM tasks ORDER BY no")
        Worker(queue).run(burst=True)
        after = queue.database.all("SELECT no, id, version, status FROM tasks ORDER BY no")
        assert [row[:2] for row in after] == [row[:2] for row in before], "the same rows"
        assert {row[3] for row in after} == {"COMPLETED"}
        kinds = [kind for (kind,) in queue.database.all("SELECT type FROM outbox WHERE job = 'secure-0' ORDER BY seq")]
        assert kinds == ["task.queued", "task.running", "task.completed"]
    with handle(TaskQueue(database_url, new_id=lambda: "../../etc")) as queue, pytest.raises(InvalidInput):
        queue.submit("caption")


@pytest.mark.req("S2-57")
def test_ids_are_secrets_unless_an_application_makes_its_own(crowd: TaskQueue):
    ids = {task.id for task in crowd.submit_many([{"kind": "caption"}] * 300)}
    assert len(ids) == 300
    assert all(len(id) == 32 and set(id) <= set("0123456789abcdef") for id in ids)
    shared = [
        sum(a == b for a, b in zip(one, other, strict=True)) for one, other in zip(ids, list(ids)[1:], strict=False)
    ]
    assert max(shared) < 16, "nothing in them counts or is a time"


def test_a_retry_from_the_command_line_knows_how_many_tasks_the_application_allows(
    home: Path, database_url: str, headway_cli: Cli
):
    with handle(TaskQueue(database_url, per_user=3)) as queue:
        tasks = [queue.submit("caption", n, user_id="anna") for n in range(3)]
        queue.cancel(tasks[0].id, by="anna")
        answer = headway_cli("task", "retry", tasks[0].id, "--yes", "-d", database_url)
        assert answer.returncode == 0, answer.stderr
        assert len(queue.list(status="QUEUED", user_id="anna")) == 3
        queue.cancel(tasks[1].id, by="anna")
        queue.submit("caption", 5, user_id="anna")
        assert headway_cli("task", "retry", tasks[1].id, "--yes", "-d", database_url).returncode == 5
