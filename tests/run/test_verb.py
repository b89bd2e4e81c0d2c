"""`headway run`, as a person uses it: a real command in a real directory, started, killed, started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from headway.ledger import Job, Ledger
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = '''
import asyncio, os, signal, sys, time

def log(item):
    """One line per execution, whatever becomes of it."""
    with open("executed", "a") as file:
        file.write(f"{item['n']}\\n")

def square(item):
    log(item)
    return {"square": item["n"] ** 2}

def slow(item):
    log(item)
    time.sleep(0.02)

def sleepy(item):
    log(item)
    time.sleep(60)

def flaky(item):
    log(item)
    if item["n"] % 4 == 1:
        raise ValueError(f"no price for product {item['n']} token=canary-secret")

def recovers(item):
    """Fails the first time an item is tried."""
    mark = f"tried-{item['n']}"
    if item["n"] % 4 == 1 and not os.path.exists(mark):
        open(mark, "w").close()
        raise ConnectionError("try again")
    log(item)

def killer(item):
    log(item)
    if item["n"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

def killed_by_a_nameless_signal(item):
    log(item)
    if item["n"] == 3:
        os.kill(os.getpid(), 40)

def kills_its_companions(item):
    log(item)
    time.sleep(0.15 if item["n"] == 3 else 0.4)
    if item["n"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

async def kills_its_loop(item):
    log(item)
    await asyncio.sleep(0.15 if item["n"] == 3 else 0.4)
    if item["n"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

def hangs(item):
    log(item)
    if item["n"] == 3:
        time.sleep(60)

def exits(item):
    log(item)
    if item["n"] == 3:
        sys.exit(7)

def not_json(item):
    return object()

async def aio(item):
    await asyncio.sleep(0.001)
    log(item)
    if item["n"] == 3:
        raise KeyError("page_count")

async def aio_hangs(item):
    log(item)
    if item["n"] == 3:
        await asyncio.sleep(60)

def gives_up(item):
    import headway
    log(item)
    raise headway.GiveUp("this will never work")

number = 7
def takes_two(a, b): ...
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(FUNCTIONS)
    write_items(tmp_path, 40)
    return tmp_path


def write_items(place: Path, count: int, name: str = "items.jsonl") -> None:
    (place / name).write_text("".join(json.dumps({"n": n, "id": f"p-{n}"}) + "\n" for n in range(count)))


def executed(place: Path) -> Counter[int]:
    file = place / "executed"
    return Counter(int(line) for line in file.read_text().split()) if file.exists() else Counter()


def job_in(place: Path, id: str = "ads") -> Job:
    return Ledger.open(f"sqlite:///{place / 'headway.db'}", create=False).job(id)


# ---- the whole way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_every_item_is_done_once_and_recorded(place: Path, headway_cli: Cli, mode: str):
    done = headway_cli("run", "jobs:square", "--items", "items.jsonl", "--job", "ads", "--mode", mode, "-w", "2")
    assert done.returncode == 0, done.stderr
    assert "Run ads finished in" in done.stderr
    assert "40 done, 0 dead, 0 retries" in done.stderr
    assert done.stdout == ""
    assert executed(place) == Counter(range(40))
    info = job_in(place).info()
    assert (info.total, info.done, info.status) == (40, 40, "completed")


def test_an_async_function_runs_on_a_loop_without_being_told(place: Path, headway_cli: Cli):
    done = headway_cli(
        "run", "jobs:aio", "-i", "items.jsonl", "-j", "ads", "--retries", "1", env={"HEADWAY_RETRY_DELAY": "0.01"}
    )
    assert done.returncode == 3, done.stderr
    assert executed(place)[3] == 3, "a first try, a retry, and the pass at the end"
    assert job_in(place).causes()[0].message == "'page_count'"


@pytest.mark.req("S3-51")
def test_dead_letters_keep_their_error_get_a_pass_at_the_end_and_are_reported_apart(place: Path, headway_cli: Cli):
    settings = {"HEADWAY_RETRY_DELAY": "0.01"}
    done = headway_cli("run", "jobs:flaky", "-i", "items.jsonl", "-j", "ads", "--retries", "1", env=settings)
    assert done.returncode == 3
    assert "30 done, 10 dead" in done.stderr
    lines = done.stderr.splitlines()
    (cause,) = [line for line in lines if "ValueError" in line and "headway retry" in line]
    assert cause.split()[:3] == ["10", "#1", "ValueError"]
    assert "no price for product {n} token=***" in cause
    assert "headway retry ads --cause 1" in cause
    assert "Details:  headway dead show ads" in lines
    assert "canary" not in done.stderr
    runs = executed(place)
    assert {n: runs[n] for n in range(40) if n % 4 == 1} == dict.fromkeys(range(1, 40, 4), 3)
    order = [int(line) for line in (place / "executed").read_text().split()]
    assert sorted(order[-10:]) == list(range(1, 40, 4)), "the pass over dead letters comes last"
    again = headway_cli("run", "jobs:flaky", "-i", "items.jsonl", "-j", "ads", env=settings)
    assert (again.returncode, executed(place)) == (3, runs), "a dead item is not offered again by the same command"


def test_an_item_that_recovers_is_done_after_its_wait(place: Path, headway_cli: Cli):
    done = headway_cli("run", "jobs:recovers", "-i", "items.jsonl", "-j", "ads", env={"HEADWAY_RETRY_DELAY": "0.05"})
    assert done.returncode == 0, done.stderr
    assert "40 done, 0 dead, 10 retries" in done.stderr
    assert executed(place) == Counter(range(40))


def test_a_function_can_say_that_trying_again_is_no_use(place: Path, headway_cli: Cli):
    write_items(place, 3)
    done = headway_cli("run", "jobs:gives_up", "-i", "items.jsonl", "-j", "ads", "--no-last-pass")
    assert done.returncode == 3
    assert executed(place) == Counter(range(3))


# ---- interrupted and resumed ----------------------------------------------------------------------------------------


@pytest.mark.req("S3-05", "S3-06", "S3-08")
def test_ctrl_c_finishes_what_runs_and_the_same_command_continues(place: Path, spawn_cli: Spawn, headway_cli: Cli):
    arguments = ("run", "jobs:slow", "--items", "items.jsonl", "--job", "ads", "--workers", "2")
    run = spawn_cli(*arguments, stderr=subprocess.PIPE)
    eventually(lambda: len(executed(place)) >= 6, timeout=20)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130, said
    assert "Stopping: finishing" in said
    assert "Continue:  headway run jobs:slow --items items.jsonl --job ads --workers 2" in said
    kept = job_in(place).info().done
    assert kept == len(executed(place)), "what was begun was finished and recorded"
    resumed = headway_cli(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming run ads (started" in resumed.stderr
    assert f"{kept} of 40 already done" in resumed.stderr
    assert f"40 done ({kept} kept)" in resumed.stderr
    assert executed(place) == Counter(range(40)), "nothing ran twice"


def test_a_second_ctrl_c_abandons_what_runs_without_an_attempt(place: Path, spawn_cli: Spawn):
    run = spawn_cli("run", "jobs:sleepy", "-i", "items.jsonl", "-j", "ads", "-w", "2", stderr=subprocess.PIPE)
    eventually(lambda: len(executed(place)) == 2, timeout=20)
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    next(line for line in run.stderr if "Ctrl-C again" in line)  # it has understood the first
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=20)
    assert run.returncode == 130, said
    job = job_in(place)
    assert (job.info().done, job.info().failures, job.progress().running) == (0, 0, 0)
    assert job.runs()[0].outcome == "interrupted"


def test_sigterm_ends_within_five_seconds_also_in_the_middle_of_a_long_item(place: Path, spawn_cli: Spawn):
    run = spawn_cli("run", "jobs:sleepy", "-i", "items.jsonl", "-j", "ads", "-w", "2", stderr=subprocess.PIPE)
    eventually(lambda: len(executed(place)) == 2, timeout=20)
    run.terminate()
    _, said = run.communicate(timeout=10)
    assert run.returncode == 143, said
    assert job_in(place).info().failures == 0


@pytest.mark.req("S3-05", "S3-22")
def test_kill_9_of_the_whole_run_loses_nothing_and_its_workers_end_too(place: Path, spawn_cli: Spawn, headway_cli: Cli):
    write_items(place, 300)
    arguments = ("run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", "-w", "2", "--output", "out.jsonl")
    for round_ in range(1, 4):
        run = spawn_cli(*arguments, stderr=subprocess.DEVNULL)
        _wait_for_executions(place, round_ * 25)
        workers = _children(run.pid)
        assert len(workers) == 2
        run.kill()
        run.wait()
        _wait_for_the_end_of(workers)
    done = headway_cli(*arguments)
    assert done.returncode == 0, done.stderr
    info = job_in(place).info()
    assert (info.total, info.done, info.dead) == (300, 300, 0)
    again = [n for n, count in executed(place).items() if count > 1]
    assert len(again) <= 3 * 2 * 3, "only what ran or was unreported at a kill may run again"
    lines = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(300)), "each result exactly once"


def test_workers_in_the_middle_of_a_long_item_end_when_their_parent_is_killed(place: Path, spawn_cli: Spawn):
    run = spawn_cli("run", "jobs:sleepy", "-i", "items.jsonl", "-j", "ads", "-w", "2", stderr=subprocess.DEVNULL)
    _wait_for_executions(place, 2)
    workers = _children(run.pid)
    assert len(workers) == 2
    run.kill()
    run.wait()
    _wait_for_the_end_of(workers)


def _wait_for_executions(place: Path, count: int) -> None:
    eventually(lambda: len(executed(place)) >= count, timeout=20)


def _wait_for_the_end_of(pids: list[int]) -> None:
    eventually(lambda: not any(map(_alive, pids)), timeout=5, message="workers outlived their parent")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_second_run_of_the_same_job_is_refused_and_says_who_runs_it(place: Path, spawn_cli: Spawn, headway_cli: Cli):
    run = spawn_cli("run", "jobs:sleepy", "-i", "items.jsonl", "-j", "ads", "-w", "1", stderr=subprocess.PIPE)
    eventually(lambda: len(executed(place)) == 1, timeout=20)
    second = headway_cli("run", "jobs:sleepy", "-i", "items.jsonl", "-j", "ads")
    assert second.returncode == 5
    assert f"process {run.pid} on {socket.gethostname()}" in second.stderr
    run.kill()
    run.wait()
    # A holder that can be seen to be dead is not waited for.
    freed = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "--accept-changes")
    assert freed.returncode == 0, freed.stderr


# ---- an item that harms its worker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_worker_killed_by_its_item_costs_that_item_an_attempt_and_nobody_else(
    place: Path, headway_cli: Cli, mode: str
):
    done = headway_cli(
        "run", "jobs:killer", "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "4", "--retries", "1",
        "--no-last-pass", env={"HEADWAY_RETRY_DELAY": "0.01"},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    assert (job.info().done, job.info().dead, job.info().failures) == (39, 1, 2)
    (letter,) = job.dead_letters()
    assert letter.idx == 3
    assert "was killed by SIGKILL" in letter.error


def test_a_signal_without_a_name_kills_its_own_item_and_not_the_run(place: Path, headway_cli: Cli):
    done = headway_cli("run", "jobs:killed_by_a_nameless_signal", "-i", "items.jsonl", "-j", "ads", "-w", "2",
                       "--retries", "0", "--no-last-pass")  # fmt: skip
    assert done.returncode == 3, done.stderr
    (letter,) = job_in(place).dead_letters()
    assert (letter.idx, job_in(place).info().done) == (3, 39)
    assert "was killed by signal 40" in letter.error


def test_a_run_started_where_the_ends_of_children_are_ignored_knows_how_its_workers_ended(place: Path):
    """Some supervisors leave SIGCHLD ignored to what they start."""
    start = (
        "import signal, os, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    run = [sys.executable, "-m", "headway", "run", "jobs:killer", "-i", "items.jsonl", "-j", "ads", "-w", "2",
           "--retries", "0", "--no-last-pass"]  # fmt: skip
    command = [sys.executable, "-c", start, *run]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    (letter,) = job_in(place).dead_letters()
    assert "was killed by SIGKILL" in letter.error


@pytest.mark.parametrize("workers", [29, 30, 31, 40])
def test_more_workers_than_the_process_may_have_descriptors_are_one_clear_error(place: Path, workers: int):
    """Also where all of them could be started: the database is closed for a fork, and must be opened again."""
    write_items(place, 40)
    limit = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); "
        "os.execv(sys.executable, sys.argv[1:])"
    )
    run = [sys.executable, "-m", "headway", "run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", "-w", str(workers)]
    command = [sys.executable, "-c", limit, *run]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot be started: Too many open files." in done.stderr
    assert "Traceback" not in done.stderr
    assert not job_in(place).info().held
    assert not (place / "executed").exists()


def test_more_threads_than_the_machine_has_run_no_item_twice(place: Path):
    """Those that could be started do the work; a worker that gave up would leave each of its items to be tried alone."""
    write_items(place, 600)
    limit = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "os.execv(sys.executable, sys.argv[1:])"
    )
    run = [sys.executable, "-m", "headway", "run", "jobs:slow", "-i", "items.jsonl", "-w", "4000", "--mode", "thread"]
    command = [sys.executable, "-c", limit, *run]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "fewer items run at once than requested" in done.stderr
    assert len((place / "executed").read_text().splitlines()) == 600


def test_map_in_a_program_that_waits_for_all_its_children_itself_does_its_work(place: Path):
    program = (
        "import os, signal, headway, jobs\n"
        "def reap(*_):\n"
        "    try:\n"
        "        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "    except ChildProcessError: pass\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGCHLD, reap)\n"
        "    ended = headway.map(jobs.killer, [{'n': n} for n in range(8)], job='ads', workers=2, retries=0,"
        " last_pass=False)\n"
        "    print(ended.done, ended.dead)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "7 1\n", done.stderr


@pytest.mark.parametrize("function", ["kills_its_companions", "kills_its_loop"])
def test_of_several_items_in_one_process_the_one_that_killed_it_is_found(place: Path, headway_cli: Cli, function: str):
    write_items(place, 6)
    mode = "async" if function == "kills_its_loop" else "thread"
    done = headway_cli(
        "run", f"jobs:{function}", "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "6", "--retries", "0",
        "--no-last-pass",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    assert (job.info().done, job.info().failures) == (5, 1)
    assert [letter.idx for letter in job.dead_letters()] == [3]
    assert executed(place)[3] == 2, "once with the others, once alone"


@pytest.mark.parametrize("mode", ["process", "thread", "async"])
def test_an_item_that_takes_too_long_times_out_alone(place: Path, headway_cli: Cli, mode: str):
    function = "jobs:aio_hangs" if mode == "async" else "jobs:hangs"
    done = headway_cli(
        "run", function, "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "3", "--retries", "0",
        "--timeout", "0.7", "--no-last-pass",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    assert (job.info().done, job.info().failures) == (39, 1)
    (letter,) = job.dead_letters()
    assert letter.idx == 3
    assert letter.error == "TimedOut: no result within 0.7 s"


def test_sys_exit_in_the_function_fails_the_item_not_the_run(place: Path, headway_cli: Cli):
    done = headway_cli("run", "jobs:exits", "-i", "items.jsonl", "-j", "ads", "--retries", "0", "--no-last-pass")
    assert done.returncode == 3, done.stderr
    assert "sys.exit(7)" in job_in(place).dead_letters()[0].error


def test_max_failures_stops_the_run_with_exit_4_and_the_rest_stays_pending(place: Path, headway_cli: Cli):
    write_items(place, 4000)
    done = headway_cli(
        "run", "jobs:flaky", "-i", "items.jsonl", "-j", "ads", "--retries", "0", "--max-failures", "5", "-w", "1"
    )
    assert done.returncode == 4, done.stderr
    assert "(--max-failures)" in done.stderr
    info = job_in(place).info()
    assert 5 <= info.dead < 1000
    assert info.remaining > 0
    assert info.finished_at is None


def test_the_rate_limits_how_many_items_start(place: Path, headway_cli: Cli):
    write_items(place, 12)
    done = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "--rate", "10", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"] > 0.9


# ---- what is written out --------------------------------------------------------------------------------------------


def test_results_are_written_once_each_also_when_the_file_was_lost_or_half_written(place: Path, headway_cli: Cli):
    write_items(place, 10)
    arguments = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "--key", "id", "-o", "out.jsonl")
    assert headway_cli(*arguments).returncode == 0
    whole = (place / "out.jsonl").read_text()
    assert {json.loads(line)["key"]: json.loads(line)["result"] for line in whole.splitlines()} == {
        f"p-{n}": {"square": n * n} for n in range(10)
    }
    (place / "out.jsonl").write_text(whole + '{"index": 99, "torn')  # as a killed run leaves it
    assert headway_cli(*arguments).returncode == 0
    assert (place / "out.jsonl").read_text() == whole
    (place / "out.jsonl").unlink()
    assert headway_cli(*arguments).returncode == 0
    assert (place / "out.jsonl").read_text() == whole


def test_a_file_that_is_not_ours_is_not_overwritten(place: Path, headway_cli: Cli):
    (place / "out.jsonl").write_text("precious\n")
    done = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-o", "out.jsonl")
    assert done.returncode == 2
    assert "was not written by this job" in done.stderr
    assert not (place / "headway.db").exists()
    assert (place / "out.jsonl").read_text() == "precious\n"


def test_a_result_that_is_not_json_is_a_failure_that_says_so(place: Path, headway_cli: Cli):
    write_items(place, 2)
    done = headway_cli("run", "jobs:not_json", "-i", "items.jsonl", "-o", "out.jsonl", "--no-last-pass")
    assert done.returncode == 3
    assert "which is not JSON" in done.stderr


def test_json_output_is_on_stdout_and_talk_on_stderr(place: Path, headway_cli: Cli):
    done = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "--json", "--progress", "json")
    outcome = json.loads(done.stdout)
    assert outcome["schema"] == "headway.run/1"
    assert (outcome["done"], outcome["dead"], outcome["exit_code"]) == (40, 0, 0)
    first = json.loads(done.stderr.splitlines()[0])
    assert "event" in first


def test_the_webhook_is_told_once_when_the_job_is_finished(place: Path, headway_cli: Cli):
    bodies: list[dict[str, object]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        settings = {"HEADWAY_WEBHOOK": f"http://127.0.0.1:{server.server_port}/done"}
        for _ in range(2):
            assert headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", env=settings).returncode == 0
    finally:
        server.shutdown()
        server.server_close()
    assert [(body["type"], body["job"], body["data"]) for body in bodies] == [
        ("job.completed", "ads", {"total": 40, "succeeded": 40, "failed": 0})
    ]


# ---- a pipe ---------------------------------------------------------------------------------------------------------


def test_items_can_come_from_a_pipe_and_the_same_pipe_resumes(place: Path, headway_cli: Cli):
    items = (place / "items.jsonl").read_text()
    first = headway_cli("run", "jobs:square", "-i", "-", "-j", "ads", stdin=items)
    assert first.returncode == 0, first.stderr
    second = headway_cli("run", "jobs:square", "-i", "-", "-j", "ads", stdin=items + '{"n": 40}\n')
    assert second.returncode == 0, second.stderr
    assert executed(place) == Counter(range(41))
    changed = headway_cli("run", "jobs:square", "-i", "-", "-j", "ads", stdin='{"n": 7}\n')
    assert changed.returncode == 5
    assert "Line 1 of standard input" in changed.stderr


def test_plain_lines_on_a_pipe_are_texts_and_work_begins_before_the_end(place: Path, spawn_cli: Spawn):
    (place / "words.py").write_text("def shout(word):\n    open('seen', 'a').write(word.upper() + '\\n')\n")
    run = spawn_cli("run", "words:shout", "-i", "-", "-j", "ads", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdin is not None
    run.stdin.write("one\ntwo\n")
    run.stdin.flush()
    seen = place / "seen"  # two workers: either may be first
    eventually(lambda: seen.exists() and sorted(seen.read_text().split()) == ["ONE", "TWO"], timeout=20)
    assert job_in(place).info().sealed is False
    run.communicate("three\n", timeout=20)
    assert run.returncode == 0
    assert job_in(place).info().done == 3


def test_an_empty_pipe_is_bad_input(place: Path, headway_cli: Cli):
    done = headway_cli("run", "jobs:square", "-i", "-", "-j", "ads", stdin="")
    assert done.returncode == 2
    assert "no items on standard input" in done.stderr


# ---- changed input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda lines: ['{"n": 900}', *lines], "1 new"),
        (lambda lines: [*lines[:10], '{"n": 900}', *lines[10:]], "1 new"),
        (lambda lines: [*lines, '{"n": 900}'], "1 new"),
        (lambda lines: lines[1:], "1 gone"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "the order changed"),
        (lambda lines: [*lines[:5], '{"n": 900}', *lines[6:]], "1 changed"),
    ],
    ids=["inserted first", "inserted", "appended", "removed", "reordered", "changed"],
)
def test_an_edited_file_is_noticed_explained_and_accepted_on_request(
    place: Path, headway_cli: Cli, edit: Callable[[list[str]], list[str]], said: str
):
    arguments = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "-o", "out.jsonl")
    assert headway_cli(*arguments).returncode == 0
    lines = edit((place / "items.jsonl").read_text().splitlines())
    (place / "items.jsonl").write_text("\n".join(lines) + "\n")
    refused = headway_cli(*arguments)
    assert refused.returncode == 5
    assert said in refused.stderr
    assert "--accept-changes" in refused.stderr
    assert executed(place) == Counter(range(40)), "nothing was done"
    accepted = headway_cli(*arguments, "--accept-changes")
    assert accepted.returncode == 0, accepted.stderr
    numbers = [json.loads(line)["n"] for line in lines]
    assert executed(place) == Counter([*range(40), *(n for n in numbers if n == 900)])
    results = [json.loads(line)["result"]["square"] for line in (place / "out.jsonl").read_text().splitlines()]
    assert sorted(results) == sorted(n * n for n in numbers), "every result belongs to an item of the file"
    assert headway_cli(*arguments).returncode == 0, "and now the file is what is known"


@pytest.mark.parametrize("key", [(), ("--key", "id")], ids=["by content", "by key"])
def test_items_removed_by_accept_changes_are_not_counted_as_kept(place: Path, headway_cli: Cli, key: tuple[str, ...]):
    arguments = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", *key)
    assert headway_cli(*arguments).returncode == 0
    lines = (place / "items.jsonl").read_text().splitlines()[:30]
    (place / "items.jsonl").write_text("\n".join([*lines, '{"n": 900, "id": "new"}']) + "\n")
    accepted = headway_cli(*arguments, "--accept-changes", "--json")
    assert accepted.returncode == 0, accepted.stderr
    summary = json.loads(accepted.stdout)
    assert (summary["done"], summary["kept"]) == (31, 30)
    sheet = json.loads(headway_cli("show", "ads", "--json").stdout)
    assert (sheet["job"]["done"], [run["kept"] for run in sheet["runs"]]) == (31, [0, 30])
    assert "done 31 (30 kept), pending 0" in headway_cli("show", "ads").stdout


def test_a_run_of_an_earlier_version_that_kept_more_than_is_done_shows_no_negative_number(
    place: Path, headway_cli: Cli
):
    assert headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads").returncode == 0
    with closing(sqlite3.connect(place / "headway.db")) as database, database:
        database.execute("UPDATE runs SET kept = 100")
    assert "done 40 (40 kept), pending 0" in headway_cli("show", "ads").stdout


def test_a_completed_job_with_dead_letters_says_so_in_its_first_line(place: Path, headway_cli: Cli):
    assert headway_cli("run", "jobs:flaky", "-i", "items.jsonl", "-j", "ads", "--retries", "0").returncode == 3
    first = headway_cli("show", "ads").stdout.splitlines()[0]
    assert first.startswith("Job ads: completed with 10 dead letters "), first


def test_spaces_and_the_order_of_fields_are_no_change(place: Path, headway_cli: Cli):
    arguments = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads")
    assert headway_cli(*arguments).returncode == 0
    other = [
        json.dumps(dict(reversed(json.loads(line).items())), indent=None) for line in (place / "items.jsonl").open()
    ]
    (place / "items.jsonl").write_text("\n\n".join(other))
    assert headway_cli(*arguments).returncode == 0


def test_with_a_key_lines_may_move_and_be_added_but_worked_off_ones_not_change(place: Path, headway_cli: Cli):
    arguments = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "--key", "id")
    assert headway_cli(*arguments).returncode == 0
    lines = (place / "items.jsonl").read_text().splitlines()
    (place / "items.jsonl").write_text("\n".join(['{"n": 900, "id": "new"}', *reversed(lines)]))
    grown = headway_cli(*arguments)
    assert grown.returncode == 0, grown.stderr
    assert executed(place) == Counter([*range(40), 900])
    (place / "items.jsonl").write_text("\n".join(['{"n": 901, "id": "new"}', *lines]))
    refused = headway_cli(*arguments)
    assert refused.returncode == 5
    assert "'new' at line 1" in refused.stderr
    assert headway_cli(*arguments, "--accept-changes").returncode == 0
    assert executed(place) == Counter([*range(40), 900, 901])


def test_another_function_for_the_same_job_is_refused(place: Path, headway_cli: Cli):
    assert headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads").returncode == 0
    other = headway_cli("run", "jobs:slow", "-i", "items.jsonl", "-j", "ads")
    assert other.returncode == 5
    assert "jobs:square" in other.stderr
    assert "jobs:slow" in other.stderr


@pytest.mark.req("S3-07")
def test_fresh_starts_over_and_keeps_the_old_records_aside(place: Path, headway_cli: Cli):
    arguments = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads")
    assert headway_cli(*arguments).returncode == 0
    assert headway_cli(*arguments, "--fresh").returncode == 0
    assert executed(place) == Counter(dict.fromkeys(range(40), 2))
    with Ledger.open(f"sqlite:///{place / 'headway.db'}") as ledger:
        assert sorted((info.archived, info.done) for info in ledger.jobs(archived=True)) == [(False, 40), (True, 40)]


def test_the_same_command_without_a_job_name_finds_its_job_again(place: Path, headway_cli: Cli):
    write_items(place, 5, "other.jsonl")
    assert headway_cli("run", "jobs:square", "-i", "items.jsonl").returncode == 0
    again = headway_cli("run", "jobs:square", "-i", "items.jsonl")
    assert "was finished already" in again.stderr
    assert headway_cli("run", "jobs:square", "-i", "other.jsonl").returncode == 0
    with Ledger.open(f"sqlite:///{place / 'headway.db'}") as ledger:
        assert sorted(info.total for info in ledger.jobs()) == [5, 40]
        assert all(len(info.id) == 4 for info in ledger.jobs())


# ---- a dry run ------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(place: Path, headway_cli: Cli):
    dry = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "--key", "id", "--dry-run")
    assert dry.returncode == 0
    assert "would work on 40 items" in dry.stderr
    assert "p-0, p-1, p-2" in dry.stderr
    assert not (place / "headway.db").exists()
    shown = headway_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "--dry-run", "--json")
    assert json.loads(shown.stdout)["new"] == 40
    assert executed(place) == Counter()


# ---- bad input ------------------------------------------------------------------------------------------------------

BAD_FILES = {
    "empty.jsonl": (b"", "has no items"),
    "blank.jsonl": (b"\n \n", "has no items"),
    "broken.jsonl": (b'{"n": 1}\n{"n": 2}\n{"n": \n', "broken.jsonl, line 3: not JSON"),
    "nan.jsonl": (b'{"n": NaN}\n', "line 1: not JSON: NaN is not a JSON number"),
    "latin.jsonl": (b'{"n": "ok"}\n{"n": "caf\xe9"}\n', "latin.jsonl, line 2: not UTF-8"),
    "big.jsonl": (b'"' + b"x" * 300_000 + b'"\n', "at most 262,144 are allowed"),
    "nul.jsonl": (b'{"n": "a\\u0000b"}\n', "NUL"),
    "surrogate.jsonl": (b'{"n": "\\ud800"}\n', "cannot be kept as JSON"),
    "ragged.csv": (b"a,b\n1,2\n3\n", "ragged.csv, line 3: 1 fields where the header has 2"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "line 1: not JSON"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.req("S3-41")
def test_a_bad_items_file_is_one_clear_error_and_nothing_is_written(place: Path, headway_cli: Cli, name: str):
    content, said = BAD_FILES[name]
    (place / name).write_bytes(content)
    done = headway_cli("run", "jobs:square", "-i", name)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "headway.db").exists()
    assert executed(place) == Counter()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("jobs:square", "-i", "missing.jsonl"), "does not exist"),
        (("jobs:square", "-i", "."), "is not a file"),
        (("jobs:nothing", "-i", "items.jsonl"), "has no function 'nothing'"),
        (("nowhere:f", "-i", "items.jsonl"), "no module 'nowhere'"),
        (("jobs", "-i", "items.jsonl"), "module:function"),
        (("jobs:number", "-i", "items.jsonl"), "is not a function"),
        (("jobs:takes_two", "-i", "items.jsonl"), "cannot be called with one item"),
        (("crashing:f", "-i", "items.jsonl"), "RuntimeError: at import"),
        (("ending:f", "-i", "items.jsonl"), "ended the program while it was imported"),
        (("asking:f", "-i", "items.jsonl"), "ended the program while it was imported"),
        (("jobs:square", "-i", "items.jsonl", "--key", "missing"), "no usable key"),
        (("jobs:square", "-i", "twice.jsonl", "--key", "id"), "occurs twice"),
        (("jobs:square", "-i", "items.jsonl", "--job", "../x"), "cannot be a job id"),
        (("jobs:square", "-i", "items.jsonl", "--mode", "async"), "a plain function"),
        (("jobs:aio", "-i", "items.jsonl", "--mode", "thread"), "an async function"),
        (("jobs:square", "-i", "items.jsonl", "--timeout", "-1"), "timeout"),
        (("jobs:square", "-i", "items.jsonl", "--rate", "0"), "rate"),
        (("jobs:square", "-i", "items.jsonl", "--database", "mysql://x"), "is not a database address"),
        (("jobs:square",), "--items"),
    ],
)  # fmt: skip
def test_a_bad_command_is_one_clear_error_and_nothing_is_written(
    place: Path, headway_cli: Cli, arguments: tuple[str, ...], said: str
):
    (place / "twice.jsonl").write_text('{"id": "a", "n": 1}\n{"id": "a", "n": 2}\n')
    (place / "crashing.py").write_text("raise RuntimeError('at import')")
    (place / "ending.py").write_text("import sys\ndef f(item): pass\nsys.exit(0)\n")
    (place / "asking.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\ndef f(item): pass\n")
    done = headway_cli("run", *arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "headway.db").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty (0 bytes)"), (b"not a database" * 20, "not a SQLite database")],
)
@pytest.mark.req("S3-29")
def test_a_damaged_database_is_an_error_with_its_path_and_is_left_as_it_was(
    place: Path, headway_cli: Cli, content: bytes, said: str
):
    (place / "headway.db").write_bytes(content)
    done = headway_cli("run", "jobs:square", "-i", "items.jsonl")
    assert done.returncode == 1
    assert said in done.stderr
    assert "headway.db" in done.stderr
    assert (place / "headway.db").read_bytes() == content
    assert executed(place) == Counter()


def test_csv_rows_are_dicts(place: Path, headway_cli: Cli):
    (place / "rows.csv").write_text('\ufeffid,name\n1,"chair, red"\n2,table\n', encoding="utf-8")
    (place / "show.py").write_text("def row(item):\n    return item\n")
    done = headway_cli("run", "show:row", "-i", "rows.csv", "--key", "id", "-o", "out.jsonl", "-w", "1")
    assert done.returncode == 0, done.stderr
    results = {json.loads(line)["key"]: json.loads(line)["result"] for line in (place / "out.jsonl").open()}
    assert results == {"1": {"id": "1", "name": "chair, red"}, "2": {"id": "2", "name": "table"}}


def test_the_run_works_on_postgresql_too(place: Path, headway_cli: Cli, postgres_url: str):
    arguments = ("run", "jobs:flaky", "-i", "items.jsonl", "-j", "ads", "--retries", "0", "--database", postgres_url)
    done = headway_cli(*arguments, "--no-last-pass", "-o", "out.jsonl")
    assert done.returncode == 3, done.stderr
    with Ledger.open(postgres_url) as ledger:
        info = ledger.job("ads").info()
        assert (info.total, info.done, info.dead) == (40, 30, 10)
    assert len((place / "out.jsonl").read_text().splitlines()) == 30
    assert not os.path.exists(place / "headway.db")


def test_an_unreachable_server_is_exit_6(place: Path, headway_cli: Cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"postgresql://headway:canary@127.0.0.1:{taken.getsockname()[1]}/x"
        done = headway_cli("run", "jobs:square", "-i", "items.jsonl", "--database", address)
    assert done.returncode == 6, done.stderr
    assert "cannot be reached" in done.stderr
    assert "canary" not in done.stderr


def test_a_password_in_the_address_is_neither_shown_nor_kept(place: Path, headway_cli: Cli, postgres_url: str):
    head, _, rest = postgres_url.partition("://")
    user, _, place_of_it = rest.rpartition("@")
    address = f"{head}://{user.partition(':')[0] or 'postgres'}:canary-password@{place_of_it}"
    done = headway_cli("run", "jobs:flaky", "-i", "items.jsonl", "-j", "ads", "--retries", "0", "--database", address)
    assert done.returncode == 3, done.stderr
    assert "canary" not in done.stderr
    with Ledger.open(postgres_url) as ledger:
        assert "canary" not in ledger.job("ads").info().command
