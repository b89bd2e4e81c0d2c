"""`headway worker` with applications as people write them: what they import, and what their handlers start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status

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
