"""Every verb in bad company: odd values, missing and foreign stores, absent servers, lost output, narrow terminals.

Whatever happens, a person gets one clear error and a documented exit code, never a traceback.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
import pytest

from headway._sql.postgresql import PostgreSQL
from headway.cli import EXIT_CODES
from headway.ledger import Ledger
from headway.telemetry import metrics
from tests.cli.conftest import Answer, every_command, seed
from tests.services.redis import RedisServer

Cli = Callable[..., Answer]
Run = Callable[..., subprocess.CompletedProcess[str]]

#: Every verb that reads or changes the ledger, as it is typed for the job ads.
LEDGER = [
    "jobs", "status", "status ads", "show ads", "runs ads", "items ads", "item ads 0", "log ads --tsv", "dead list",
    "dead list ads", "dead show ads", "dead export ads", "audit", "audit ads", "retry ads --yes", "dead retry ads --yes",
    "forget ads --yes", "purge --yes",
]  # fmt: skip
STATES = [
    "states ads", "states jobs", "states wait ads --tag t --timeout 1", "states delete ads --yes",
    "states purge --older-than 1",
]  # fmt: skip
PROJECTS = [
    "progress p", "project create p", "project total p 3", "project status p CRAWLING", "project finish-crawl p",
    "project delete p --yes",
]  # fmt: skip
#: Arguments without which a command cannot be called at all.
REQUIRED = {
    "run": "no_such_module:f --items none.jsonl", "show": "ads", "runs": "ads", "items": "ads", "item": "ads 0",
    "log": "ads", "results": "ads", "pause": "nobody", "resume": "nobody",
    "stop": "nobody", "scale": "nobody 2", "dead show": "ads",
    "dead export": "ads", "dead retry": "ads --yes", "retry": "ads --yes",
    "forget": "nobody --yes", "purge": "--yes", "progress": "p", "project create": "p", "project total": "p 3",
    "project status": "p CRAWLING", "project finish-crawl": "p", "project delete": "p --yes", "states show": "nobody",
    "states wait": "nobody --tag t", "states delete": "nobody --yes", "states purge": "--older-than 1",
    "completion": "bash", "relay": "--once", "worker": "--app no_such_module:queue", "task show": "t", "task cancel": "t --yes",
    "task retry": "t --yes", "queue pause": "low", "queue resume": "low", "queue limit": "queue low",
    "queue migrate": "--to rq --app no_such_module:queue", "queue set": "batch 5", "queue unset": "batch",
    "workers drain": "w", "workers stop": "w --yes", "workers remove": "w",
    "serve": "--host no.such.host.invalid", "demo": "surplus",
    "token create": "anna --role viewer", "token revoke": "nobody --yes",
    "alerts ack": "1", "alerts mute": "backlog --for 1h", "alerts unmute": "backlog",
}  # fmt: skip
ABSENT_REDIS = "redis://127.0.0.1:1/1"
ABSENT_POSTGRESQL = "postgresql://headway:geheim@127.0.0.1:1/x"


def right(answer: Answer, *codes: int) -> None:
    """One of these exit codes, and an error that says something in its own words."""
    assert answer.code in codes, answer
    assert "Traceback" not in answer.out + answer.err
    assert answer.code == 0 or answer.err.strip() or '"verdict"' in answer.out or "fail" in answer.out


# ---- values ---------------------------------------------------------------------------------------------------------

NO_NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "1e400",
    str(2**63),
    "9" * 25,
    "9" * 5000,
    "0x10",
    "",
    " ",
    "½",
    "foo://bar",
    "\x1b[2J",
]


def numbers() -> list[tuple[str, str]]:
    """Every option and argument of every verb that takes a number."""
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    return [
        (path, parameter.opts[0])
        for path, command in every_command().items()
        for parameter in command.params
        if isinstance(parameter.type, kinds) and isinstance(parameter, click.Option)
    ]


def test_the_options_that_take_a_number_are_found():
    assert {("items", "--limit"), ("purge", "--older-than"), ("states wait", "--timeout"), ("run", "--rate")} <= set(
        numbers()
    )


@pytest.mark.parametrize(("path", "option"), numbers())
def test_every_option_refuses_invalid_and_unreasonable_numbers(cli: Cli, ads: Path, path: str, option: str):
    for value in NO_NUMBERS:
        given = REQUIRED.get(path, "").split()
        if option in given:
            del given[given.index(option) : given.index(option) + 2]
        answer = cli(*path.split(), *given, f"{option}={value}")
        right(answer, 2)
        assert path == "run" or f"'{option}'" in answer.err  # a run checks some together with what they are for
        assert "\x1b" not in answer.err
        assert len(answer.err) < 2500


@pytest.mark.parametrize("value", ["nan", "-1", "9" * 25, "many"])
def test_a_total_that_is_not_a_number_is_refused(cli: Cli, value: str):
    right(cli("project", "total", "--", "p", value), 2)


TEXTS = ["", " ", "a/b", "..", "é", "x y", "a;drop table jobs", "\x1b[2J", "a\nb", "x" * 300, "\udcff", "%s{}"]


@pytest.mark.parametrize(
    "call", ["show", "runs", "items", "log", "dead show", "dead export", "retry --yes", "forget --yes", "states show",
             "states delete --yes", "project create", "progress", "item ads", "states wait --tag t", "audit", "dead list"],
)  # fmt: skip
def test_a_name_with_odd_characters_is_refused_or_not_found(cli: Cli, ads: Path, call: str):
    words = call.split()
    for text in TEXTS:
        answer = cli(*words, *_odd_tail(words, text))
        right(answer, *((0, 2) if words[0] == "audit" else (2,)))
        assert "\x1b" not in answer.err


def _odd_tail(words: list[str], text: str) -> list[str]:
    return [*(("--projects-redis", ABSENT_REDIS) if words[0] in ("project", "progress") else ()), "--", text]


@pytest.mark.parametrize(
    "address",
    [
        "foo://bar",
        "bar",
        "",
        "redis://",
        "://",
        "sqlite://",
        "redis://[::1",
        "redis://h:x/1",
        "redis://127.0.0.1:1/1?x=1",
    ],
)
@pytest.mark.parametrize("call", ["jobs -d", "doctor -d", "states jobs -s", "progress p --projects-redis", "config -d"])
def test_an_invalid_address_is_exit_2_everywhere(cli: Cli, ads: Path, call: str, address: str):
    answer = cli(*call.split(), address)
    if call.startswith("config"):
        right(answer, 0)  # it only shows it
    elif call.startswith("doctor"):
        right(answer, 1)  # it says so as a finding
    elif address == "redis://" and ("states" in call or "progress" in call):
        right(answer, 2, 6, 0)  # the server on this machine, if there is one
    else:
        right(answer, 2)


@pytest.mark.parametrize("name", ["HEADWAY_REDIS", "HEADWAY_PROJECTS_REDIS", "HEADWAY_QUEUE_REDIS"])
def test_an_invalid_redis_address_in_a_setting_is_exit_2(
    cli: Cli, ads: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, "foo://:geheim@bar")
    answer = cli("progress", "p")
    right(answer, 2)
    assert name in answer.err
    assert "geheim" not in answer.err


# ---- stores ---------------------------------------------------------------------------------------------------------


def directory(path: Path) -> None:
    path.mkdir()


def zero_bytes(path: Path) -> None:
    path.touch()


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")


def text_file(path: Path) -> None:
    path.write_text("not a database at all\n" * 100)


def newer(path: Path) -> None:
    Ledger.open(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9999")


@pytest.mark.parametrize("make", [directory, zero_bytes, foreign, text_file, newer], ids=lambda make: make.__name__)
def test_a_store_that_cannot_be_used_is_exit_1_and_left_as_it_is(
    cli: Cli, tmp_path: Path, make: Callable[[Path], None]
):
    path = tmp_path / "headway.db"
    make(path)
    before = None if path.is_dir() else path.read_bytes()
    for call in [*LEDGER, *STATES, "doctor"]:
        answer = cli(*call.split())
        right(answer, 1)
        assert call == "doctor" or answer.out == ""
        assert (None if path.is_dir() else path.read_bytes()) == before


@pytest.mark.parametrize("call", [*LEDGER, *STATES, "doctor"])
def test_a_store_that_is_missing_is_exit_2_and_not_made(cli: Cli, tmp_path: Path, call: str):
    answer = cli(*call.split())
    right(answer, 1 if call == "doctor" else 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [*LEDGER, *STATES, "doctor"])
def test_a_postgresql_that_is_away_is_exit_6_and_its_password_is_not_shown(
    cli: Cli, call: str, monkeypatch: pytest.MonkeyPatch
):
    """Here with one try; that a verb waits for a server as long as it may is the next test's."""
    monkeypatch.setattr(PostgreSQL, "patience", -1.0)
    monkeypatch.setenv("HEADWAY_DATABASE", ABSENT_POSTGRESQL)
    answer = cli(*call.split())
    right(answer, 1 if call == "doctor" else 6)
    assert "geheim" not in answer.out + answer.err


