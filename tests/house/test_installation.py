"""What a stranger meets first: an installation without any optional part, in an odd place, with an odd environment."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import headway

ROOT = Path(__file__).resolve().parent.parent.parent

#: What is used, and the extra that has to be named.
USES = {
    "headway.map(abs, [1], job='x', database='postgresql://h/x')": "postgres",
    "headway.queue.TaskQueue('postgresql://h/x').get('a')": "postgres",
    "on_redis().submit('a', {}, user_id='u')": "redis",
    "headway.queue.TaskQueue('sqlite:///q.db', keys=['x' * 43 + '='])": "crypto",
    "headway.finishline.FinishLine('redis://localhost:1/1').create('p')": "redis",
    "headway.finishline.AsyncProgress('redis://localhost:1/1')": "redis",
    "headway.states.open_store('redis://localhost:1/1', 'j', 1)": "redis",
    "headway.states.open_store('firestore://p', 'j', 1)": "firestore",
    "headway.telemetry.serve_metrics(0)": "metrics",
    "headway.web.app()": "web",
}


def bare(code: str, place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it where nothing but Python, click and headway is installed."""
    site = place / "site"
    site.mkdir(exist_ok=True)
    for package in (click, headway):
        (site / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    basics = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: without the packages beside this Python
        cwd=place, capture_output=True, text=True, check=False, env=basics | environment,
    )  # fmt: skip


def test_whatever_is_missing_is_one_error_that_names_the_extra(tmp_path: Path):
    code = f"""
import json
from headway.errors import HeadwayError
import headway, headway.queue, headway.finishline, headway.states, headway.telemetry, headway.web

def on_redis():
    queue = headway.queue.TaskQueue("sqlite:///q.db", redis="redis://localhost:1/0")
    queue.handler("a")(lambda task, payload: None)
    return queue

found = {{}}
for use in {list(USES)!r}:
    try:
        eval(use)
    except HeadwayError as error:
        found[use] = getattr(error, "extra", repr(error))
    except BaseException as error:
        found[use] = repr(error)
    else:
        found[use] = "worked"
print(json.dumps(found))
"""
    done = bare(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == USES
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(USES.values()) <= extras.keys()


def test_a_task_that_could_not_be_hinted_for_want_of_an_extra_was_not_taken(tmp_path: Path):
    """Else its submitter would hear an error and the task would run."""
    code = """
from headway.queue import TaskQueue
from headway.errors import MissingExtra
queue = TaskQueue("sqlite:///q.db", redis="redis://localhost:1/0")
queue.handler("a")(lambda task, payload: None)
try:
    queue.submit("a", {}, user_id="u")
except MissingExtra:
    print(queue.database.one("SELECT count(*) FROM tasks")[0])
"""
    done = bare(code, tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("serve --port 0", "web"),
        ("demo", "web"),
        ("watch --queue q --channel c --stuck-timeout 9", "redis"),
        ("progress p", "redis"),
        ("worker --app app_on_redis:queue", "redis"),
        ("jobs -d postgresql://h/x", "postgres"),
        ("states jobs --store firestore://p", "firestore"),
    ],
)
def test_a_verb_whose_part_is_missing_ends_with_2_and_one_message(tmp_path: Path, words: str, extra: str):
    (tmp_path / "app_on_redis.py").write_text(
        "from headway.queue import TaskQueue\nqueue = TaskQueue('sqlite:///q.db', redis='redis://localhost:1/0')\n"
        "queue.handler('a')(lambda task, payload: None)\n"
    )
    done = bare(
        f"import sys\nsys.argv = ['headway', *{words.split()!r}]\nfrom headway.cli import main\nmain()\n", tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert f"pip install 'headway[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
