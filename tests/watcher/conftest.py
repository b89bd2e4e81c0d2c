from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services.redis import RedisServer
from tests.watcher.scene import Scene


@pytest.fixture
def scene(redis_factory: Callable[..., RedisServer], tmp_path: Path) -> Iterator[Scene]:
    """A Redis that announces changes of sorted sets, nobody watching yet."""
    scene = Scene(redis_factory(notify_keyspace_events="Kz"), tmp_path)
    yield scene
    scene.close()
