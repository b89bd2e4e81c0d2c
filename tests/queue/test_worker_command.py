"""`headway worker` with applications as people write them: what they import, and what their handlers start."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from tests.queue import app
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

SHOP = """
from headway.queue import TaskQueue

queue = TaskQueue("sqlite:///queue.db", per_user=None)

@queue.handler("double", isolation="{isolation}")
def double(task, payload):
    return payload * 2
"""
ODD_MODULES = """
import sys

class Proxy:
    __slots__ = ()
    __class__ = property(lambda self: type(sys))

    def __getattr__(self, name):
        raise RuntimeError("not configured")

class Lazy(type(sys)):
    def __getattr__(self, name):
        raise ImportError(name)

sys.modules["odd.proxy"], sys.modules["odd.lazy"], sys.modules["odd.none"] = Proxy(), Lazy("odd.lazy"), None
settings = sys.modules["odd.proxy"]
"""

Burst = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Burst:
    """Run `headway worker --burst` in the test's directory."""
    monkeypatch.chdir(tmp_path)

    def run(env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headway", "worker", "--app", "shop:queue", "--burst"]
        return subprocess.run(
            command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=90, check=False
        )

    return run


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_a_worker_runs_encrypted_tasks(burst: Burst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str):
    from cryptography.fernet import Fernet

    monkeypatch.setenv("HEADWAY_QUEUE_KEYS", Fernet.generate_key().decode())
    # An application that uses cryptography itself has `_openssl.lib`, a cffi object, among its modules.
    Path("shop.py").write_text("import cryptography.hazmat.bindings._rust\n" + SHOP.format(isolation=isolation))
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.handler("double")(lambda task, payload: None)
        id = queue.submit("double", 21, user_id="anna").id
        ended = burst()
        assert ended.returncode == 0, ended.stderr
        assert queue.get(id).status is Status.COMPLETED


def test_a_worker_starts_whatever_objects_the_application_has_among_its_modules(burst: Burst, tmp_path: Path):
    Path("shop.py").write_text(ODD_MODULES + SHOP.format(isolation="none"))
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.handler("double")(lambda task, payload: None)
        id = queue.submit("double", 21, user_id="anna").id
        ended = burst()
        assert ended.returncode == 0, ended.stderr
        assert queue.get(id).status is Status.COMPLETED


ROOT = Path(__file__).resolve().parents[2]


def command(home: Path, url: str, redis_url: str | None = None) -> list[str]:
    """`headway worker` on an application in ``home``."""
    text = f"from tests.queue.app import build\nqueue = build({url!r}, redis={redis_url!r})\n"
    # Each text in a module of its own: of a file that was written twice within a second Python may take the compiled first.
    module = f"shop_{zlib.crc32(text.encode())}"
    (home / f"{module}.py").write_text(text)
    return [sys.executable, "-m", "headway", "worker", "--app", f"{module}:queue"]


def surroundings(home: Path) -> dict[str, Any]:
    return {
        "cwd": home,
        "env": {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "HEADWAY_LOG_LEVEL": "info"},
    }


def run_burst(home: Path, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(home, url), "--burst"],
        **surroundings(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.req("S2-03", "S2-04")
@pytest.mark.parametrize(
    ("redis_is", "said"),
    [("up", "INFO queue: Redis is connected"), ("down", "WARNING queue: 🟡 Redis is unreachable at the start")],
)
def test_a_worker_says_at_its_start_whether_redis_can_be_reached(
    tmp_path: Path, redis_factory: Callable[..., RedisServer], redis_is: str, said: str
):
    server, url, log = redis_factory(), f"sqlite:///{tmp_path}/queue.db", tmp_path / "log"
    if redis_is == "down":
        server.kill9()
    with app.build(url) as queue, log.open("w") as stderr:
        task = queue.submit("echo.none", 1)
        with subprocess.Popen(command(tmp_path, url, server.url()), **surroundings(tmp_path), stderr=stderr) as worker:
            eventually(lambda: said in log.read_text(), 60)
            eventually(lambda: queue.get(task.id).status is Status.COMPLETED, 60)
            eventually(lambda: queue.database.all("SELECT 1 FROM alert_rules"), 60)  # it judges the alerts too
            worker.terminate()
            assert worker.wait(60) == 0


@pytest.mark.req("S2-61")
def test_a_worker_with_a_wrong_password_runs_nothing_and_does_not_show_it(
    tmp_path: Path, postgres_factory: Callable[..., PostgresServer]
):
    server = postgres_factory()
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("CREATE ROLE clerk LOGIN PASSWORD 'right-canary'")
        admin.execute("CREATE DATABASE shop OWNER clerk")
        rules = server.directory / "data" / "pg_hba.conf"
        rules.write_text("host all clerk 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        admin.execute("SELECT pg_reload_conf()")
    place = f"127.0.0.1:{server.port}/shop"
    right, wrong = f"postgresql://clerk:right-canary@{place}", f"postgresql://clerk:wrong-canary@{place}"
    with app.build(right) as queue:
        task = queue.submit("echo.fork", 1)
        refused = run_burst(tmp_path, wrong)
        assert refused.returncode != 0
        assert "password authentication failed" in refused.stderr
        assert "canary" not in refused.stderr + refused.stdout
        assert queue.get(task.id).status is Status.QUEUED
        assert run_burst(tmp_path, right).returncode == 0
        assert queue.get(task.id).status is Status.COMPLETED
