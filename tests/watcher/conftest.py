from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.redis import RedisServer
from tests.watcher.scene import Scene


@pytest.fixture
def scene(redis_server: RedisServer, tmp_path: Path) -> Iterator[Scene]:
    """A Redis that announces changes of sorted sets, nobody watching yet."""
    client = redis_server.client()
    client.config_set("notify-keyspace-events", "Kz")
    client.config_resetstat()
    scene = Scene(redis_server, tmp_path)
    yield scene
    scene.close()
    if redis_server.running:
        redis_server.sigcont()
        client.acl_deluser("operator")
