"""`headway run --items FILE -- PROGRAM {}`: any program, once for each item."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.errors import InvalidInput
from headway.ledger import Job, Ledger
from headway.run.pool import local
from headway.run.program import CannotStartNow, Program, ProgramFailed
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "items.txt").write_text("one\ntwo\nthree\n")
    return tmp_path


def script(place: Path, text: str, name: str = "work.sh") -> Path:
    path = place / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def job_in(place: Path) -> Job:
    ledger = Ledger.open(f"sqlite:///{place}/headway.db", create=False)
    return ledger.job(ledger.jobs()[0].id)


def shell(text: str, **options: Any) -> Program:
    """A program that is given the item as $1."""
    return Program(["sh", "-c", text, "sh", "{}"], **options)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- what it is given -----------------------------------------------------------------------------------------------

ARTICLE = {"id": "a-1", "url": "http://x/y z", "size": 3, "tags": ["p", "q"], "ok": True}


@pytest.mark.parametrize(
    ("words", "payload", "key", "given"),
    [
        (["{}"], "one two; $(rm -rf)", None, ["one two; $(rm -rf)"]),
        (["--in={}", "{index}.png"], "a", None, ["--in=a", "7.png"]),
        (["{key}"], "a", None, ["7"]),
        (
            ["{key}", "{url}", "{size}", "{tags}", "{ok}"],
            ARTICLE,
            "id",
            ["a-1", "http://x/y z", "3", '["p","q"]', "true"],
        ),
        (["{key}"], {"key": "own"}, None, ["own"]),
        (["{}"], {"b": 1, "a": "é"}, None, ['{"a":"é","b":1}']),
        (["{{url}}", "{ print }", "{}", "{{}}"], "x", None, ["{url}", "{ print }", "x", "{}"]),
        (["{}{}"], "{index}", None, ["{index}{index}"]),
    ],
    ids=["text", "part of a word", "without a key", "fields", "a field key", "whole", "braces", "no second time"],
)
def test_placeholders_become_arguments_and_nothing_is_given_to_a_shell(
    words: list[str], payload: Any, key: str | None, given: list[str]
):
    program = Program(["printf", "%s\\n", *words], key=key)
    assert program.run(7, payload, None)[0].split("\n") == given


def test_with_stdin_the_program_reads_the_item():
    program = Program(["cat"], stdin=True)
    assert program.run(0, "a text", None)[0] == "a text"
    large = {"text": "é" * 100_000}
    assert Program(["cat"], stdin=True, stdout="json").run(0, {"a": 1}, None)[0] == {"a": 1}
    assert Program(["wc", "-c"], stdin=True).run(0, large, None)[0].strip() == str(len('{"text":""}') + 200_001)
    assert Program(["true"], stdin=True).run(0, large, None)[0] is None, "a program need not read it"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no program after --"),
        (["true"], "no placeholder"),
        (["no-such-program", "{}"], "There is no program 'no-such-program'"),
        (["{}"], "cannot be a placeholder"),
        (["/etc", "{}"], "is not a file"),
        (["/etc/passwd", "{}"], "cannot be executed"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_before_anything_runs(words: list[str], said: str):
    with pytest.raises(InvalidInput, match=said):
        Program(words)


@pytest.mark.parametrize(
    ("word", "hint"), [("grep x {} | wc -l", "sh -c"), ("jobs:make_ad", "leave out the --"), ("work.sh", "./NAME")]
)
def test_the_usual_mistakes_are_explained(word: str, hint: str):
    with pytest.raises(InvalidInput) as caught:
        Program([word, "{}"])
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("words", "payload"),
    [(["{price}"], {"id": 1}), (["{price}"], {"price": None}), (["{price}"], "text"), (["{}"], "a\0b")],
    ids=["no field", "null", "no fields", "NUL"],
)
def test_an_item_the_command_cannot_be_made_of_is_refused(words: list[str], payload: Any):
    with pytest.raises(InvalidInput):
        Program(["echo", *words]).check(payload)


def test_bad_commands_and_bad_items_end_the_verb_with_one_error_and_no_database(place: Path, headway_cli: Cli):
    (place / "items.jsonl").write_text('{"url": "a"}\n{"uri": "b"}\n')
    missing = headway_cli("run", "--items", "items.jsonl", "--", "echo", "{url}")
    assert missing.returncode == 2
    assert "items.jsonl, line 2: the command has {url}, and the item has no field 'url'." in missing.stderr
    assert "{uri}" in missing.stderr
    both = headway_cli("run", "jobs:f", "--items", "items.txt", "--", "echo", "{}")
    assert both.returncode == 2
    assert "Both a function (jobs:f) and a program" in both.stderr
    assert not (place / "headway.db").exists()


# ---- what comes of it -----------------------------------------------------------------------------------------------


def failure_of(program: Program, payload: Any = "item-1", timeout: float | None = None) -> ProgramFailed:
    with pytest.raises(ProgramFailed) as caught:
        program.run(0, payload, timeout)
    return caught.value


def test_the_cause_of_a_failure_is_status_or_signal_with_the_last_line_of_stderr():
    failed = failure_of(shell("echo early >&2; echo cannot open $1 >&2; echo >&2; exit 3"))
    assert (failed.failure.type, failed.failure.message, failed.failure.frame) == ("exit 3", "cannot open {}", "sh")
    assert failed.retryable
    assert "cannot open item-1" in failed.printed
    killed = failure_of(shell("kill -SEGV $$"))
    assert (killed.failure.type, killed.failure.message) == ("SIGSEGV", "sh wrote nothing to stderr")


def test_secrets_that_a_program_prints_stay_out_of_its_cause():
    failed = failure_of(shell("echo 'login failed: password=hunter2-canary' >&2; exit 1"))
    assert "hunter2-canary" not in failed.failure.message + (failed.failure.detail or "")


def test_stdout_is_the_result_as_text_or_as_json():
    assert shell("echo; printf 'a\\nb\\n\\n'").run(0, "x", None)[0] == "\na\nb"
    assert shell("exit 0").run(0, "x", None)[0] is None
    assert shell("printf '\\377'").run(0, "x", None)[0] == "\ufffd"
    assert shell("echo '{\"n\": [1, 2]}'", stdout="json").run(0, "x", None)[0] == {"n": [1, 2]}
    for text in ("echo nonsense", "echo NaN", "yes 1 | head -c 3000000"):
        bad = failure_of(shell(text, stdout="json"))
        assert bad.failure.type == "ResultNotJson"
        assert not bad.retryable


def test_of_very_much_output_the_beginning_and_the_end_are_kept():
    result, _ = shell("echo first; yes | head -c 300000000; echo last").run(0, "x", None)
    assert result.startswith("first\ny\n")
    assert result.endswith("y\nlast")
    assert "bytes left out" in result
    assert len(result) < 70_000


def test_a_script_that_nobody_can_execute_fails_its_items_and_says_why(tmp_path: Path):
    path = tmp_path / "no-first-line"
    path.write_text("echo hello\n")
    path.chmod(0o755)
    failed = failure_of(Program([str(path), "{}"]))
    assert failed.failure.type == "CannotStart"
    assert "#!/bin/sh" in failed.failure.message
    assert not failed.retryable


def test_an_item_too_long_for_an_argument_says_to_use_standard_input():
    failed = failure_of(Program(["echo", "{}"]), "x" * 250_000)
    assert failed.failure.type == "CannotStart"
    assert "--stdin" in failed.failure.message


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_when_the_time_is_up_the_whole_group_is_ended_also_if_it_ignores_sigterm(tmp_path: Path):
    pids = tmp_path / "pids"
    text = f'trap "" TERM; sleep 600 & echo $! > {pids}; echo $$ >> {pids}; wait; sleep 600'
    began = time.monotonic()
    failed = failure_of(shell(text), timeout=0.5)
    assert failed.failure.type == "TimedOut"
    assert time.monotonic() - began < 30
    both = [int(word) for word in pids.read_text().split()]
    assert len(both) == 2
    eventually(lambda: not any(lives(pid) for pid in both))


def test_a_program_that_makes_a_group_for_itself_is_ended_when_its_time_is_up(tmp_path: Path):
    pids = tmp_path / "pids"
    text = f'sleep 600 & echo "$$ $!" > {pids}; wait'
    began = time.monotonic()
    failed = failure_of(Program(["timeout", "600", "sh", "-c", text, "{}"]), timeout=0.5)
    assert failed.failure.type == "TimedOut"
    assert time.monotonic() - began < 60
    both = [int(word) for word in pids.read_text().split()]
    assert len(both) == 2
    eventually(lambda: not any(lives(pid) for pid in both))


def test_a_program_may_clean_up_when_its_time_is_up(tmp_path: Path):
    mark = tmp_path / "cleaned"
    failed = failure_of(shell(f'trap "touch {mark}; exit 0" TERM; sleep 600 & wait'), timeout=0.5)
    assert failed.failure.type == "TimedOut", "it ended by itself, but too late"
    assert mark.exists()


def test_what_a_program_leaves_behind_neither_holds_it_up_nor_outlives_it():
    began = time.monotonic()
    result, _ = shell("sleep 600 & echo $!").run(0, "x", None)
    assert time.monotonic() - began < 60
    eventually(lambda: not lives(int(result)))


def test_a_program_that_closes_its_streams_is_still_waited_for(tmp_path: Path):
    shell(f"exec >&- 2>&-; sleep 0.3; touch {tmp_path}/ended").run(0, "x", None)
    assert (tmp_path / "ended").exists()


def test_items_run_fail_time_out_and_are_retried_as_with_a_function(place: Path, headway_cli: Cli):
    script(place, 'case $1 in two) echo "no $1" >&2; exit 4;; three) sleep 600;; *) echo "done $1 $2";; esac')
    command = ("run", "--items", "items.txt", "--retries", "0", "--no-last-pass", "--timeout", "1.5")
    done = headway_cli(*command, "--", "./work.sh", "{}", "--fresh")
    assert done.returncode == 3, done.stderr
    assert "exit 4" in done.stderr
    job = job_in(place)
    assert job.info().function == "./work.sh '{}' --fresh"
    assert job.info().command.endswith("-- ./work.sh '{}' --fresh"), "what comes after -- is the program's own"
    letters = {letter.idx: letter.error for letter in job.dead_letters()}
    assert letters == {1: "exit 4: no {}", 2: "TimedOut: work.sh did not end within 1.5 s"}
    assert [attempt.outcome for attempt in job.history(2)] == ["timeout"]
    script(place, 'echo "repaired $1"')
    assert headway_cli("retry", job.id, "--yes").returncode == 0
    assert headway_cli(*command, "--", "./work.sh", "{}", "--fresh").returncode == 0
    assert job_in(place).info().done == 3


@pytest.mark.parametrize("workers", ["2", "100"], ids=["processes", "threads"])
@pytest.mark.parametrize("everybody", [False, True], ids=["the parent", "all of ours"])
@pytest.mark.parametrize("program", ["./work.sh", "timeout 600 ./work.sh"], ids=["in our group", "in its own"])
def test_kill_9_leaves_no_program_behind(place: Path, spawn_cli: Spawn, program: str, everybody: bool, workers: str):
    script(place, 'sleep 600 & echo "$$ $!" > "pids-$1"; wait')
    run = spawn_cli("run", "--items", "items.txt", "--workers", workers, "--", *program.split(), "{}")
    names = ["one", "two"] if workers == "2" else ["one", "two", "three"]
    files = [place / f"pids-{name}" for name in names]
    eventually(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), timeout=60)
    programs = [int(word) for file in files for word in file.read_text().split()]
    assert all(lives(pid) for pid in programs)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    if everybody:
        for child in children:
            os.kill(int(child), signal.SIGSTOP)  # so that none of them acts before all are dead
        for pid in (run.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
    else:
        os.kill(run.pid, signal.SIGKILL)
    eventually(lambda: not any(lives(pid) for pid in programs), timeout=30)


def test_a_program_whose_worker_dies_at_the_moment_it_starts_is_not_left_behind(place: Path, headway_cli: Cli):
    script(place, 'echo $$ > "pid-$1"; kill -9 $PPID; sleep 600')
    done = headway_cli(
        "run", "--items", "items.txt", "--workers", "1", "--retries", "0", "--no-last-pass", "--", "./work.sh", "{}"
    )
    assert done.returncode == 3, done.stderr
    pids = [int(file.read_text()) for file in place.glob("pid-*")]
    assert len(pids) == 3
    eventually(lambda: not any(lives(pid) for pid in pids))


def test_a_second_ctrl_c_ends_the_programs_and_the_same_command_goes_on(
    place: Path, spawn_cli: Spawn, headway_cli: Cli
):
    script(place, 'echo $$ > "pid-$1"; [ -e quick ] || sleep 600; echo "$1"')
    command = ("run", "--items", "items.txt", "--workers", "1", "--", "./work.sh", "{}")
    run = spawn_cli(*command)
    pid = place / "pid-one"
    eventually(lambda: pid.exists() and pid.read_text().endswith("\n"), timeout=60)
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    assert any("Stopping" in line for line in run.stderr)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    eventually(lambda: not lives(int(pid.read_text())))
    (place / "quick").touch()
    again = headway_cli(*command)
    assert again.returncode == 0, again.stderr
    assert job_in(place).info().failures == 0, "what was abandoned is charged nothing"


@pytest.mark.parametrize("word", ["{.}.png", "{/}", "out/{/.}", "{//}", "{#}", "x{%}"])
def test_a_placeholder_of_gnu_parallel_is_refused_and_not_taken_for_a_name(word: str):
    with pytest.raises(InvalidInput, match="GNU parallel") as refused:
        Program(["true", "{}", word])
    assert "sh -c" in (refused.value.hint or "")


@pytest.mark.parametrize("word", ["echo ${#}", "a{3}", "{{.}}", "{{.Name}}", '{"a": 1}', "{ print $1 }", "{.a}"])
def test_braces_that_mean_something_to_others_are_left_alone(word: str):
    assert Program(["printf", "%s|", word, "{}"]).run(0, "x", 30.0)[0] == f"{word}|x|"


@pytest.mark.parametrize("flags", [["--stdin"], ["--stdout", "json"]])
def test_the_same_program_fed_or_read_otherwise_is_a_change_that_is_asked_about(
    place: Path, headway_cli: Cli, flags: list[str]
):
    (place / "items.txt").write_text("1\n0\n")
    command = ["--retries", "0", "--no-last-pass", "--", "test", "{}", "-gt", "0"]
    assert headway_cli("run", "-i", "items.txt", "-j", "t", *command, cwd=place).returncode == 3
    again = headway_cli("run", "-i", "items.txt", "-j", "t", *flags, *command, cwd=place)
    assert again.returncode == 5
    assert "was started with" in again.stderr


# ---- how many at once -----------------------------------------------------------------------------------------------


def test_zero_workers_are_one_per_core_whatever_the_settings_say(place: Path, headway_cli: Cli):
    (place / "headway.toml").write_text("workers = 7\n")
    done = headway_cli("run", "--items", "items.txt", "--workers", "0", "--", "true", "{}", cwd=place)
    assert done.returncode == 0, done.stderr
    assert job_in(place).runs()[-1].settings["workers"] == len(os.sched_getaffinity(0))


def test_whoever_means_workers_by_j_is_told_that_it_names_the_job(place: Path, headway_cli: Cli):
    done = headway_cli("run", "--items", "items.txt", "-j", "8", "--", "true", "{}", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "-j names the job, so this job is called 8. For that many items at once: --workers 8" in done.stderr
    named = headway_cli("run", "--items", "items.txt", "-j", "8", "-w", "2", "--", "true", "{}", cwd=place)
    assert "-j names the job" not in named.stderr


# ---- limits of the machine ------------------------------------------------------------------------------------------

#: Runs the command with a limit of its own: descriptors of a process, or processes of a user.
LIMITED = (
    "import os, resource, sys; number, limit = int(sys.argv[1]), int(sys.argv[2]); "
    "resource.setrlimit(number, (limit, limit)); "
    "os.execv(sys.executable, [sys.executable, '-m', 'headway', *sys.argv[3:]])"
)


def run_limited(place: Path, number: int, limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(number), str(limit), *words],
        cwd=place, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("stdin", [False, True])
def test_more_programs_than_descriptors_allow_run_in_turns_and_no_attempt_is_counted(place: Path, stdin: bool):
    (place / "items.txt").write_text("".join(f"{n}\n" for n in range(120)))
    ended = run_limited(
        place, resource.RLIMIT_NOFILE, 90, "run", "-i", "items.txt", "-w", "60", "--retries", "0", "--no-last-pass",
        *(["--stdin"] if stdin else []), "--", "sh", "-c", "sleep 0.1; echo $1", "sh", "{}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "No more programs can be started at once: Too many open files" in ended.stderr, "the limit was not reached"
    info = job_in(place).info()
    assert (info.done, info.dead, info.failures) == (120, 0, 0)


#: Takes all free descriptors from the worker that starts it, for the first item.
TAKES_DESCRIPTORS = """
import os, resource, sys
limit = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
if sys.argv[1] == "0":
    open("worker", "w").write(f"{os.getppid()} {limit[0]}")
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, limit[1]))
"""


def test_programs_wait_for_a_limit_of_the_machine_that_passes(place: Path, spawn_cli: Spawn):
    (place / "items.txt").write_text("0\n1\n2\n")
    (place / "takes.py").write_text(TAKES_DESCRIPTORS)
    run = spawn_cli(
        "run", "-i", "items.txt", "-w", "1", "--timeout", "2", "--", sys.executable, "takes.py", "{}", stderr=None
    )
    eventually((place / "worker").exists)
    eventually(lambda: job_in(place).info().done == 1)
    pid, before = map(int, (place / "worker").read_text().split())
    # Longer than the timeout: an item that waits to be started uses none of its time.
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(4)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (before, before))
    assert run.wait(60) == 0
    info = job_in(place).info()
    assert (info.done, info.failures) == (3, 0)


def test_a_run_ends_with_an_error_when_no_program_can_be_started_for_long(
    place: Path, quick_cli: Cli, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "START_SECONDS_MOST", 1.5)
    (place / "items.txt").write_text("0\n1\n2\n")
    (place / "takes.py").write_text(TAKES_DESCRIPTORS)
    ended = quick_cli("run", "-i", "items.txt", "-w", "1", "--", sys.executable, "takes.py", "{}")
    assert ended.returncode == 1, ended.stderr
    assert "No program could be started for 1.5 s: Too many open files" in ended.stderr
    info = job_in(place).info()
    assert (info.done, info.failures) == (1, 0)


def limit_for(free: int) -> int:
    """The limit of descriptors at which ``free`` more can be opened."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return [number for number in range(1000) if number not in used][free]


def test_a_program_that_cannot_be_started_now_is_no_failure_and_leaves_no_descriptor_open():
    program = shell("echo $1")
    program.run(0, "x", None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(os.listdir("/proc/self/fd"))
    for free in range(1, 6):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(free), before[1]))
        try:
            with suppress(CannotStartNow):
                program.run(0, "x", None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert set(os.listdir("/proc/self/fd")) == used
