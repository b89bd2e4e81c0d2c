"""The web application: the API, the live path and the pages over the configured stores.

 application = headway.web.app(database="postgresql://headway@db/headway")      # ASGI; mount it or serve it
application = headway.web.with_flask(flask_app)                               # combined with a Flask application
headway serve                                                                 # standalone

 application  assembles the parts            auth      authenticates requests
gate      checks every request           login     /login, /logout, /enter
api       /api/v1                        routes    what all API routes share
actions   changes                        bulk      changes of many records at once
live      pushes changes to open pages   monitor   follows the states of a job
site      stores, users, thread pools    throttle  limits wrong tokens
tokens    tokens and sessions in SQL     tickets   signed logins by another application
metrics   /metrics, /healthz, /readyz    problems  errors as HTTP responses
server    `headway serve`                beside    `headway run --serve`
pages     the HTML pages                 openapi   the OpenAPI document
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.web.application import app as app
    from headway.web.application import with_flask as with_flask
    from headway.web.auth.tickets import ticket as ticket
    from headway.web.site import User as User

__all__ = ["User", "app", "ticket", "with_flask"]
_ROOMS = {"User": "site", "ticket": "auth.tickets"}


def __getattr__(name: str) -> Any:
    """Import on first use, because `headway token` needs no web framework."""
    if name not in __all__:
        raise AttributeError(f"module 'headway.web' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"headway.web.{_ROOMS.get(name, 'application')}"), name)
    globals()[name] = value
    return value
