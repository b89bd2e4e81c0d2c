"""A small Flask application whose users ask for captions of their pictures, which takes a while.

Users have one task at a time; administrators go first, may look at everything and pause a queue. Who somebody is comes
from the header ``X-User`` (and ``X-Role: admin``): put a real login in its place.
"""

from __future__ import annotations

import time
from typing import Any

from flask import Flask, Response, abort, current_app, jsonify, request

from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.queue.flask import Headway
from headway.queue.values import UserBusy

headway = Headway()


@headway.handler("caption", timeout=60, retries=3, retry_delay=0.5)
def caption(task: Any, payload: dict[str, Any]) -> dict[str, str]:
    """Looks at a picture, thoroughly. It runs in a process of its own, inside the application's context."""
    words = []
    for step, word in enumerate(current_app.config["VOCABULARY"], start=1):
        if task.cancelled:
            break
        time.sleep(float(payload.get("seconds", 0.1)))
        words.append(word)
        task.progress(100 * step / len(current_app.config["VOCABULARY"]), f"saw {word}")
    return {"caption": f"{payload['picture']}: {' '.join(words)}"}


def create_app() -> Flask:
    app = Flask(__name__)
    app.config["VOCABULARY"] = ["a", "small", "boat", "at", "sea"]
    app.config.from_prefixed_env()  # FLASK_HEADWAY_DATABASE and the like, for those who prefer it
    headway.init_app(app)

    @app.post("/captions")
    def submit() -> tuple[Response, int]:
        given = request.get_json(force=True)
        if not isinstance(given, dict) or not isinstance(given.get("picture"), str):
            abort(400, 'Send {"picture": "..."}')
        task = headway.submit(
            "caption", given, user_id=_user(), role=_role(), priority=request.args.get("priority"),
        )  # fmt: skip
        return jsonify(task.as_json()), 202

    @app.get("/captions/<id>")
    def look(id: str) -> Response:
        return jsonify(headway.get(id, user_id=None if _role() == "admin" else _user()).as_json())

    @app.delete("/captions/<id>")
    def cancel(id: str) -> Response:
        mine = None if _role() == "admin" else _user()
        return jsonify(headway.cancel(id, by=_user(), user_id=mine).as_json())

    @app.get("/queues")
    def queues() -> Response:
        return jsonify([info.as_json() for info in headway.stats()])

    @app.post("/queues/<name>/<action>")
    def control(name: str, action: str) -> Response:
        if _role() != "admin":
            abort(403)
        if action == "pause":
            headway.pause(name, reason=request.args.get("reason", ""), by=_user())
        else:
            headway.resume(name)
        return jsonify({"queue": name, "action": action})

    @app.errorhandler(HeadwayError)
    def explain(error: HeadwayError) -> tuple[Response, int]:
        status = {UserBusy: 409, NotFound: 404, InvalidInput: 400}.get(type(error), 503)
        return jsonify({"error": str(error), "hint": error.hint}), status

    return app


def _user() -> str:
    user = request.headers.get("X-User")
    if not user:
        abort(401, "Say who you are: X-User")
    return user


def _role() -> str:
    return "admin" if request.headers.get("X-Role") == "admin" else "user"


app = create_app()
