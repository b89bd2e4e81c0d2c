"""``--output``: every result, once each, whatever was killed when; or a refusal that says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import headway
from headway.errors import InvalidInput, StaleClaim
from headway.ledger import Done, Ledger
from headway.ledger.values import NewItem
from headway.run.output import Output
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = """
import os, time

def square(item):
    if os.path.exists("slow"):
        time.sleep(0.02)
    with open("executed", "a") as file:
        file.write(f"{item}\\n")
    return item * item

def square_when_allowed(item):
    open("begun", "a").close()
    while os.path.exists("blocked"):
        time.sleep(0.02)
    return item * item
"""
RUN = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "-w", "2")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(FUNCTIONS)
    (tmp_path / "items.jsonl").write_text("".join(f"{n}\n" for n in range(40)))
    return tmp_path


def results(place: Path, name: str = "out.jsonl") -> list[int]:
    return sorted(json.loads(line)["result"] for line in (place / name).read_text().splitlines())


ALL = sorted(n * n for n in range(40))


def test_an_output_added_to_a_job_that_kept_no_results_is_refused_and_says_why(place: Path, headway_cli: Cli):
    assert headway_cli(*RUN).returncode == 0
    refused = headway_cli(*RUN, "-o", "out.jsonl")
    assert refused.returncode == 2
    assert "the results of 40 of them were not kept" in refused.stderr
    assert "--fresh" in refused.stderr
    assert not (place / "out.jsonl").exists()
    assert headway_cli(*RUN).returncode == 0, "nothing was changed"
    fresh = headway_cli(*RUN, "-o", "out.jsonl", "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    assert results(place) == ALL


def test_an_output_added_at_the_resume_is_refused_too(place: Path, headway_cli: Cli, spawn_cli: Spawn):
    (place / "slow").touch()
    run = spawn_cli(*RUN, stderr=subprocess.DEVNULL)
    eventually(lambda: (place / "executed").exists() and len((place / "executed").read_text().split()) > 5, timeout=20)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    assert headway_cli(*RUN, "-o", "out.jsonl").returncode == 2


def test_from_a_program_the_same_is_refused(tmp_path: Path):
    options = {"job": "ads", "database": f"sqlite:///{tmp_path}/a.db", "progress": "none", "workers": 1}
    headway.map(abs, [1, -2], **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="results of 2 of them were not kept"):
        headway.map(abs, [1, -2], output=tmp_path / "out.jsonl", **options)  # type: ignore[arg-type]


def test_a_job_that_writes_results_keeps_them_also_in_a_run_that_does_not_name_the_file(
    place: Path, headway_cli: Cli, spawn_cli: Spawn
):
    (place / "slow").touch()
    run = spawn_cli(*RUN, "-o", "out.jsonl", stderr=subprocess.DEVNULL)
    eventually(lambda: (place / "executed").exists() and len((place / "executed").read_text().split()) > 5, timeout=20)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    assert headway_cli(*RUN).returncode == 0
    assert headway_cli(*RUN, "-o", "out.jsonl").returncode == 0
    assert results(place) == ALL
    assert headway_cli(*RUN, "-o", "second.jsonl").returncode == 0
    assert results(place, "second.jsonl") == ALL


KILLED = """
import os, signal, sys
from headway.run import output
real, seen, when = os.{call}, 0, int(sys.argv.pop(1))
def killing(*arguments, **options):
    global seen
    path = arguments[0]
    ours = {ours}
    if ours and not {after}:
        seen += 1
        if seen == when: os.kill(os.getpid(), signal.SIGKILL)
    done = real(*arguments, **options)
    if ours and {after}:
        seen += 1
        if seen == when: os.kill(os.getpid(), signal.SIGKILL)
    return done
