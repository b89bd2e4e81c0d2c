"""How a run ends and what it says: limits on failures, lost terminals, the last error, progress for programs."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.ledger import Job, Ledger
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = """
import asyncio, time
import headway
from headway.ledger import Ledger

def note(item):
    with open("executed", "a") as file:
        file.write(f"{item}\\n")

def gives_up(item):
    note(item)
    raise headway.GiveUp("never")

def not_json(item):
    note(item)
    return object()

def fails(item):
    note(item)
    raise ValueError("no")

async def fails_later(item):
    note(item)
    await asyncio.sleep(0)
    raise ValueError("no")

def fails_sometimes(item):
    if item % 10 == 9:
        raise ValueError("no")

def in_turn(item):
    if item < 15:
        raise KeyError("often")
    if item == 15:
        raise OSError("the last one")

def revives(item):
    # the second item gives the first another life, as its own last act
    note(item)
    with Ledger.open("sqlite:///headway.db") as ledger:
        job = ledger.job("ads")
        if item == 0 and not job.info().done:
            raise headway.GiveUp("not yet")
        while item == 1 and not job.retry_dead():
            time.sleep(0.01)

def revives_and_fails(item):
    # items 0 and 1 always fail; item 2 retries them as its last act
    note(item)
    if item < 2:
        raise headway.GiveUp("never")
    with Ledger.open("sqlite:///headway.db") as ledger:
        job = ledger.job("ads")
        while job.info().dead < 2:
            time.sleep(0.01)
        job.retry_dead()

def revives_damaged(item):
    if item == 1:
        with Ledger.open("sqlite:///headway.db") as ledger:
            ledger.database.run(lambda tx: tx.execute("UPDATE input_products SET payload = '7' WHERE idx = 0"))
    revives(item)

def slow(item):
    note(item)
    time.sleep(0.05)

async def blocks(item):
    note(item)
    if item == 3:
        time.sleep(30)
    await asyncio.sleep(0.3)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(FUNCTIONS)
    write_items(tmp_path, 20)
    return tmp_path


def write_items(place: Path, count: int) -> None:
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(count)))


def executed(place: Path) -> Counter[int]:
    file = place / "executed"
    return Counter(int(line) for line in file.read_text().split()) if file.exists() else Counter()


def job_in(place: Path) -> Job:
    return Ledger.open(f"sqlite:///{place / 'headway.db'}", create=False).job("ads")


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["gives_up", "not_json"])
def test_what_cannot_succeed_gets_no_last_pass(place: Path, headway_cli: Cli, function: str):
    arguments = ("run", f"jobs:{function}", "-i", "items.jsonl", "-j", "ads", "-o", "out.jsonl")
    done = headway_cli(*arguments)
    assert done.returncode == 3, done.stderr
    assert headway_cli(*arguments).returncode == 3
    assert executed(place) == Counter(range(20)), "one call each, in this run and the next"


@pytest.mark.parametrize("most", [1, 5, 42])
@pytest.mark.parametrize("function", ["fails", "fails_sometimes"])
def test_with_one_worker_max_failures_is_exact(place: Path, headway_cli: Cli, most: int, function: str):
    write_items(place, 3000)
    done = headway_cli(
        "run",
        f"jobs:{function}",
        "-i",
        "items.jsonl",
        "-j",
        "ads",
        "-w",
        "1",
        "--retries",
        "0",
        "--max-failures",
        str(most),
    )
    assert done.returncode == 4, done.stderr
    info = job_in(place).info()
    assert info.dead == most
    assert f"Stopped: {most} " in done.stderr
    assert info.remaining > 0


