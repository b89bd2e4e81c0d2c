"""The command as a process: streams, exit codes, colours, shells."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway import errors
from headway.cli import COMMANDS, EXIT_CODES, headway
from headway.cli.reference import pages
from headway.ledger import Done, Ledger
from tests.cli.conftest import Answer, seed
from tests.services.waiting import eventually

Cli = Callable[..., Answer]
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_data_goes_to_stdout_and_talk_to_stderr(headway_cli: Run, ads: Path):
    done = headway_cli("items", "ads", "--json", "--limit", "2")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["items"]) == 2
    assert done.stderr == ""
    refused = headway_cli("retry", "ads")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--yes" in refused.stderr


def test_an_error_has_three_parts_and_no_colour_outside_a_terminal(headway_cli: Run):
    plain = headway_cli("jobs")
    assert plain.returncode == 2
    assert plain.stderr.splitlines() == [
        "Error: There is no database at headway.db.",
        "  Start a job first (headway run ...), or set another database: --database sqlite:///FILE",
    ]
    forced = headway_cli("jobs", env={"FORCE_COLOR": "1"})
    assert "\x1b[31m" in forced.stderr
    assert "\x1b" not in headway_cli("jobs", env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stderr


def test_output_cut_off_by_head_is_not_an_error(
    headway_cli: Run, spawn_cli: Callable[..., subprocess.Popen[str]], ads: Path
):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        seed(ledger, "big", items=20_000)
        ledger.job("big").record([Done(idx) for idx in range(60, 20_000)])
    process = spawn_cli("log", "big", "--tsv")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stdout = None


def test_a_terminal_that_cannot_show_a_letter_gets_it_escaped(headway_cli: Run, tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        ledger.create("ads", function="módulo:función")
    done = headway_cli("jobs", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "m\\xf3dulo:funci\\xf3n" in done.stdout
    assert headway_cli("show", "ads", env={"PYTHONIOENCODING": "ascii"}).stdout.isascii()


def test_a_question_is_asked_on_a_terminal_and_no_means_no(tmp_path: Path, ads: Path):
    for reply, dead in ((b"n\n", 6), (b"y\n", 2)):
        code, text = _on_a_terminal(tmp_path, ["retry", "ads", "--cause", "1"], reply)
        assert "Retry 4 dead letters of job ads? [y/N]:" in text
        assert code == (130 if dead == 6 else 0)
        with Ledger.open(f"sqlite:///{ads}") as ledger:
            assert ledger.job("ads").info().dead == dead


def test_show_on_a_terminal_can_be_watched_until_the_job_is_finished(tmp_path: Path, ads: Path):
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "show", "ads", "--watch"],
        cwd=tmp_path, stdin=child, stdout=child, stderr=child, start_new_session=True,
    )  # fmt: skip
    os.close(child)
    try:
        text = ""

        def seen() -> bool:
            nonlocal text
            text += os.read(parent, 65536).decode()
            return text.count("Job ads: interrupted") >= 2

        eventually(seen, 30)
        with Ledger.open(f"sqlite:///{ads}") as ledger:
            job = ledger.job("ads")
            job.record([Done(idx) for idx in range(46, 60)])
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:  # the other side of the terminal was closed
                break
            if not part:
                break
            text += part.decode()
        assert process.wait(30) == 0
        assert "Job ads: completed" in text
        assert re.search(r"\x1b\[\d+A\r\x1b\[J", text)
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def _on_a_terminal(directory: Path, arguments: list[str], typed: bytes) -> tuple[int, str]:
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", *arguments],
        cwd=directory, stdin=child, stdout=child, stderr=child, start_new_session=True,
    )  # fmt: skip
    os.close(child)
    os.write(parent, typed)
    text = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # the other side of the terminal was closed
            break
        if not part:
            break
        text += part
    os.close(parent)
    return process.wait(30), text.decode()


def test_ctrl_c_in_a_reading_command_is_130_without_a_traceback(tmp_path: Path, ads: Path):
    parent, child = pty.openpty()
    # A shell's background job ignores SIGINT, and so would the tests and the command, were this not said.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "status", "-w"],
        cwd=tmp_path, stdin=child, stdout=child, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    os.close(child)
    try:
        os.read(parent, 1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert process.returncode == 130
    assert b"Traceback" not in stderr


# ---- exit codes and the reference -----------------------------------------------------------------------------------


def test_every_error_ends_with_a_documented_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HeadwayError)]
    assert len(kinds) > 10
    assert {kind.exit_code for kind in kinds} <= set(EXIT_CODES)


def test_the_exit_codes_are_those_of_the_documentation():
    assert list(EXIT_CODES) == [0, 1, 2, 3, 4, 5, 6, 130, 143]
    text = "\n".join(pages())
    assert all(f"| {code} | {meaning} |" in text for code, meaning in EXIT_CODES.items())


def test_usage_errors_are_exit_2_with_a_suggestion(headway_cli: Run):
    done = headway_cli("jbos")
    assert done.returncode == 2
    assert "Did you mean 'jobs'?" in done.stderr
    assert headway_cli("items").returncode == 2
    assert headway_cli("items", "x", "--status", "weird").returncode == 2


def test_the_reference_has_every_command_and_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    wide = "\n".join(pages())
    monkeypatch.setenv("COLUMNS", "40")
    assert "\n".join(pages()) == wide
    for name in COMMANDS:
        assert f"### `headway {name}`" in wide
    for name in ("list", "show", "retry", "export"):
        assert f"### `headway dead {name}`" in wide


def test_every_reading_command_takes_json_and_every_command_of_the_ledger_takes_a_database(cli: Cli):
    with headway.make_context("headway", ["jobs"]) as context:
        for name in ("jobs", "show", "status", "runs", "items", "item", "log", "audit", "doctor", "config"):
            command = headway.get_command(context, name)
            assert command is not None
            options = {option for parameter in command.params for option in parameter.opts}
            assert {"--json", "--database"} <= options, name


# ---- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_each_shell_gets_a_script_that_asks_headway(cli: Cli, shell: str):
    answer = cli("completion", shell)
    assert answer.code == 0
    assert f"{shell}_complete" in answer.out
    assert "_HEADWAY_COMPLETE" in answer.out


def complete(headway_cli: Run, *words: str, incomplete: str = "", **environment: str) -> list[str]:
    """What bash would offer."""
    line = ["headway", *words, incomplete]
    done = headway_cli(
        env={
            "_HEADWAY_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(line),
            "COMP_CWORD": str(len(line) - 1),
            **environment,
        }
    )
    assert done.stderr == ""
    return [entry.partition(",")[2] for entry in done.stdout.splitlines() if entry]


def test_verbs_job_ids_and_causes_are_completed(headway_cli: Run, ads: Path):
    assert complete(headway_cli, incomplete="do") == ["doctor"]
    # The store gets 200 ms: on a machine that is busy with other tests it may need another chance.
    eventually(lambda: complete(headway_cli, "show") == ["ads"])
    assert complete(headway_cli, "show", incomplete="x") == []
    eventually(lambda: sorted(complete(headway_cli, "dead", "retry", "ads", "--cause")) == ["1", "2"])


def test_completion_is_silent_without_a_store(headway_cli: Run):
    assert complete(headway_cli, "show") == []


def test_powershell_is_offered_values_with_their_help(headway_cli: Run, ads: Path):
    words = {"COMP_WORDS": "headway\nretry\nads\n--cause", "COMP_WORD": "", "_HEADWAY_COMPLETE": "powershell_complete"}
    offered = ["1\t4 x TimeoutError", "2\t2 x JSONDecodeError"]
    eventually(lambda: sorted(headway_cli(env=words).stdout.splitlines()) == offered)
    done = headway_cli(
        env={"_HEADWAY_COMPLETE": "powershell_complete", "COMP_WORDS": "headway\ndoc", "COMP_WORD": "doc"}
    )
    assert done.stdout.split("\t")[0] == "doctor"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_accepts_its_script(cli: Cli):
    script = cli("completion", "bash").out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False, capture_output=True).returncode == 0
