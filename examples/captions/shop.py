"""A Flask application whose users order captions of their pictures, which takes a while.

Customers sign in on the page and are known by their e-mail address. Partners use the JSON API and are known by an account
number (`X-User: 17`). Users have one task at a time; administrators go first, see everything and may pause a queue.
Replace the sign-in and the headers by your own login.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import click
from flask import Flask, Response, abort, current_app, jsonify, redirect, render_template, request, session
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from werkzeug.wrappers import Response as AnyResponse

from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.queue import UserBusy
from headway.queue.flask import Headway

VERSION = 1
PEOPLE = {"anna@example.org": "user", "bert@example.org": "user", "root@example.org": "admin"}

# The pool is opened at import, as many applications do. Headway gives each task process connections of its own.
engine = create_engine(
    os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://", 1), pool_pre_ping=True
)
with engine.connect() as connection:
    connection.execute(select(1))

headway = Headway()


class Base(DeclarativeBase):
    pass


class Order(Base):
    """One row for each order, written in the transaction that submits its task."""

    __tablename__ = "orders"
    task: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    picture: Mapped[str]


class Caption(Base):
    """What a task has found."""

    __tablename__ = "captions"
    task: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    text: Mapped[str]


# ---- handlers: each task runs in a process of its own, inside the application's context ------------------------------


@headway.handler("caption", timeout=60, retries=3, retry_delay=0.5)
def caption(task: Any, payload: dict[str, Any]) -> dict[str, Any]:
    words = []
    vocabulary = current_app.config["VOCABULARY"]
    for step, word in enumerate(vocabulary, start=1):
        if task.cancelled:
            break
        time.sleep(float(payload.get("seconds", 0.1)))
        words.append(word)
        task.progress(100 * step / len(vocabulary), f"saw {word}")
    return store(task, f"{payload['picture']}: {' '.join(words)}")


@headway.handler("album", timeout=60, retries=3, retry_delay=0.5)
def album(task: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Describe several pictures at once, in processes of its own."""
    with multiprocessing.Pool(2) as pool:
        texts = pool.map(describe, payload["pictures"])
    return store(task, ", ".join(texts))


@headway.handler("poster", timeout=2, retries=0)
def poster(task: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Take longer than its timeout, and clean up."""
    try:
        time.sleep(float(payload["seconds"]))
    finally:
        found = store(task, "a poster")
    return found


def describe(picture: str) -> str:
    return f"{picture}: a boat"


def store(task: Any, text: str) -> dict[str, Any]:
    """Write the caption and read it back. A second run after a crash replaces the row of the first."""
    with Session(engine) as database:
        database.merge(Caption(task=task.id, customer=str(task.user_id), text=text))
        database.commit()
        found = database.get_one(Caption, task.id)
        return {"caption": found.text, "customer": found.customer, "version": VERSION}


# ---- the application ---------------------------------------------------------------------------------------------------


def create_app() -> Flask:
    app = Flask(__name__)
    app.config.update(VOCABULARY=["a", "small", "boat", "at", "sea"], SESSION_COOKIE_SAMESITE="Lax")
    app.config.from_prefixed_env()  # FLASK_SECRET_KEY: the same for every process
    headway.init_app(app)
    add_pages(app)
    add_api(app)

    @app.cli.command("init-db")
    def init_db() -> None:
        """Create the tables of the shop. Headway creates its own."""
        Base.metadata.create_all(engine)
        click.echo("The tables exist.")

    return app


def add_pages(app: Flask) -> None:
    """Add the pages for people."""

    @app.get("/")
    def page(problem: str = "") -> str:
        user, admin = session.get("user"), is_admin()
        tasks = headway.list(user_id=None if admin else user, limit=20) if user else []
        queues = headway.stats() if admin else []
        return render_template(
            "page.html", user=user, admin=admin, people=PEOPLE, tasks=tasks, problem=problem, queues=queues, version=VERSION,
        )  # fmt: skip

    @app.post("/sign-in")
    def sign_in() -> AnyResponse:
        session.clear()
        if (name := request.form.get("user", "")) in PEOPLE:
            session["user"], session["role"] = name, PEOPLE[name]
        return redirect("/", 303)

    @app.post("/order")
    def order() -> str | AnyResponse:
        picture, seconds = request.form.get("picture", "")[:200], request.form.get("seconds", 0.5, float)
        try:
            with Session(engine) as database:  # the order and its task exist together, or neither does
                task = headway.submit(
                    "caption", {"picture": picture, "seconds": seconds}, user_id=user_id(), role=role(),
                    connection=database,
                )  # fmt: skip
                database.add(Order(task=task.id, customer=str(task.user_id), picture=picture))
                database.commit()
        except (UserBusy, InvalidInput) as error:
            return page(f"{error} {error.hint}")
        return redirect("/", 303)

    @app.post("/cancel/<id>")
    def stop(id: str) -> AnyResponse:
        headway.cancel(id, by=str(user_id()), user_id=owner())
        return redirect("/", 303)

    @app.post("/pause/<name>")
    def pause(name: str) -> AnyResponse:
        for_admins()
        headway.pause(name, reason="by hand", by=str(user_id()))
        return redirect("/", 303)

    @app.post("/resume/<name>")
    def resume(name: str) -> AnyResponse:
        for_admins()
        headway.resume(name, by=str(user_id()))
        return redirect("/", 303)


def add_api(app: Flask) -> None:
    """Add the same for programs, as JSON."""

    @app.post("/captions")
    def submit() -> tuple[Response, int]:
        given = request.get_json(force=True)
        if not isinstance(given, dict) or not {"picture", "pictures"} & given.keys():
            abort(400, 'Send {"picture": "..."}')
        task = headway.submit(
            request.args.get("kind", "caption"), given, user_id=user_id(), role=role(),
            priority=request.args.get("priority"),
        )  # fmt: skip
        return jsonify(task.as_json()), 202

    @app.get("/captions/<id>")
    def show(id: str) -> Response:
        return jsonify(headway.get(id, user_id=owner()).as_json())

    @app.get("/captions/<id>/result")
    def result(id: str) -> Response:
        return jsonify(headway.result(id, user_id=owner()))

    @app.delete("/captions/<id>")
    def cancel(id: str) -> Response:
        return jsonify(headway.cancel(id, by=str(user_id()), user_id=owner()).as_json())

    @app.get("/queues")
    def queues() -> Response:
        return jsonify([info.as_json() for info in headway.stats()])

    @app.errorhandler(HeadwayError)
    def explain(error: HeadwayError) -> tuple[Response, int]:
        status = {UserBusy: 409, NotFound: 404, InvalidInput: 400}.get(type(error), 503)
        return jsonify({"error": str(error), "hint": error.hint}), status


def user_id() -> str | int:
    """Return who sends this request: an e-mail address, or the number of a partner's account."""
    user = str(session.get("user") or request.headers.get("X-User", ""))
    if not user:
        abort(401, "Sign in, or send the number of your account: X-User")
    return int(user) if user.isdecimal() else user


def role() -> str:
    return str(session.get("role") or ("admin" if request.headers.get("X-Role") == "admin" else "user"))


def is_admin() -> bool:
    return role() == "admin"


def owner() -> str | int | None:
    """Return whose tasks this request may see: None for all of them."""
    return None if is_admin() else user_id()


def for_admins() -> None:
    if not is_admin():
        abort(403)