def test_a_verb_waits_for_a_postgresql_that_is_away_up_to_its_limit(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """Seven further tries, and the pauses between them are long enough for a server that is started again."""
    monkeypatch.setenv("HEADWAY_DATABASE", ABSENT_POSTGRESQL)
    before, began = metrics.value("headway_sql_retries", operation="query"), time.monotonic()
    right(cli("jobs"), 6)
    assert metrics.value("headway_sql_retries", operation="query") == before + 1 + PostgreSQL.retry.retries
    assert time.monotonic() - began > 5.0


@pytest.mark.parametrize("call", [*PROJECTS, *(f"{call} --store {ABSENT_REDIS}" for call in STATES)])
def test_a_redis_that_is_away_is_exit_6(cli: Cli, call: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_REDIS", ABSENT_REDIS)
    right(cli(*call.split()), 6)


def test_a_watcher_whose_redis_is_away_is_exit_6_and_one_without_settings_exit_2(headway_cli: Run):
    settings = {"HEADWAY_REDIS": "redis://127.0.0.1:1/0", "RQ__QUEUE": "q", "DIGITS_EVENTS_CHANNEL": "c"}
    missing = headway_cli("watch", env=settings)
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)
    assert "RQ_WATCHER_STUCK_TIMEOUT_SECONDS" in missing.stderr
    away = headway_cli("watch", "--stuck-timeout", "60", env=settings)
    assert (away.returncode, "Traceback" in away.stderr) == (6, False)
    assert "127.0.0.1:1" in away.stderr


# ---- output ---------------------------------------------------------------------------------------------------------

#: What prints something, as programs.
PRINTING = [
    "jobs", "show ads", "runs ads", "items ads", "item ads 44", "log ads --tsv", "dead list", "dead show ads",
    "dead export ads", "audit", "doctor", "config", "completion bash", "--help", "--version", "items --help",
]  # fmt: skip


@pytest.fixture
def audited(ads: Path) -> Path:
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        ledger.note("reset", "ads", {"why": "a test"})
    return ads


def environment(**more: str) -> dict[str, str]:
    """As a person has it: without our settings, with output that is buffered, and as wide as the terminal is. (Whoever
    starts the tests may have said how wide theirs is.)"""
    dropped = ("HEADWAY_", "PYTHONUNBUFFERED", "COLUMNS", "LINES")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)} | more


