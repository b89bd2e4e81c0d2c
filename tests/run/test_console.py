"""What a function prints while the bar is drawn on the same terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from headway.ledger import Ledger
from headway.run.output.console import shown

#: A terminal is that of a session only after this.
AT_A_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
)


def run_on_a_terminal(
    place: Path, *arguments: str, program: tuple[str, ...] = ("-m", "headway"), strict: bool = False
) -> tuple[int, str]:
    """A person sits there who answers every question ("...? ") with: yes. ``strict``: the terminal stops whatever writes to it
    from the background (stty tostop)."""
    ours, theirs = pty.openpty()
    if strict:
        modes = termios.tcgetattr(theirs)
        modes[3] |= termios.TOSTOP
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
    process = subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, *program, *arguments], start_new_session=True,
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=place, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
        if seen.endswith(b"? "):
            os.write(ours, b"yes\n")
    os.close(ours)
    return process.wait(30), seen.decode()


def screen(text: str) -> list[str]:
    """The lines a person sees: what was wiped out is not among them. Enough of a terminal for what we send."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\??\d*[A-Za-z]|\x1b\[[\d;]*m|[\r\n]|[^\x1b\r\n]+", text):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token == "\x1b[J":
            lines[row] = lines[row][:column]
            del lines[row + 1 :]
        elif token == "\x1b[K":
            lines[row] = lines[row][:column]
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row = max(0, row - int(token[2:-1] or 1))
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return lines


def test_every_printed_line_stays_above_the_bar(tmp_path: Path):
    (tmp_path / "loud.py").write_text(
        "import sys, time\n"
        "def shout(item):\n"
        "    print(f'out {item}')\n"
        "    print(f'err {item}', file=sys.stderr)\n"
        "    time.sleep(0.02)\n"
    )
    (tmp_path / "items.txt").write_text("".join(f"item-{n:02}\n" for n in range(30)))
    code, text = run_on_a_terminal(tmp_path, "run", "loud:shout", "-i", "items.txt", "-j", "loud", "-w", "2")
    assert code == 0, text
    lines = screen(text)
    for n in range(30):
        assert lines.count(f"out item-{n:02}") == 1
        assert lines.count(f"err item-{n:02}") == 1
    bar = [number for number, line in enumerate(lines) if "30/30" in line]
    assert len(bar) == 1, "one bar is left, the earlier drawings are gone"
    assert bar[0] > max(number for number, line in enumerate(lines) if line.startswith(("out", "err")))


