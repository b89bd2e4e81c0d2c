"""The queue as a Flask extension.

    headway = Headway()                      # or Headway(app)

    @headway.handler("caption")
    def caption(task, payload):              # runs inside app.app_context(), in the task's own process
        ...

    def create_app():
        app = Flask(__name__)
        headway.init_app(app)
        return app

Settings are read from ``app.config``, else from the environment and headway.toml: ``HEADWAY_DATABASE``, ``HEADWAY_REDIS``,
``HEADWAY_QUEUE_MODE``, ``HEADWAY_QUEUE_PER_USER``, ``HEADWAY_QUEUE_KEYS``. Nothing is connected before the first use, so an
application may be loaded before Gunicorn forks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from headway.config import Config
from headway.errors import ConfigError
from headway.queue.taskqueue import Mode, TaskQueue

if TYPE_CHECKING:
    from flask import Flask

MODES: tuple[Mode, ...] = ("auto", "rq", "database", "hybrid")


class Headway(TaskQueue):
    """See the module. It is a `TaskQueue`; one object serves one application."""

    def __init__(self, app: Flask | None = None, **options: Any) -> None:
        super().__init__(**options)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        settings = settings_from(app.config)
        self.configure(**settings)
        self.context = app.app_context
        app.extensions["headway"] = self


def settings_from(given: Any) -> dict[str, Any]:
    """What `TaskQueue.configure` takes, from a mapping that has it, else from the environment and headway.toml."""
    config = Config()

    def setting(name: str) -> Any:
        found = given.get(f"HEADWAY_{name}")
        return found if found is not None else os.environ.get(f"HEADWAY_{name}")

    mode = str(setting("QUEUE_MODE") or "auto").lower()
    if mode not in MODES:
        raise ConfigError(f"HEADWAY_QUEUE_MODE={mode!r} is not known.", hint=f"Use one of {', '.join(MODES)}.")
    keys = setting("QUEUE_KEYS") or ()
    return {
        "database": given.get("HEADWAY_DATABASE") or config.text("database"),
        "redis": setting("REDIS") or None,
        "mode": mode,
        "per_user": _per_user(setting("QUEUE_PER_USER")),
        "keys": [key for key in keys.replace(",", " ").split() if key] if isinstance(keys, str) else list(keys),
    }


def _per_user(raw: Any) -> int | None:
    if raw is None:
        return 1
    if str(raw).lower() in ("none", "off", ""):
        return None
    try:
        return int(raw)
    except (TypeError, ValueError):
        raise ConfigError(
            f"HEADWAY_QUEUE_PER_USER={raw!r} is no number of tasks.", hint="Use 1 or more, or none."
        ) from None
