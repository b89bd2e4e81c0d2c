"""How ``--app`` finds the queue of an application: by name, in a Flask application, by a factory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask import Flask

from headway.errors import InvalidInput
from headway.queue.flask import Headway
from headway.queue.task import Status
from headway.queue.worker.app import load
from headway.testing import eager

Cli = Callable[..., subprocess.CompletedProcess[str]]

SHOP = """
from flask import Flask, current_app
from headway.queue.flask import Headway

hw = Headway()

@hw.handler("word")
def word(task, payload):
    return current_app.config["WORD"]

def create_app(word="boat", *, database="sqlite:///shop.db"):
    app = Flask(__name__)
    app.config.update(WORD=word, HEADWAY_DATABASE=database)
    hw.init_app(app)
    return app

def own_extension():
    app = Flask(__name__)
    app.config.update(HEADWAY_DATABASE="sqlite:///shop.db")
    Headway(app).handler("word")(word)
    return app

def without_extension():
    return Flask(__name__)

def needs(argument):
    return create_app()

def ends():
    raise SystemExit(3)

class Settings:
    @staticmethod
    def create():
        return create_app("nested")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWAY_DATABASE", "HEADWAY_REDIS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (tmp_path / "shop.py").write_text(SHOP)
    yield tmp_path
    sys.modules.pop("shop", None)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("shop:create_app", "boat"),
        ("shop:create_app()", "boat"),
        ("shop:create_app('ship')", "ship"),
        ('shop:create_app(word="ship", database="sqlite:///shop.db")', "ship"),
        ("shop:Settings.create", "nested"),
    ],
)
def test_a_factory_is_called_and_its_workers_run_tasks_in_its_context(
    home: Path, headway_cli: Cli, spec: str, word: str
):
    with load(spec) as queue:
        task = queue.submit("word")
        done = headway_cli("worker", "--app", spec, "--burst")
        assert done.returncode == 0, done.stderr
        assert queue.get(task.id).status is Status.COMPLETED
        assert queue.result(task.id) == word


@pytest.mark.parametrize("made", ["app = create_app()\n", "app = own_extension()\n"])
def test_a_flask_application_is_as_good_as_its_extension(home: Path, made: str):
    (home / "shop.py").write_text(SHOP + made)
    with load("shop:app") as queue:
        assert queue.backend.url == "sqlite:///shop.db"
        assert list(queue.handlers) == ["word"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shop:hw", r"shop:hw has no database: init_app\(\) was not called"),
        ("shop:without_extension", "is not a queue but Flask"),
        ("shop:needs", "The factory shop:needs failed: TypeError: .*argument"),
        ("shop:ends", "The factory shop:ends failed: SystemExit"),
        ("shop:create_app(", "does not name a queue"),
        ("shop:create_app(open('x'))", "does not name a queue"),
        ("shop:create_app(**{})", "does not name a queue"),
        ("shop:hw + hw", "does not name a queue"),
        ("shop:", "does not name a queue"),
    ],
)
def test_a_name_without_a_usable_queue_is_refused(home: Path, spec: str, message: str):
    with pytest.raises(InvalidInput, match=message):
        load(spec)


def test_a_worker_of_an_unbound_extension_exits_with_an_error_and_creates_no_database(home: Path, headway_cli: Cli):
    done = headway_cli("worker", "--app", "shop:hw", "--burst")
    assert done.returncode == 2
    assert "init_app() was not called" in done.stderr
    assert "shop:create_app" in done.stderr
    assert not list(home.glob("*.db"))


def test_an_unbound_extension_accepts_no_task_and_creates_no_database(home: Path):
    extension = Headway()
    extension.handler("word")(lambda task, payload: payload)
    with pytest.raises(InvalidInput, match="no database yet"):
        extension.submit("word")
    assert not list(home.glob("*.db"))
    with eager(extension):
        assert extension.submit("word", 7).status is Status.QUEUED
    with Headway(database="sqlite:///own.db") as configured:
        assert configured.backend.is_configured


def test_an_application_factory_may_be_called_again_while_the_queue_is_in_use(tmp_path: Path):
    with Headway() as queue:
        queue.handler("caption")(lambda task, payload: payload)

        def create_app(name: str) -> Flask:
            app = Flask(__name__)
            app.config["HEADWAY_DATABASE"] = f"sqlite:///{tmp_path}/{name}.db"
            queue.init_app(app)
            return app

        create_app("tasks")
        task = queue.submit("caption")
        create_app("tasks")
        assert queue.get(task.id).id == task.id
        with pytest.raises(InvalidInput, match="cannot be moved"):
            create_app("others")
