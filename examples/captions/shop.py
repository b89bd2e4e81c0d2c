"""A small Flask application whose users ask for captions of their pictures, which takes a while.

Users have one task at a time; administrators go first, see everything and may pause a queue. People sign in at the page
by choosing a name; programs say who they are by the headers ``X-User`` and ``X-Role``. Put a real login in place of both.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from flask import Flask, Response, abort, current_app, jsonify, redirect, render_template_string, request, session
from werkzeug.wrappers import Response as AnyResponse

from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.queue.flask import Headway
from headway.queue.values import UserBusy

headway = Headway()

PEOPLE = {"anna": "user", "bert": "user", "root": "admin"}


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


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Captions</title>
{% if busy %}<meta http-equiv="refresh" content="1">{% endif %}
<style>body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .8rem .2rem 0 }
form { display: inline } .problem { color: #a00 }</style>
<h1>Captions</h1>
{% if not user %}
<p>Who are you?</p>
{% for name, role in people.items() %}
<form method="post" action="/sign-in"><button name="user" value="{{ name }}">{{ name }} ({{ role }})</button></form>
{% endfor %}
{% else %}
<p>{{ user }} ({{ role }}) <form method="post" action="/sign-in"><button name="user" value="">sign out</button></form></p>
<form method="post" action="/ask">
<label>Picture <input name="picture" required value="harbour.jpg" maxlength="200"></label>
<button>Ask for a caption</button></form>
{% if problem %}<p class="problem" role="alert">{{ problem }}</p>{% endif %}
<table><tr><th>Task<th>User<th>Queue<th>Status<th>Done<th></tr>
{% for task in tasks %}
<tr><td>{{ task.id[:8] }}<td>{{ task.user_id }}<td>{{ task.priority }}<td>{{ task.status }}
<td>{% if task.status == "COMPLETED" %}{{ caption_of(task) }}
{% else %}{{ "%.0f"|format(task.percent) }} % {{ task.message }}{{ task.error or "" }}{% endif %}
<td>{% if not task.is_final %}<form method="post" action="/stop/{{ task.id }}"><button>cancel</button></form>{% endif %}</tr>
{% endfor %}</table>
{% if role == "admin" %}
<h2>Queues</h2>
<table><tr><th>Queue<th>Waiting<th>Running<th></tr>
{% for queue in queues %}
<tr><td>{{ queue.priority }}<td>{{ queue.waiting }}<td>{{ queue.running }}
<td><form method="post" action="/{{ "resume" if queue.paused else "pause" }}/{{ queue.priority }}">
<button>{{ "resume" if queue.paused else "pause" }}</button></form></tr>
{% endfor %}</table>
{% endif %}{% endif %}"""


def create_app() -> Flask:
    app = Flask(__name__)
    app.config.update(
        VOCABULARY=["a", "small", "boat", "at", "sea"], SECRET_KEY=secrets.token_hex(32), SESSION_COOKIE_SAMESITE="Lax"
    )
    app.config.from_prefixed_env()  # FLASK_HEADWAY_DATABASE and the like, for those who prefer it
    headway.init_app(app)
    _pages(app)
    _programs(app)
    return app


def _pages(app: Flask) -> None:
    """For people."""

    @app.get("/")
    def page(problem: str = "") -> str:
        user, admin = session.get("user"), _role() == "admin"
        tasks = headway.list(user_id=None if admin else user, limit=20) if user else []
        return render_template_string(
            PAGE, user=user, role=_role(), people=PEOPLE, tasks=tasks, problem=problem,
            caption_of=lambda task: headway.result(task.id)["caption"],
            queues=headway.stats() if user and admin else [], busy=any(not task.is_final for task in tasks),
        )  # fmt: skip

    @app.post("/sign-in")
    def sign_in() -> AnyResponse:
        name = request.form.get("user", "")
        session.clear()
        if name in PEOPLE:
            session["user"] = name
        return redirect("/", 303)

    @app.post("/ask")
    def ask() -> str | AnyResponse:
        picture = request.form.get("picture", "")[:200]
        try:
            headway.submit("caption", {"picture": picture, "seconds": 0.5}, user_id=_user(), role=_role())
        except (UserBusy, InvalidInput) as error:
            return page(f"{error} {error.hint}")
        return redirect("/", 303)

    @app.post("/stop/<id>")
    def stop(id: str) -> AnyResponse:
        headway.cancel(id, by=_user(), user_id=None if _role() == "admin" else _user())
        return redirect("/", 303)

    @app.post("/pause/<name>")
    def pause(name: str) -> AnyResponse:
        _admins_only()
        headway.pause(name, reason="by hand", by=_user())
        return redirect("/", 303)

    @app.post("/resume/<name>")
    def resume(name: str) -> AnyResponse:
        _admins_only()
        headway.resume(name)
        return redirect("/", 303)


def _programs(app: Flask) -> None:
    """For programs: the same as JSON."""

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

    @app.get("/captions/<id>/result")
    def result(id: str) -> Response:
        return jsonify(headway.result(id, user_id=None if _role() == "admin" else _user()))

    @app.delete("/captions/<id>")
    def cancel(id: str) -> Response:
        mine = None if _role() == "admin" else _user()
        return jsonify(headway.cancel(id, by=_user(), user_id=mine).as_json())

    @app.get("/queues")
    def queues() -> Response:
        return jsonify([info.as_json() for info in headway.stats()])

    @app.errorhandler(HeadwayError)
    def explain(error: HeadwayError) -> tuple[Response, int]:
        status = {UserBusy: 409, NotFound: 404, InvalidInput: 400}.get(type(error), 503)
        return jsonify({"error": str(error), "hint": error.hint}), status


def _user() -> str:
    user = session.get("user") or request.headers.get("X-User")
    if not user:
        abort(401, "Sign in, or say who you are: X-User")
    return str(user)


def _role() -> str:
    if "user" in session:
        return PEOPLE.get(session["user"], "user")
    return "admin" if request.headers.get("X-Role") == "admin" else "user"


def _admins_only() -> None:
    if _role() != "admin":
        abort(403)


app = create_app()
