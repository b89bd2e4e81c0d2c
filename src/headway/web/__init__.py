"""The web application: the API, the live path and the pages, over the stores that are configured.

application = headway.web.app(database="postgresql://headway@db/headway")      # ASGI; mount it or serve it
application = headway.web.with_flask(flask_app)                               # beside a Flask application
headway serve                                                                 # on its own

site      what every route stands on: the stores, who is asking, reading off the loop
application  putting it together         auth     the gate: tokens, sessions, foreign pages
api       /api/v1                        tokens   tokens and sessions in SQL
tickets   an application's own users
actions   what can be changed            live     what changed, to every open page
metrics   /metrics, /healthz, /readyz    problems errors as answers
server    `headway serve`                pages    what people see
beside    `headway run --serve`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.web.application import app as app
    from headway.web.application import with_flask as with_flask
    from headway.web.site import User as User
    from headway.web.tickets import ticket as ticket

__all__ = ["User", "app", "ticket", "with_flask"]
_ROOMS = {"User": "site", "ticket": "tickets"}


def __getattr__(name: str) -> Any:
    """Loaded when it is used: `headway token` needs no web framework."""
    if name not in __all__:
        raise AttributeError(f"module 'headway.web' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"headway.web.{_ROOMS.get(name, 'application')}"), name)
    globals()[name] = value
    return value