@pytest.mark.parametrize("call", [*PRINTING, *(f"{call} --json" for call in PRINTING[:8])])
def test_a_full_disk_is_exit_1_and_a_closed_pipe_none(tmp_path: Path, audited: Path, call: str):
    command = [sys.executable, "-m", "headway", *call.split()]
    with open("/dev/full", "w") as full:
        lost = subprocess.run(
            command, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (lost.returncode, "Traceback" in lost.stderr, "Exception ignored" in lost.stderr) == (1, False, False)
    assert os.strerror(errno.ENOSPC) in lost.stderr
    reading, writing = os.pipe()
    os.close(reading)
    left = subprocess.run(
        command, cwd=tmp_path, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (left.returncode, left.stderr) == (0, "")


@pytest.mark.parametrize("call", ["jobs", "show ads", "--help", "nonsense", "jobs -d foo://bar", "retry ads"])
def test_streams_that_were_closed_before_the_start_are_no_traceback(tmp_path: Path, ads: Path, call: str):
    command = f"exec {sys.executable} -m headway {call} <&- >&- 2>{tmp_path}/errors"
    closed = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment(), check=False)
    assert closed.returncode == (0 if call in ("jobs", "show ads", "--help") else 2)
    assert "Traceback" not in (tmp_path / "errors").read_text()
    mute = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m headway {call} 2>&- >/dev/null </dev/null"], cwd=tmp_path,
        env=environment(), check=False,
    )  # fmt: skip
    assert mute.returncode == closed.returncode


