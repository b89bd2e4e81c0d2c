"""The queue as a Flask extension.

    headway = Headway()                      # or Headway(app)

    @headway.handler("caption")
    def caption(task, payload):              # runs inside app.app_context(), in the task's own process
        ...

    def create_app():
        app = Flask(__name__)
        headway.init_app(app)
        return app

Settings are read from ``app.config``, else from the environment and headway.toml, under the same names: ``HEADWAY_DATABASE``,
``HEADWAY_REDIS``, ``HEADWAY_QUEUE_MODE``, ``HEADWAY_QUEUE_PER_USER``, ``HEADWAY_QUEUE_KEYS`` and all the others of the queue.
Before `init_app` handlers can be registered, and every other use raises an error: the queue has no database yet.
Nothing is connected before the first use, so an application may be loaded before Gunicorn forks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.queue.settings import application_config
from headway.queue.task_queue import TaskQueue

if TYPE_CHECKING:
    from flask import Flask


class Headway(TaskQueue):
    """A `TaskQueue` for one Flask application; see the module."""

    def __init__(self, app: Flask | None = None, **options: Any) -> None:
        super().__init__(**options)
        if "database" not in options:
            self.backend.url = None  # the application's settings name the database; there is no default
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Configure the queue from the application's settings and register the extension."""
        self.configure_from(application_config(app.config))
        self.context = app.app_context
        app.extensions["headway"] = self
