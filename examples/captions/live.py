"""Headway's API, live connections and dashboard for the users of the shop: an ASGI application beside Gunicorn.

A user who is signed in at the shop is known here by the shop's own session cookie. Users see their own tasks,
administrators see everything.
"""

from __future__ import annotations

from itsdangerous import BadSignature
from shop import create_app
from starlette.requests import HTTPConnection

import headway.web

shop = create_app()
sessions = shop.session_interface.get_signing_serializer(shop)
if sessions is None:
    raise SystemExit("Set FLASK_SECRET_KEY to the text that Gunicorn has.")


def user(connection: HTTPConnection) -> headway.web.User | None:
    """Return who is signed in at the shop."""
    try:
        session = sessions.loads(connection.cookies.get("session", ""), max_age=31 * 86400)
    except BadSignature:
        return None
    return headway.web.User(session["user"], session["role"]) if "user" in session else None


application = headway.web.app(users=user)