os.{call} = killing
import headway.cli
headway.cli.main()
"""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("call", "ours"),
    [
        ("open", "str(path).endswith('out.jsonl')"),
        ("ftruncate", "True"),
        ("pwrite", "True"),
        ("fsync", "True"),
    ],
)
def test_killed_around_any_step_of_writing_the_file_the_same_command_continues(
    place: Path, headway_cli: Cli, call: str, ours: str, after: bool
):
    script = KILLED.format(call=call, ours=ours, after=after)
    arguments = [*RUN, "-o", "out.jsonl"]
    for fresh in ([], ["--fresh"]):
        killed = subprocess.run(
            [sys.executable, "-c", script, "1", *arguments, *fresh],
            cwd=place,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        done = headway_cli(*arguments)
        assert done.returncode == 0, done.stderr
        assert results(place) == ALL


def test_a_full_disk_under_the_output_file_ends_the_run_and_the_same_command_continues(
    place: Path, headway_cli: Cli, small_disk: Callable[[int], Path]
):
    disk = small_disk(2**20)
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * (2**20 - 4096))
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(2000)))
    full = headway_cli(*RUN, "-o", disk / "out.jsonl")
    assert full.returncode == 1, full.stderr
    assert "safe in the ledger" in full.stderr
    ballast.unlink()
    done = headway_cli(*RUN, "-o", disk / "out.jsonl")
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line)["result"] for line in (disk / "out.jsonl").read_text().splitlines())
    assert found == sorted(n * n for n in range(2000))


def test_a_fresh_start_may_write_the_file_that_the_job_wrote_before(place: Path, headway_cli: Cli):
    assert headway_cli(*RUN, "-o", "out.jsonl").returncode == 0
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(20)))
    for _ in range(2):
        fresh = headway_cli(*RUN, "-o", "out.jsonl", "--fresh")
        assert fresh.returncode == 0, fresh.stderr
        assert results(place) == ALL[:20]


def test_the_file_of_another_job_is_not_touched(place: Path, headway_cli: Cli):
    assert headway_cli(*RUN, "-o", "out.jsonl").returncode == 0
    before = (place / "out.jsonl").read_bytes()
    for arguments in ((), ("--fresh",)):
        other = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "b", "-o", "out.jsonl", *arguments)
        assert other.returncode == 2, other.stderr
        assert "was not written by this job" in other.stderr
    assert (place / "out.jsonl").read_bytes() == before


def test_a_file_that_took_the_place_of_ours_is_not_touched(place: Path, headway_cli: Cli):
    assert headway_cli(*RUN, "-o", "out.jsonl").returncode == 0
    (place / "out.jsonl").write_text("precious\n" * 10_000)
    refused = headway_cli(*RUN, "-o", "out.jsonl")
    assert refused.returncode == 2
    assert (place / "out.jsonl").read_text() == "precious\n" * 10_000


def test_two_jobs_at_once_cannot_write_one_file(place: Path, headway_cli: Cli, spawn_cli: Spawn):
    """Before the first line is written the file is empty, and nobody's by its looks."""
    (place / "blocked").touch()
    blocked = ("run", "jobs:square_when_allowed", "-i", "items.jsonl", "-j", "ads", "-o", "out.jsonl")
    first = spawn_cli(*blocked, stderr=subprocess.DEVNULL)
    eventually((place / "out.jsonl").exists, timeout=30)
    second = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "other", "-o", "out.jsonl")
    (place / "blocked").unlink()
    assert second.returncode == 5, second.stderr
    assert "Another run is writing results to out.jsonl" in second.stderr
    assert first.wait(60) == 0
    assert results(place) == ALL
    refused = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "other", "-o", "out.jsonl")
    assert refused.returncode == 2
    assert results(place) == ALL


def test_who_takes_a_job_over_from_a_stopped_run_writes_its_file(place: Path, headway_cli: Cli, spawn_cli: Spawn):
    (place / "blocked").touch()
    command = ("run", "jobs:square_when_allowed", "-i", "items.jsonl", "-j", "ads", "-o", "out.jsonl")
    stopped = spawn_cli(*command, stderr=subprocess.PIPE)
    eventually((place / "begun").exists, timeout=30)
    stopped.send_signal(signal.SIGSTOP)  # it waits for its items, and writes nothing at this moment
    try:
        (place / "blocked").unlink()
        with Ledger.open(f"sqlite:///{place}/headway.db") as ledger:  # as if its lease had lapsed
            ledger.database.run(lambda tx: tx.execute("UPDATE jobs SET holder = NULL, lease_until = NULL"))
        successor = headway_cli(*command)
        assert successor.returncode == 0, successor.stderr
    finally:
        stopped.send_signal(signal.SIGCONT)
    said = stopped.communicate(timeout=60)[1]
    assert stopped.returncode == 5, said
    assert results(place) == ALL


