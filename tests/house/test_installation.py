"""What a stranger meets first: an installation without any optional part, in an odd place, with an odd environment."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
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


def test_a_missing_package_is_one_error_that_names_the_extra(tmp_path: Path):
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
    assert f"pip install 'headway-jobs[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_names_itself_when_its_part_is_missing(tmp_path: Path):
    done = bare("import sys\nsys.argv = ['headway', 'demo']\nfrom headway.cli import main\nmain()\n", tmp_path)
    assert "The demo needs the optional part 'web'" in done.stderr


#: Of an import the distribution it comes from, where their names differ.
DISTRIBUTIONS = {
    "google.api_core": "google-api-core",
    "google.auth": "google-auth",
    "google.cloud": "google-cloud-firestore",
    "grpc": "grpcio",
    "prometheus_client": "prometheus-client",
}


def imported_distributions() -> set[str]:
    """The distributions that the source imports by name, without Python's own and those of type checking alone."""
    found = set[str]()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                top = name.partition(".")[0]
                two = ".".join(name.split(".")[:2])
                found.add(DISTRIBUTIONS.get(two) or DISTRIBUTIONS.get(top) or top)
    return found - set(sys.stdlib_module_names) - {"headway", "__future__"}


def test_every_package_that_is_imported_is_declared_and_every_declared_one_is_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *chain(*(
        names for extra, names in project["optional-dependencies"].items() if extra not in ("dev", "all")
    ))]  # fmt: skip
    declared = {re.split(r"[\[<>=]", word)[0] for word in wanted}
    # Loaded by name: uvicorn's protocols, and what redis[hiredis], psycopg[binary] and Flask's users bring.
    by_name = {"uvloop", "httptools", "websockets", "gunicorn"}
    imported = imported_distributions()
    # hiredis comes with redis[hiredis]; pytest is loaded by whoever tests with headway.testing.
    assert imported - declared <= {"hiredis", "pytest"}, "imported and not declared"
    assert declared - imported <= by_name, "declared and not used"
    assert not any("pool" in word for word in wanted)


# ---- an odd place, an odd environment --------------------------------------------------------------------------------


def headway_in(
    place: Path, *words: str | bytes, umask: int = -1, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command with no other environment than this one, and the headway that is tested here, wherever it lies."""
    source = {"PYTHONPATH": str(Path(str(headway.__file__)).parent.parent)}
    (place / "jobs.py").write_text("def double(item):\n    return item * 2\n")
    (place / "items.jsonl").write_text('1\n2\n"\u00e4"\n', "utf-8")
    return subprocess.run(
        [sys.executable, "-m", "headway", *words],
        cwd=place, capture_output=True, text=True, encoding="utf-8", check=False, env=source | (environment or {}), umask=umask,
    )  # fmt: skip


RUN = ("run", "jobs:double", "--items", "items.jsonl", "--job", "ads", "--output", "out.jsonl", "--workers", "1")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LC_ALL": "C"},
        {"LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": "/nonexistent", "TMPDIR": "/nonexistent"},
        {"LC_ALL": "no_SUCH.locale", "TZ": "Nowhere/City", "COLUMNS": "x"},
    ],
    ids=["none", "C", "ASCII", "no home", "nonsense"],
)
def test_a_run_needs_nothing_of_its_environment(tmp_path: Path, environment: dict[str, str]):
    place = tmp_path / "a path with spaces"
    place.mkdir()
    done = headway_in(place, *RUN, environment=environment)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line)["result"] for line in (place / "out.jsonl").read_text("utf-8").splitlines()]
    assert sorted(map(str, results)) == ["2", "4", "\u00e4\u00e4"]


@pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
def test_only_the_owner_can_read_files_under_any_umask(tmp_path: Path, umask: int):
    assert headway_in(tmp_path, *RUN, umask=umask).returncode == 0
    assert headway_in(tmp_path, "results", "ads", "--output", "results.csv", umask=umask).returncode == 0
    made = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir() if path.is_file()}
    ours = {name: mode for name, mode in made.items() if name not in ("jobs.py", "items.jsonl")}
    assert ours == {"headway.db": "0o600", "out.jsonl": "0o600", "results.csv": "0o600"}


@pytest.mark.parametrize("job", [(), ("--job", "ads")], ids=["unnamed", "named"])
@pytest.mark.parametrize("option", ["--items", "--output"])
def test_a_file_name_that_is_not_utf_8_is_refused_before_any_write(tmp_path: Path, job: tuple[str, ...], option: str):
    name = b"caf\xe9.jsonl"
    with open(os.path.join(os.fsencode(tmp_path), name), "w", encoding="utf-8") as file:
        file.write("1\n")
    words: list[str | bytes] = ["run", "jobs:double", *job, option, name]
    if option == "--output":
        words += ["--items", "items.jsonl"]
    done = headway_in(tmp_path, *words, environment={"LC_ALL": "C.UTF-8"})
    assert done.returncode == 2, done.stderr
    assert "caf\\xe9.jsonl' is not UTF-8" in done.stderr
    assert not (tmp_path / "headway.db").exists()


def test_the_package_contains_every_file_that_is_not_python():
    """What the wheel takes is the package's directory; nothing may be left out by a rule of Git."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/headway"]}
    package = ROOT / "src" / "headway"
    data = {path.suffix for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert data == {".py", ".sql", ".lua", ".json", ".html", ".css", ".js", ".typed"}
    files = [str(path.relative_to(ROOT)) for path in package.rglob("*") if path.suffix in data - {".py"}]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ignored.stdout == ""