@pytest.mark.parametrize("call", PRINTING)
def test_a_poor_environment_changes_no_data(tmp_path: Path, audited: Path, headway_cli: Run, call: str):
    poor = {"COLUMNS": "20", "NO_COLOR": "1", "LANG": "C", "LC_ALL": "C", "TERM": "dumb"}
    done = headway_cli(*call.split(), env=poor)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    if "--help" not in call and "ago" not in done.stdout:
        again = headway_cli(*call.split())
        assert done.stdout.encode("ascii", "replace")[:40] == again.stdout.encode("ascii", "replace")[:40]


def on_a_terminal(arguments: list[str], directory: Path, columns: int) -> list[str]:
    """The lines a command draws on a terminal of that width."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", *arguments], cwd=directory, env=environment(TERM="xterm"), stdin=child,
        stdout=child, stderr=child, start_new_session=True,
    )  # fmt: skip
    os.close(child)
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
    assert process.wait(60) == 0
    return text.decode().replace("\r", "").splitlines()


@pytest.mark.parametrize("columns", [80, 40, 20])
@pytest.mark.parametrize("call", ["jobs", "show ads", "runs ads", "items ads --status dead", "dead list", "audit"])
def test_nothing_but_a_command_to_type_is_wider_than_the_terminal(
    tmp_path: Path, audited: Path, call: str, columns: int
):
    lines = on_a_terminal(call.split(), tmp_path, columns)
    assert len(lines) >= 2
    wide = [line for line in lines if len(line) > columns]
    assert [line for line in wide if "headway " not in line and "process " not in line] == []


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_table_keeps_the_name_of_each_row_and_its_numbers(tmp_path: Path, ads: Path, columns: int):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        seed(ledger, "ads-november-second-try")
    head, *rows = on_a_terminal(["jobs"], tmp_path, columns)
    assert head.startswith("JOB")
    assert {row.split()[0] for row in rows} == {"ads", "ads-november-second-try"}
    assert all("40/60" in row and "6" in row.split() for row in rows)


def test_a_watched_command_on_a_terminal_refuses_json(tmp_path: Path, ads: Path):
    parent, child = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headway", "jobs", "--watch", "--json"], cwd=tmp_path, env=environment(), stdin=child,
            stdout=child, stderr=subprocess.PIPE, timeout=30, check=False,
        )  # fmt: skip
    finally:
        os.close(child)
        os.close(parent)
    assert (done.returncode, b"--json" in done.stderr) == (2, True)


def test_json_piped_to_a_program_is_whole_however_narrow_the_terminal(tmp_path: Path, ads: Path):
    program = "import json, sys; print(len(json.load(sys.stdin)['items']))"
    shell = f'{sys.executable} -m headway items ads --json | {sys.executable} -c "{program}"'
    done = subprocess.run(
        ["sh", "-c", shell], cwd=tmp_path, env=environment(COLUMNS="20"), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("50\n", "")


def test_letters_of_two_columns_do_not_push_a_table_out_of_line(cli: Cli, tmp_path: Path):
    from headway.cli.toolkit import table
    from headway.core.text import cells, cut

    assert table(["JOB", "TYPE", "N"], [["a", "日本語", "1"], ["b", "e\u0301t", "2"]]) == [
        "JOB  TYPE    N",
        "a    日本語  1",
        "b    e\u0301t      2",
    ]
    assert table(["JOB", "TYPE"], [["a", "日本語のエラー"]], columns=15)[1] == "a    日本語..."
    assert (cells("日本"), cut("日本語", 4), cut("日本語", 5), cut("abcdef", 2)) == (4, "...", "日...", "..")


@pytest.mark.parametrize("call", ["items", "show", "run"])
def test_a_name_in_another_encoding_causes_no_traceback(tmp_path: Path, ads: Path, call: str):
    given = {"run": [b"m:f", b"--items", b"\xe4.jsonl"]}.get(call, [b"\xe4ds"])
    command = [sys.executable.encode(), b"-m", b"headway", call.encode(), *given]
    done = subprocess.run(command, cwd=tmp_path, env=environment(LC_ALL="C.UTF-8"), capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)


# ---- the exit codes themselves -----------------------------------------------------------------------------------------


def test_the_exit_codes_used_here_are_documented():
    assert {0, 1, 2, 6} <= set(EXIT_CODES)


def test_a_redis_server_that_answers_is_used_by_the_same_settings(
    cli: Cli, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_REDIS", redis_server.url(0))
    right(cli("project", "create", "p", "--total", "3"), 0)
    assert redis_server.client(1).exists("smap:proj:p")
    assert json.loads(cli("progress", "p", "--json").out)["total"] == 3