@pytest.mark.parametrize("change", ["removed", "emptied", "moved"])
def test_a_file_that_was_changed_while_the_run_went_on_is_whole_at_the_end(place: Path, spawn_cli: Spawn, change: str):
    (place / "slow").touch()
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(400)))
    run = spawn_cli(*RUN, "-o", "out.jsonl", stderr=subprocess.DEVNULL)
    file = place / "out.jsonl"
    eventually(lambda: file.exists() and file.stat().st_size > 0, timeout=30)
    if change == "removed":
        file.unlink()
    elif change == "moved":
        file.rename(place / "elsewhere.jsonl")
    else:
        os.truncate(file, 0)
    assert run.wait(60) == 0
    assert results(place) == sorted(n * n for n in range(400))


def test_what_somebody_put_in_the_place_of_the_file_while_the_run_went_on_is_not_touched(
    place: Path, headway_cli: Cli, spawn_cli: Spawn
):
    (place / "slow").touch()
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(400)))
    run = spawn_cli(*RUN, "-o", "out.jsonl", stderr=subprocess.PIPE)
    file = place / "out.jsonl"
    eventually(lambda: file.exists() and file.stat().st_size > 0, timeout=30)
    (place / "mine").write_text("my notes\n" * 10_000)
    (place / "mine").replace(file)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 2, said
    assert "was not written by this job" in said
    assert file.read_text() == "my notes\n" * 10_000
    file.unlink()
    assert headway_cli(*RUN, "-o", "out.jsonl").returncode == 0
    assert results(place) == sorted(n * n for n in range(400))


def test_a_pipe_does_not_overwrite_a_foreign_file_either(place: Path, headway_cli: Cli):
    (place / "out.jsonl").write_text("precious\n")
    refused = headway_cli("run", "jobs:square", "-i", "-", "-j", "ads", "-o", "out.jsonl", stdin="1\n2\n")
    assert refused.returncode == 2, refused.stderr
    assert (place / "out.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [("out.csv", "JSON lines, not as CSV"), ("/dev/null", "not a file"), ("no/out.jsonl", "directory")],
)
def test_a_name_that_cannot_hold_results_is_refused_before_anything_runs(
    place: Path, headway_cli: Cli, name: str, said: str
):
    refused = headway_cli(*RUN, "-o", name)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert not (place / "headway.db").exists()


def test_results_do_not_stay_in_the_memory_of_a_worker(tmp_path: Path):
    def large(item: int) -> str:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return f"{peak}:" + "x" * 500_000

    headway.map(
        large, range(300), job="ads", database=f"sqlite:///{tmp_path}/a.db", workers=1, progress="none",
        output=tmp_path / "out.jsonl",
    )  # fmt: skip
    peaks = [int(json.loads(line)["result"].partition(":")[0]) for line in (tmp_path / "out.jsonl").open()]
    assert len(peaks) == 300
    assert max(peaks) - min(peaks) < 60_000, "kilobytes; all results together take 150,000"
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        assert ledger.job("ads").info().done == 300
    assert os.stat(tmp_path / "out.jsonl").st_mode & 0o777 == 0o600


def test_a_run_that_lost_its_job_does_not_touch_the_file_that_its_successor_began_anew(tmp_path: Path):
    """Places in the file are those of the successor: what the earlier run wrote at its own would overwrite other lines."""
    path = tmp_path / "out.jsonl"
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        job = ledger.create("ads", max_retries=0)
        job.register([NewItem(idx, str(idx), None, None) for idx in range(4)])
        hold = ledger.hold(job, {})
        stopped = Output(job.held_by(hold), path)
        job.record([Done(0, None, '"long enough"'), Done(1, None, "1")], hold=hold)
        stopped.write()
        ledger.database.run(  # as if it had been stopped for a minute
            lambda tx: tx.execute(
                'UPDATE jobs SET lease_until = 0, holder = \'{"host": "x", "space": "", "pid": 1, "born": ""}\''
            )
        )
        successor = ledger.hold(job, {})
        own = job.held_by(successor)
        own.drop([0])
        own.rewrite_outputs()
        own.record([Done(2, None, "2")], hold=successor)
        output = Output(own, path)
        output.write()
        own.record([Done(3, None, "3")], hold=successor)
        before = path.read_bytes()
        with pytest.raises(StaleClaim):
            stopped.write()
        assert path.read_bytes() == before
        output.write()
        assert results(tmp_path) == [1, 2, 3]
        stopped.close()
        output.close()
