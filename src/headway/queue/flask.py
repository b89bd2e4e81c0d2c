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
Before `init_app` the queue has no database and refuses to be used; handlers can be registered.
Nothing is connected before the first use, so an application may be loaded before Gunicorn forks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.queue.settings import application_config
from headway.queue.task_queue import TaskQueue

if TYPE_CHECKING:
    from flask import Flask


class Headway(TaskQueue):
    """See the module. It is a `TaskQueue`; one object serves one application."""

    def __init__(self, app: Flask | None = None, **options: Any) -> None:
        super().__init__(**options)
        if "database" not in options:
            self._url = None  # the application's settings name it: a default here would be an empty database of its own
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        self.configure_from(application_config(app.config))
        self.context = app.app_context
        app.extensions["headway"] = self
