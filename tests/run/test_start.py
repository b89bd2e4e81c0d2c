"""How worker processes are started: forked, or anew where a fork is unsafe; either is said."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

import headway
from headway.errors import HeadwayError, InvalidInput, JobHeld
from headway.ledger import Ledger
from tests.run import executor_functions as functions
from tests.services.waiting import eventually


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'headway.db'}"


@pytest.fixture(autouse=True)
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "changed", True)


@pytest.fixture
def another_thread() -> Iterator[None]:
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait, name="feeder")
    thread.start()
    yield
    ending.set()
    thread.join()


def mapped(function: Any, items: Any, database: str, **options: Any) -> headway.Result:
    return headway.map(
        function, items, database=database, **{"job": "ads", "workers": 1, "progress": "plain", **options}
    )


def returned(result: headway.Result) -> list[Any]:
    return [found.result for found in result.results()]


def test_without_other_threads_workers_are_forked_and_nothing_is_said(
    database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])  # a test runner has its own
    assert returned(mapped(functions.sees_change, [1], database)) == [True]
    assert "Workers are" not in capsys.readouterr().err


def test_forked_workers_do_not_share_a_pooled_connection_of_the_program(database: str, postgres_url: str):
    engine = sqlalchemy.create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://", 1))

    def backend(_item: object = None) -> Any:
        with engine.connect() as connection:
            return connection.execute(sqlalchemy.text("SELECT pg_backend_pid()")).scalar()

    mine = backend()
    theirs = returned(mapped(backend, range(8), database, workers=2, start="fork"))
    assert len(theirs) == 8
    assert mine not in theirs
    assert backend() == mine
    engine.dispose()


@pytest.mark.usefixtures("another_thread")
def test_while_another_thread_runs_workers_are_started_anew_and_that_is_said(
    database: str, capsys: pytest.CaptureFixture[str]
):
    assert returned(mapped(functions.sees_change, [1], database)) == [False]
    err = capsys.readouterr().err
    assert "Workers are spawned, not forked, because" in err
    assert "feeder" in err
    assert returned(mapped(functions.sees_change, [1], database, job="other", start="fork")) == [True]


@pytest.mark.usefixtures("another_thread")
def test_a_function_that_is_in_no_module_is_forked_all_the_same_and_that_is_said(
    database: str, capsys: pytest.CaptureFixture[str]
):
    by = 3
    assert returned(mapped(lambda n: by * n, [1, 2], database)) == [3, 6]
    assert "Workers are forked although" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["thread", "async"])
def test_threads_and_loops_are_started_anew_too(mode: str, database: str):
    function = functions.sees_change_soon if mode == "async" else functions.sees_change
    result = mapped(function, range(5), database, mode=mode, workers=2, start="spawn")
    assert returned(result) == [False] * 5


def test_what_cannot_be_found_anew_is_refused_before_anything_is_written(database: str, tmp_path: Path):
    with pytest.raises(InvalidInput, match="cannot import the function: the function cannot be pickled"):
        mapped(lambda n: n, [1], database, start="spawn")
    with pytest.raises(HeadwayError, match="start"):
        mapped(functions.double, [1], database, start="threads")
    assert not (tmp_path / "headway.db").exists()


def test_a_worker_that_was_started_anew_is_replaced_and_its_item_charged(database: str, tmp_path: Path):
    items = [{"place": str(tmp_path), "n": n, "killer": 1} for n in range(4)]
    result = mapped(functions.killing, items, database, start="spawn", retries=0, last_pass=False)
    assert (result.done, result.dead) == (3, 1)
    assert [cause.type for cause in result.causes] == ["WorkerDied"]
    assert "SIGKILL" in result.causes[0].message


def test_a_module_that_cannot_be_imported_anew_ends_the_run_with_a_reason(database: str, tmp_path: Path):
    module = type(sys)("nowhere_to_be_found")
    exec("def double(n): return 2 * n", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(HeadwayError, match=r"workers in a row ended by itself with code 1 before they started"):
            mapped(module.double, [1], database, start="spawn")
    finally:
        del sys.modules[module.__name__]
    with Ledger.open(database) as ledger:
        assert ledger.job("ads").info().failures == 0


def test_inside_a_running_loop_a_function_of_a_module_is_started_anew(database: str):
    result = asyncio.run(headway.amap(functions.sees_change, [1], job="ads", database=database, progress="none"))
    assert returned(result) == [False]


def test_a_script_without_a_main_guard_is_forked_whatever_threads_it_has(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "import threading, headway\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def double(n): return 2 * n\n"
        "result = headway.map(double, [1, 2], job='ads', progress='plain')\n"
        "print([found.result for found in result.results()])\n"
    )
    run = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "[2, 4]\n", run.stderr
    assert "because the function is defined in the main program" in run.stderr


def test_the_command_line_starts_workers_anew_when_it_is_told_to_and_they_end_with_it(
    tmp_path: Path, spawn_cli: Callable[..., subprocess.Popen[str]]
):
    (tmp_path / "jobs.py").write_text(
        "import os, time\n"
        "def wait(item):\n"
        "    with open('pid.part', 'w') as file: file.write(str(os.getpid()))\n"
        "    os.rename('pid.part', 'pid')\n"
        "    time.sleep(60)\n"
    )
    (tmp_path / "items.txt").write_text("a\n")
    run = spawn_cli("run", "jobs:wait", "-i", "items.txt", "-w", "1", env={"HEADWAY_START": "spawn"})
    eventually((tmp_path / "pid").exists, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    command = Path(f"/proc/{pid}/cmdline")
    if command.exists():
        assert b"headway.run.worker.worker" in command.read_bytes()
    os.kill(run.pid, signal.SIGKILL)
    run.wait()

    def ended() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"

    eventually(ended, timeout=60)


@pytest.mark.parametrize("call", ["map", "open_job", "track"])
def test_what_an_error_tells_to_type_finds_the_job_also_where_the_program_named_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    monkeypatch.chdir(tmp_path)
    named = "sqlite:///my jobs.db"
    again: dict[str, Callable[[], object]] = {
        "map": lambda: headway.map(str.upper, ["a"], job="ads", database=named, progress="none"),
        "open_job": lambda: headway.open_job("ads", database=named),
        "track": lambda: headway.track(["a"], job="ads", database=named, progress="none"),
    }
    with headway.open_job("ads", ["a"], database=named), pytest.raises(JobHeld) as refused:
        again[call]()
    assert "headway show ads --database 'sqlite:///my jobs.db'. It is freed" in refused.value.hint