def test_output_into_a_pipe_is_left_to_the_function_and_none_of_it_is_lost(tmp_path: Path):
    (tmp_path / "loud.py").write_text(
        "def shout(item):\n    print(item)\n    print('end of', item, end=' ')\n    return item\n"
    )
    (tmp_path / "items.txt").write_text("a\nb\n")
    done = subprocess.run(
        [sys.executable, "-m", "headway", "run", "loud:shout", "-i", "items.txt", "-w", "1"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )  # fmt: skip
    assert done.stdout.split() == ["a", "end", "of", "a", "b", "end", "of", "b"]


NASTY = {
    "wipes the screen \x1b[2J\x1b[H": "wipes the screen ",
    "goes up \x1b[5A\x1b[1G": "goes up ",
    "names the window \x1b]0;mine\x07 done": "names the window  done",
    "is \x1b[31mred\x1b[0m": "is \x1b[31mred\x1b[0m\x1b[0m",
    "10%\r50%\r100%": "100%",
    "50%\r": "50%",
    "rings \a and \b deletes": "rings   and   deletes",
    "ends in \x1b": "ends in ",
    "C1 \x9b2J": "C1  2J",
    "a\tb": "a       b",
    "hides \x1b[?25l the cursor": "hides  the cursor",
}


@pytest.mark.parametrize("line", NASTY, ids=repr)
def test_what_a_function_prints_cannot_move_the_bar(line: str):
    assert shown(line) == NASTY[line]


def test_a_function_that_clears_the_screen_does_not_clear_ours(tmp_path: Path):
    (tmp_path / "loud.py").write_text("def shout(item):\n    print(f'\\x1b[2J\\x1b[H\\x1b[9A{item}\\rover {item}')\n")
    (tmp_path / "items.txt").write_text("".join(f"item-{n:02}\n" for n in range(10)))
    code, text = run_on_a_terminal(tmp_path, "run", "loud:shout", "-i", "items.txt", "-j", "loud", "-w", "1")
    assert code == 0, text
    lines = screen(text)
    assert lines[0].startswith("Run loud: 10 items")
    assert [line for line in lines if line.startswith("over")] == [f"over item-{n:02}" for n in range(10)]


# ---- who asks at the terminal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fork", "spawn", "program", "programs"])
def test_what_would_ask_a_person_at_the_terminal_fails_and_is_not_stopped_for_ever(tmp_path: Path, how: str):
    """ssh asks for passwords there, git for names, sudo for both. Nobody sees the question beneath the bar."""
    (tmp_path / "asking.py").write_text("def ask(item):\n    return open('/dev/tty').readline()\n")
    (tmp_path / "items.txt").write_text("a\nb\n")
    (tmp_path / "headway.toml").write_text(f"start = {'spawn' if how == 'spawn' else 'fork'!r}\n")
    words = ["asking:ask"] if how in ("fork", "spawn") else ["--", "sh", "-c", "read answer < /dev/tty", "sh", "{}"]
    options = ["-i", "items.txt", "-j", "a", "--retries", "0", "--no-last-pass", "--timeout", "9"]
    options += ["--workers", "99"] if how == "programs" else []
    code, text = run_on_a_terminal(tmp_path, "run", *options, *words)
    assert code == 3, text
    assert ("OSError" if how in ("fork", "spawn") else "cannot open /dev/tty") in text
    assert "TimedOut" not in text


def test_a_terminal_that_stops_who_writes_from_the_background_stops_no_item(tmp_path: Path):
    (tmp_path / "loud.py").write_text("def shout(item):\n    print('heard', item)\n")
    (tmp_path / "items.txt").write_text("a\nb\n")
    options = ["-i", "items.txt", "-j", "loud", "--progress", "plain", "--timeout", "9", "--retries", "0"]
    code, text = run_on_a_terminal(tmp_path, "run", "loud:shout", *options, strict=True)
    assert code == 0, text
    assert ("heard a" in text, "heard b" in text) == (True, True)


# ---- who asks in a loop of their own --------------------------------------------------------------------------------

ASKING = """
import getpass, subprocess, sys, time, headway
for item in headway.track(range(4), job="t", database="sqlite:///a.db"):
    time.sleep(0.12)
    {body}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "print('heard', input(f'{item}: sure? '))",
            [line for n in range(4) for line in (f"{n}: sure? yes", "heard yes")],
        ),
        ("print(f'{item}: ', end=''); input('sure? ')", [f"{n}: sure? yes" for n in range(4)]),
        ("input(f'{item}: sure? ')", [f"{n}: sure? yes" for n in range(4)]),
        (
            "print('heard', getpass.getpass(f'{item}: sure? '))",
            [line for n in range(4) for line in (f"{n}: sure? ", "heard yes")],
        ),
        (
            "subprocess.run(['sh', '-c', f'printf \"{item}: sure? \" > /dev/tty; read answer < /dev/tty'])",
            [f"{n}: sure? yes" for n in range(4)],
        ),
        ("print('.', end='', flush=True)", ["...."]),
        ("print(item, flush=True)", ["0", "1", "2", "3"]),
        ("print(item, file=sys.stderr, end=' ')", ["0 1 2 3 "]),
    ],
    ids=["answered", "after words", "asked only", "password", "by a program", "dots", "flushed", "never ended"],
)
def test_a_question_or_a_line_that_goes_on_stands_above_the_bar_of_a_loop(
    tmp_path: Path, body: str, expected: list[str]
):
    (tmp_path / "loop.py").write_text(ASKING.format(body=body))
    code, text = run_on_a_terminal(tmp_path, program=("loop.py",))
    assert code == 0, text
    *above, bar, counts, after = screen(text)
    assert [line for line in above if line] == expected
    assert ("100.0%" in bar, "done 4" in counts, after) == (True, True, "")


# ---- streams that were closed before the start ----------------------------------------------------------------------

CLOSED = ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("closed", CLOSED)
def test_a_service_without_streams_runs_programs_and_keeps_what_they_print(tmp_path: Path, closed: str):
    (tmp_path / "items.txt").write_text("a\nb\nc\n")
    words = "run -i items.txt -j t --keep-output all -- sh -c 'echo out $1; echo err $1 >&2' sh {}"
    command = f"exec {sys.executable} -m headway {words} {closed}"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60, check=False).returncode == 0
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db", create=False) as ledger:
        job = ledger.job("t")
        assert [found[2] for found in job.results_by_index(-1)] == ['"out a"', '"out b"', '"out c"']
        assert job.history(1)[0].printed == "--- stdout ---\nout b\n--- stderr ---\nerr b\n"


@pytest.mark.parametrize("closed", CLOSED)
def test_map_and_track_need_no_streams(tmp_path: Path, closed: str):
    (tmp_path / "script.py").write_text(
        "import headway\n"
        "def work(item):\n"
        "    print(item)\n"
        "    return item\n"
        "done = headway.map(work, range(3), job='m', progress='bar').done\n"
        "done += sum(1 for item in headway.track(range(4), job='t'))\n"
        "open('done', 'w').write(str(done))\n"
    )
    command = f"exec {sys.executable} script.py {closed}"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / "done").read_text() == "7"


def test_a_loop_at_a_terminal_may_have_its_output_closed(tmp_path: Path):
    (tmp_path / "loop.py").write_text("import headway\nfor item in headway.track(range(4), job='t'):\n    pass\n")
    closing = f"import os; os.close(1); os.execv({sys.executable!r}, [{sys.executable!r}, 'loop.py'])"
    code, text = run_on_a_terminal(tmp_path, program=("-c", closing))
    assert code == 0, text
    assert "4/4" in text