def test_failures_that_are_tried_again_do_not_count_and_do_not_hold_up_the_run(place: Path, headway_cli: Cli):
    write_items(place, 2000)
    done = headway_cli(
        "run", "jobs:fails_sometimes", "-i", "items.jsonl", "-j", "ads", "-w", "1", "--retries", "1", "--max-failures", "7",
        env={"HEADWAY_RETRY_DELAY": "0.01"},
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert job_in(place).info().dead == 7


@pytest.mark.parametrize(("mode", "function"), [("process", "fails"), ("thread", "fails"), ("async", "fails_later")])
def test_with_many_workers_max_failures_is_exceeded_by_what_ran_at_that_moment_at_most(
    place: Path, headway_cli: Cli, mode: str, function: str
):
    write_items(place, 3000)
    done = headway_cli(
        "run", f"jobs:{function}", "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "4", "--retries", "0",
        "--max-failures", "5",
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert 5 <= job_in(place).info().dead <= 5 + 4


def test_an_item_that_blocks_the_loop_times_out_and_its_companions_are_not_charged(place: Path, headway_cli: Cli):
    write_items(place, 6)
    done = headway_cli(
        "run", "jobs:blocks", "-i", "items.jsonl", "-j", "ads", "-w", "6", "--retries", "0", "--timeout", "1",
        "--no-last-pass",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    assert [letter.idx for letter in job.dead_letters()] == [3]
    assert (job.info().done, job.info().failures) == (5, 1)


# ---- a lost terminal ------------------------------------------------------------------------------------------------


def test_a_lost_terminal_ends_the_run_as_sigterm_does(place: Path, spawn_cli: Spawn):
    write_items(place, 5000)
    run = spawn_cli("run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", "-w", "2", stderr=subprocess.PIPE)
    eventually(lambda: len(executed(place)) > 4, timeout=20)
    run.send_signal(signal.SIGHUP)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 143, said
    assert job_in(place).info().done == len(executed(place)), "what ran was finished and recorded"
    assert job_in(place).runs()[0].outcome == "interrupted"


def test_also_when_nothing_can_be_written_to_it_any_more(place: Path):
    write_items(place, 5000)
    ours, theirs = pty.openpty()
    script = "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); import headway.cli as c; c.main()"
    run = subprocess.Popen(
        [sys.executable, "-c", script, "run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", "-w", "2"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=place,
    )  # fmt: skip
    os.close(theirs)
    try:
        eventually(lambda: len(executed(place)) > 4, timeout=20)
        os.close(ours)  # the terminal is gone: the kernel sends SIGHUP, and every write fails
        assert run.wait(30) == 143
    finally:
        run.kill()
        run.wait()
    assert job_in(place).info().done == len(executed(place))


def test_under_nohup_a_lost_terminal_does_not_end_the_run(place: Path):
    write_items(place, 60)
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); import headway.cli as c; c.main()"
    run = subprocess.Popen(
        [sys.executable, "-c", script, "run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", "-w", "2"],
        cwd=place, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    eventually(lambda: len(executed(place)) > 4, timeout=20)
    run.send_signal(signal.SIGHUP)
    assert run.wait(30) == 0
    assert job_in(place).info().done == 60


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_with_progress_as_json_every_line_on_stderr_is_json_and_the_last_one_is_the_summary(
    place: Path, headway_cli: Cli
):
    done = headway_cli(
        "run", "jobs:in_turn", "-i", "items.jsonl", "-j", "ads", "--progress", "json", "--retries", "0",
        env={"HEADWAY_LOG_LEVEL": "info"},
    )  # fmt: skip
    assert done.returncode == 3
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["event"] == "summary"
    assert (lines[-1]["job"], lines[-1]["dead"], lines[-1]["exit_code"]) == ("ads", 16, 3)
    assert "16 dead" in lines[-1]["message"]


def test_with_progress_as_json_an_error_is_json_too(place: Path, headway_cli: Cli):
    done = headway_cli("run", "jobs:nothing", "-i", "items.jsonl", "--progress", "json")
    assert done.returncode == 2
    (line,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["event"], line["exit_code"]) == ("error", 2)
    assert "no function 'nothing'" in line["message"]
    assert "in_turn" in line["hint"]


def test_the_last_error_is_the_last_one_not_the_most_frequent(place: Path, headway_cli: Cli):
    done = headway_cli(
        "run", "jobs:in_turn", "-i", "items.jsonl", "-j", "ads", "-w", "1", "--progress", "json", "--retries", "0",
        "--no-last-pass",
    )  # fmt: skip
    (end,) = [line for line in map(json.loads, done.stderr.splitlines()) if line["event"] == "end"]
    assert (end["last_error"], end["last_error_count"]) == ("OSError", 1)


def test_a_run_that_is_told_to_end_does_not_wait_for_sinks(place: Path, headway_cli: Cli, spawn_cli: Spawn):
    """An earlier job's completion waits for a receiver that never answers; whoever says SIGTERM waits for neither."""
    assert headway_cli("run", "jobs:note", "-i", "items.jsonl", "-j", "earlier").returncode == 0
    (place / "executed").unlink()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        (place / "headway.toml").write_text(f'sinks = ["http://127.0.0.1:{deaf.getsockname()[1]}/"]\n')
        run = spawn_cli("run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", stderr=subprocess.DEVNULL)
        eventually((place / "executed").exists, timeout=30)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 143
        deaf.setblocking(False)
        with pytest.raises(BlockingIOError):
            deaf.accept()


def test_a_run_that_finished_left_nothing_that_was_given_another_life_at_its_very_end(place: Path, headway_cli: Cli):
    (place / "items.jsonl").write_text("0\n1\n")
    ended = headway_cli("run", "jobs:revives", "-i", "items.jsonl", "-j", "ads", "-w", "1")
    assert ended.returncode == 0, ended.stderr
    assert (place / "executed").read_text().split() == ["0", "1", "0"]
    with Ledger.open(f"sqlite:///{place}/headway.db") as ledger:
        info = ledger.job("ads").info()
    assert (info.done, info.dead, info.remaining) == (2, 0, 0)
    assert info.finished_at is not None


def test_failures_of_dead_letters_retried_at_the_very_end_count_for_max_failures(place: Path, headway_cli: Cli):
    """The run finds them after its last pass over dead letters, in which failures do not count."""
    write_items(place, 3)
    ended = headway_cli(
        "run", "jobs:revives_and_fails", "-i", "items.jsonl", "-j", "ads", "-w", "1", "--max-failures", "3"
    )
    assert (place / "executed").read_text().split() == ["0", "1", "2", "0"]
    assert ended.returncode == 4, ended.stderr
    info = job_in(place).info()
    assert (info.done, info.dead, info.remaining) == (1, 1, 1)


def test_a_job_is_finished_also_if_what_got_another_life_at_its_very_end_cannot_be_handed_out(
    place: Path, headway_cli: Cli
):
    (place / "items.jsonl").write_text("0\n1\n")
    ended = headway_cli("run", "jobs:revives_damaged", "-i", "items.jsonl", "-j", "ads", "-w", "1")
    assert ended.returncode == 3, ended.stderr
    with Ledger.open(f"sqlite:///{place}/headway.db") as ledger:
        info = ledger.job("ads").info()
    assert (info.done, info.dead, info.remaining) == (1, 1, 0)
    assert info.finished_at is not None
