"""`headway pause|resume|stop|scale`: a run is told from elsewhere what to do, and says by whom."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headway.errors import InvalidInput, NotFound, Refused
from headway.ledger import Job, Ledger
from headway.run.display.estimate import Estimator, RunSnapshot
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

_FEW_FILES = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
#: A Python that may have as many open files as a dozen workers need.
LIMITED = [sys.executable, "-c", _FEW_FILES]

FUNCTIONS = """
import asyncio, os, time
import headway

def slow(item):
    open(f"begun-{item}", "w").close()
    while not os.path.exists("free") and not os.path.exists(f"free-{item}"):
        time.sleep(0.01)

async def slow_async(item):
    open(f"begun-{item}", "w").close()
    while not os.path.exists("free") and not os.path.exists(f"free-{item}"):
        await asyncio.sleep(0.01)

async def times_out(item):
    if item == "1":
        raise TimeoutError("the server said nothing")
    await asyncio.sleep(60)

def repaired(item):
    if item == "0":
        open("begun-0", "w").close()
        if not os.path.exists("repair"):
            raise headway.GiveUp("not before it is repaired")
        open("again", "w").close()
    else:
        slow(item)
"""

#: What `slow` does.
PROGRAM = 'touch "begun-$1"; while [ ! -e free ] && [ ! -e "free-$1" ]; do sleep 0.1; done'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(FUNCTIONS)
    (tmp_path / "items.txt").write_text("".join(f"{n}\n" for n in range(12)))
    return tmp_path


def begun(place: Path) -> set[int]:
    return {int(path.name.removeprefix("begun-")) for path in place.glob("begun-*")}


@pytest.fixture
def started(place: Path, spawn_cli: Spawn) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Job]]]:
    ledgers: list[Ledger] = []

    def start(*options: str, function: str = "slow", workers: int = 2) -> tuple[subprocess.Popen[str], Job]:
        work = ["--", "sh", "-c", PROGRAM, "sh", "{}"] if function == "program" else [f"jobs:{function}"]
        words = ("run", "-i", "items.txt", "-j", "ads", "-w", str(workers), *options, *work)
        run = spawn_cli(*words, stdout=subprocess.DEVNULL)
        eventually(lambda: len(begun(place)) >= workers, timeout=60)
        ledgers.append(Ledger.open(f"sqlite:///{place}/headway.db", create=False))
        return run, ledgers[-1].job("ads")

    yield start
    for ledger in ledgers:
        ledger.close()


Started = Callable[..., tuple["subprocess.Popen[str]", Job]]


def lines_until(run: subprocess.Popen[str], text: str) -> str:
    assert run.stderr is not None
    for line in run.stderr:
        if text in line:
            return line
    raise AssertionError(f"the run did not say {text!r}")


def test_a_paused_run_finishes_what_runs_begins_nothing_and_goes_on_when_it_is_resumed(
    place: Path, started: Started, headway_cli: Cli
):
    run, job = started("--database", "sqlite:///headway.db")
    paused = headway_cli("pause", "ads", env={"LOGNAME": "alice"})
    assert paused.returncode == 0, paused.stderr
    said = lines_until(run, "Paused")
    assert "Paused by alice: finishing 2 items" in said
    assert "headway resume ads --database sqlite:///headway.db\n" in said, (
        "the run was told which, and so is whoever reads it"
    )
    (place / "free-0").touch()
    (place / "free-1").touch()
    eventually(lambda: job.info().done == 2, timeout=30)
    assert "paused by alice" in headway_cli("show", "ads").stdout
    assert json.loads(headway_cli("show", "ads", "--json").stdout)["paused_by"] == "alice"
    assert begun(place) == {0, 1}, "the whole of two commands later nothing was begun"
    assert headway_cli("resume", "ads", env={"LOGNAME": "bob"}).returncode == 0
    assert "Resumed by bob." in lines_until(run, "Resumed")
    (place / "free").touch()
    assert run.wait(60) == 0
    assert job.info().done == 12
    with Ledger.open(f"sqlite:///{place}/headway.db") as ledger:
        assert [(who, what) for _, who, what, _, _ in ledger.audit_trail("ads")] == [
            ("alice", "pause"),
            ("bob", "resume"),
        ]


def test_stop_finishes_what_runs_and_the_same_command_goes_on(place: Path, started: Started, headway_cli: Cli):
    run, job = started()
    job.stop(actor="alice")
    assert "Stopping, as alice asked: finishing 2 items" in lines_until(run, "Stopping")
    (place / "free").touch()
    assert run.wait(60) == 143
    assert (job.info().done, job.info().failures) == (2, 0)
    assert job.runs()[-1].outcome == "interrupted"
    again = headway_cli("run", "jobs:slow", "-i", "items.txt", "-j", "ads")
    assert again.returncode == 0, "what was asked of the last run is not asked of this one"
    assert job.info().done == 12


def test_stop_now_abandons_what_runs_and_charges_nothing(started: Started):
    run, job = started()
    job.stop(now=True)
    assert run.wait(60) == 143
    assert (job.info().done, job.info().failures) == (0, 0)


def test_a_paused_run_can_be_stopped(place: Path, started: Started):
    run, job = started()
    job.pause()
    lines_until(run, "Paused")
    job.stop()
    (place / "free").touch()
    assert run.wait(60) == 143


@pytest.mark.parametrize(("function", "mode"), [("slow", "process"), ("slow", "thread"), ("slow_async", "async")])
def test_scale_changes_how_many_items_run_at_once(place: Path, started: Started, function: str, mode: str):
    run, job = started("--mode", mode, function=function)
    job.scale(5, actor="alice")
    assert "alice changed the limit to 5 items at once" in lines_until(run, "alice")
    many = 5 if mode == "process" else 7  # of threads and loops a new process has five, beside the two that finish
    eventually(lambda: len(begun(place)) == many, timeout=60)
    job.scale(1)
    lines_until(run, "changed the limit to 1 item at once")
    for n in range(many):
        (place / f"free-{n}").touch()
    eventually(lambda: job.info().done == many and len(begun(place)) == many + 1, timeout=60)
    (place / "free").touch()
    assert run.wait(60) == 0
    assert job.info().done == 12


def test_a_number_that_the_machine_cannot_start_ends_no_run(place: Path):
    """Whoever mistypes a number in another terminal does not end the night's work."""
    (place / "items.txt").write_text("".join(f"{n}\n" for n in range(100)))
    run = subprocess.Popen(
        [*LIMITED, "-m", "headway", "run", "jobs:slow", "-i", "items.txt", "-j", "ads", "-w", "2"],
        cwd=place, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        eventually(lambda: len(begun(place)) >= 2, timeout=60)
        with Ledger.open(f"sqlite:///{place}/headway.db", create=False) as ledger:
            job = ledger.job("ads")
            job.scale(200, actor="alice")
            said = lines_until(run, "cannot be started: Too many open files.")
            assert "Continuing with 2 items at once, as at the start." in said
            (place / "free").touch()
            assert run.stderr is not None
            assert run.wait(60) == 0, run.stderr.read()
            assert (job.info().done, job.info().failures) == (100, 0)
    finally:
        run.kill()
        run.communicate()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_worker_that_cannot_be_replaced_for_a_moment_ends_no_run(place: Path, started: Started, mode: str):
    """In mode thread there is one process: then nobody works until another one can be started."""
    run, job = started("--mode", mode)
    before = resource.prlimit(run.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    worker = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[0]
    os.kill(int(worker), signal.SIGKILL)
    assert "Retrying." in lines_until(run, "cannot be started: Too many open files.")
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, before)
    (place / "free").touch()
    assert run.wait(60) == 0
    assert (job.info().done, job.info().failures) == (12, 1 if mode == "process" else 0)


# ---- without a run --------------------------------------------------------------------------------------------------


def test_what_is_not_running_cannot_be_controlled(tmp_path: Path, headway_cli: Cli):
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        job = ledger.create("ads")
        with pytest.raises(Refused, match="is not running"):
            job.pause()
        hold = ledger.hold(job, {"mode": "loop"})
        with pytest.raises(Refused, match="own loop"):
            job.stop()
        ledger.release(hold, "finished")
    refused = headway_cli("scale", "ads", "3")
    assert refused.returncode == 5
    assert "Job ads is not running" in refused.stderr
    assert headway_cli("scale", "ads", "0").returncode == 2


def test_asking_again_for_the_same_is_asking_once(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        job = ledger.create("ads")
        hold = ledger.hold(job, {"mode": "process"})
        assert job.asked(hold.run) == (0, False, 0, None, "", 0.0, "")
        first = job.pause(actor="alice")
        assert job.pause(actor="bob") == first
        assert job.scale(3, actor="bob").paused, "one request leaves the others as they were"
        assert job.resume(actor="bob").workers == 3
        with pytest.raises(InvalidInput):
            job.scale(0)
        assert len(list(ledger.audit_trail("ads"))) == 3
        ledger.release(hold, "finished")
        second = ledger.hold(job, {"mode": "process"})
        assert job.asked(second.run).workers is None, "a later run starts as it is told to"


def test_the_time_of_a_pause_makes_a_run_neither_slow_nor_stalled():
    now = 0.0
    estimator = Estimator(lambda: now)

    def show(done: int, paused_by: str = "") -> None:
        estimator.update(RunSnapshot(1000, 0, done, 2, 0, 0, 0, paused_by=paused_by))

    for second in range(60):
        now = float(second)
        show(second)
    before = estimator.forecast
    assert before is not None
    for second in range(60, 1000):
        now = float(second)
        show(59, paused_by="alice")
        assert estimator.stalled is None
    show(59)
    after = estimator.forecast
    assert after is not None
    assert after.seconds == pytest.approx(before.seconds, rel=0.05)


def test_the_time_that_a_run_stood_still_makes_it_neither_slow_nor_stalled():
    now = 0.0
    estimator = Estimator(lambda: now)
    for second in range(60):
        now = float(second)
        estimator.update(RunSnapshot(1000, 0, second, 2, 0, 0, 0))
    before = estimator.forecast
    assert before is not None
    now += 3600.0
    estimator.update(RunSnapshot(1000, 0, 61, 2, 0, 0, 0, stopped=True))
    after = estimator.forecast
    assert after is not None
    assert after.seconds == pytest.approx(before.seconds, rel=0.05)
    assert estimator.stalled is None


def test_a_database_that_is_slow_again_and_again_gives_no_item_more_time(place: Path, spawn_cli: Spawn):
    (place / "jobs.py").write_text("import time\n\ndef work(item):\n    time.sleep(600 if item == '0' else 0.05)\n")
    (place / "items.txt").write_text("".join(f"{n}\n" for n in range(5000)))
    run = spawn_cli("run", "jobs:work", "-i", "items.txt", "-j", "ads", "-w", "2", "--timeout", "3", "--retries", "0")
    path = place / "headway.db"
    eventually(lambda: path.exists() and job_is_running(path), timeout=60)
    with Ledger.open(f"sqlite:///{path}", create=False) as ledger, closing(sqlite3.connect(path, timeout=60)) as other:
        other.isolation_level = None
        job = ledger.job("ads")

        def held_up() -> bool:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(1.3)  # a commit of the run that waits for it takes as long
            other.execute("ROLLBACK")
            return job.item(0).status == "dead"

        eventually(held_up, timeout=60)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)


def job_is_running(path: Path) -> bool:
    with suppress(NotFound), Ledger.open(f"sqlite:///{path}", create=False) as ledger:
        return ledger.job("ads").info().done > 0
    return False


@pytest.mark.parametrize("work", ["slow", "slow_async", "program"])
def test_an_item_is_not_charged_for_the_time_in_which_the_whole_run_stood_still_however_often(
    place: Path, started: Started, work: str
):
    """As when a container is paused: all its processes stand still, and the clock does not."""
    run, job = started("--timeout", "5", "--retries", "0", "--no-last-pass", "--progress", "json", function=work)
    for _ in range(2):
        goes_on(run)
        processes = family(run.pid)
        send(signal.SIGSTOP, processes)
        time.sleep(5.5)
        send(signal.SIGCONT, reversed(processes))
        time.sleep(0.5)  # the run looks for what takes too long ten times a second
    (place / "free").touch()
    assert run.wait(60) == 0
    assert (job.info().done, job.info().dead) == (12, 0)


def test_an_async_item_whose_time_is_up_is_told_from_one_that_raised_a_timeout_of_its_own(
    place: Path, headway_cli: Cli
):
    (place / "items.txt").write_text("0\n1\n")
    words = ("run", "jobs:times_out", "-i", "items.txt", "-j", "ads", "--retries", "0", "--no-last-pass")
    assert headway_cli(*words, "--timeout", "0.2").returncode == 3
    ends = {
        line.split("\t")[0]: line.split("\t")[2::4] for line in headway_cli("log", "ads", "--tsv").stdout.splitlines()
    }
    assert ends["0"] == ["timeout", "TimedOut: no result within 0.2 s"]
    assert ends["1"] == ["failed", "TimeoutError: the server said nothing"]


def goes_on(run: subprocess.Popen[str]) -> None:
    """Wait until it says something that it did not say before."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    assert run.stderr is not None
    for line in run.stderr:
        if json.loads(line)["t"][:19] > now[:19]:
            return


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # a `sleep` of the program, which has ended meanwhile
            os.kill(process, number)


def family(pid: int) -> list[int]:
    try:
        return [pid, *(each for child in children(pid) for each in family(int(child)))]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []


def test_a_dead_letter_that_gets_another_life_meanwhile_is_tried_again_by_the_run_that_goes_on(
    place: Path, started: Started, headway_cli: Cli
):
    run, job = started(function="repaired", workers=12)
    eventually(lambda: job.info().dead == 1)
    (place / "repair").touch()
    assert headway_cli("dead", "retry", "ads", "--yes").returncode == 0
    eventually((place / "again").exists, message="the run has a worker for it, beside the eleven that are busy")
    (place / "free").touch()
    assert run.wait(60) == 0
    assert (job.info().done, job.info().dead) == (12, 0)
    assert job.info().finished_at is not None
    assert run.stderr is not None
    assert "12/12" in (told := run.stderr.read())
    assert "dead 0" in told


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
