"""The blocks of pages that need another machine, a service or a person: run here, with something that stands in for those.

All other blocks are run by tools/docs.py.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headway
from headway.cli.jobs.run import run as run_verb
from headway.ledger import Ledger
from tests.services.waiting import eventually
from tools import docs

Sh = Callable[[str], "subprocess.CompletedProcess[str]"]

PAGES = {
    "howto/server-and-laptop.md": ["tmux new", "--watch", "headway serve", "ssh -N", "token create laptop", "--database http"],
    "howto/from-celery.md": ["apply_async"],
    "howto/own-executor.md": ["MPIPoolExecutor"],
    "reference/run.md": ["headway run module:function", "./convert.sh", "job.remaining()"],
}  # fmt: skip

#: The server is this machine. With -t there is a terminal; a tunnel leads to where it begins.
SSH = """#!{python}
import os, pty, sys
words, terminal = sys.argv[1:], False
while words[0].startswith("-"):
    option = words.pop(0)
    terminal = terminal or option == "-t"
    if option == "-L":
        near, host, far = words.pop(0).split(":")
        assert (near, host) == (far, "127.0.0.1")
assert words.pop(0) == "server"
if words:
    command = ["sh", "-c", " ".join(words)]
    sys.exit(os.waitstatus_to_exitcode(pty.spawn(command)) if terminal else os.execvp("sh", command))
"""


def blocks(page: str) -> list[str]:
    found = docs.blocks(docs.ROOT / "docs" / page)
    return [code for _, info, code in found if info.endswith("tests/run/test_howto.py")]


def block(page: str, word: str) -> str:
    (found,) = [code for code in blocks(page) if word in code]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_these_pages_is_run_here_or_as_an_example(page: str):
    assert [word for code in blocks(page) for word in PAGES[page] if word in code] == PAGES[page]
    assert len(blocks(page)) == len(PAGES[page])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a person has an own module, items, and programs that stand in for those of others."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "ssh": SSH.format(python=sys.executable),
        "tmux": "#!/bin/sh\n",
        "tell-me": f'#!/bin/sh\necho "$@" >> {tmp_path}/told\ncat >> {tmp_path}/told\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "ads.py").write_text(
        "import os, time\n"
        "def make_ad(product):\n"
        "    while os.path.exists('blocked'): time.sleep(0.05)\n"
        "    if product == 3: raise ValueError('no price')\n"
        "    return product\n"
    )
    (tmp_path / "products.jsonl").write_text("".join(f"{n}\n" for n in range(6)))
    (tmp_path / "work").symlink_to(tmp_path)
    return tmp_path


@pytest.fixture
def sh(place: Path) -> Sh:
    def sh(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-u", "-c", code], cwd=place, env=environment(place), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return sh


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    path = os.pathsep.join([str(place / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path, "TERM": "xterm", "HEADWAY_RETRIES": "0"}


def begin(place: Path, code: str, **options: Any) -> subprocess.Popen[str]:
    """It ends in a minute, whatever becomes of the test."""
    command = ["timeout", "60", "sh", "-c", code]
    return subprocess.Popen(command, cwd=place, env=environment(place), text=True, **options)


def is_running(place: Path) -> bool:
    if not (place / "headway.db").exists():
        return False
    with Ledger.open(f"sqlite:///{place}/headway.db", create=False) as ledger:
        return any(info.held for info in ledger.jobs())


# ---- run on a server and look from a laptop -------------------------------------------------------------------------

LAPTOP = "howto/server-and-laptop.md"


def test_a_run_on_a_server_is_watched_paused_and_followed_by_ssh(place: Path, sh: Sh):
    start = block(LAPTOP, "tmux new")
    watch, pause, follow = block(LAPTOP, "--watch").splitlines()
    (place / "blocked").touch()
    with begin(place, start, stderr=subprocess.PIPE) as run:
        eventually(lambda: is_running(place))
        assert sh(pause).returncode == 0
        ends = [begin(place, line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for line in (watch, follow)]
        with ends[0], ends[1]:
            time.sleep(0.5)
            (place / "blocked").unlink()
            assert sh(pause.replace("pause", "resume")).returncode == 0
            seen, _ = ends[0].communicate(timeout=60)
            ends[1].communicate(timeout=60)
        _, said = run.communicate(timeout=60)
    assert "Paused by" in said
    assert [end.returncode for end in ends] == [0, 0]
    assert "5/6" in seen
    assert (place / "results.jsonl").read_text().count("\n") == 5


@contextmanager
def serving(place: Path, code: str) -> Iterator[str]:
    """The port at which the command listens."""
    words = [*shlex.split(code), "--port", "0"]
    with subprocess.Popen(words, cwd=place, env=environment(place), stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            yield next(found[1] for line in server.stderr if (found := re.search(r"http://127.0.0.1:(\d+)", line)))
        finally:
            server.terminate()


def test_the_page_of_a_server_is_asked_from_a_laptop_through_a_tunnel(place: Path, sh: Sh):
    assert sh(block(LAPTOP, "tmux new")).returncode == 3
    show, dead = block(LAPTOP, "--database http").splitlines()
    with serving(place, block(LAPTOP, "headway serve")) as port:
        assert sh(block(LAPTOP, "ssh -N").replace("8700", port)).returncode == 0
        token = sh(block(LAPTOP, "headway token create laptop")).stdout.split()[-1]
        shown = sh(show.replace("8700", port).replace("...", token, 1))
        assert (shown.returncode, "5/6" in shown.stdout) == (0, True), shown.stderr
        secret = sh("headway token create anna --role operator").stdout.split()[-1]
        open_to_all = dead.replace("https://progress.example.org", f"http://127.0.0.1:{port}")
        listed = sh(open_to_all.replace("...", secret, 1))
        assert (listed.returncode, "ValueError" in listed.stdout) == (0, True), listed.stderr
        assert sh(open_to_all.replace("...", "wrong", 1)).returncode != 0


# ---- be told when it is done ----------------------------------------------------------------------------------------


def test_sinks_of_the_settings_get_the_event_of_a_run(place: Path, sh: Sh):
    bodies: list[bytes] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/hook"
        (place / "headway.toml").write_text(f'sinks = ["{address}", "command:{place}/bin/tell-me --channel ops"]')
        assert sh("headway run ads:make_ad --items products.jsonl --job ads").returncode == 3
        server.shutdown()
    assert len(bodies) == 1
    assert b"job.completed" in bodies[0]
    told = (place / "told").read_text()
    assert told.startswith("--channel ops\n")
    assert '"job.completed"' in told


# ---- come from Celery, bring an executor ----------------------------------------------------------------------------


def test_the_group_of_celery_has_its_counterpart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    told: list[Any] = []

    def make_ad(product: int) -> int:
        return product

    given: list[int] = []
    vars(make_ad)["s"] = given.append
    names = {
        "group": lambda calls: SimpleNamespace(apply_async=lambda: list(calls)),
        "headway": headway, "make_ad": make_ad, "products": [1, 2], "tell": told.append,
    }  # fmt: skip
    exec(block("howto/from-celery.md", "apply_async"), names)
    assert given == [1, 2]
    assert [event.data["succeeded"] for event in told] == [2]


EXECUTORS = block("howto/own-executor.md", "MPIPoolExecutor").splitlines()


#: In a program of its own: Dask's threads outlive their cluster.
IN_AN_EXECUTOR = """
import sys
from concurrent.futures import ProcessPoolExecutor
import distributed, headway, loky

def Client(address):
    assert address == "tcp://scheduler:8786"
    return distributed.Client(distributed.LocalCluster(processes=False, n_workers=1, dashboard_address=None))

if __name__ == "__main__":
    result = headway.map(abs, range(3), job="t", executor=eval(sys.argv[1]), progress="none")
    assert result.done == 3
"""


@pytest.mark.parametrize("line", [line for line in EXECUTORS if "MPI" not in line])  # that needs an MPI
def test_every_executor_of_the_page_runs_items(tmp_path: Path, line: str):
    pytest.importorskip("distributed")
    pytest.importorskip("loky")
    (tmp_path / "program.py").write_text(IN_AN_EXECUTOR)
    command = [sys.executable, "program.py", line.partition("#")[0].removeprefix("executor=").strip()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


# ---- run.md ---------------------------------------------------------------------------------------------------------


def test_the_options_of_the_first_block_are_those_of_the_verb():
    named = set(re.findall(r"--[a-z-]+", block("reference/run.md", "headway run module:function")))
    assert named
    assert named <= {option for parameter in run_verb.params for option in parameter.opts}


def test_programs_are_run_for_each_item(place: Path, sh: Sh):
    (place / "urls.txt").write_text("a\nb\n")
    (place / "convert.sh").write_text('#!/bin/sh\ntest "$2" = --out && echo "$1" > "$3"\n')
    (place / "page").write_text("<p>")
    (place / "pages.csv").write_text(f"id,url\nx,file://{place}/page\n")
    (place / "texts.jsonl").write_text('{"text": "a"}\n')
    (place / "analyse").write_text("#!/bin/sh\ncat\n")
    for name in ("convert.sh", "analyse"):
        (place / name).chmod(0o755)
    for line in block("reference/run.md", "./convert.sh").splitlines():
        done = sh(line)
        assert done.returncode == 0, done.stderr
    assert ((place / "0.png").read_text(), (place / "1.png").read_text()) == ("a\n", "b\n")
    assert (place / "x.html").read_text() == "<p>"


def test_threads_share_an_open_job(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    made: list[str] = []
    names = {"headway": headway, "concurrent": concurrent, "paths": ["a", "b", "c"], "make_thumbnail": made.append}
    exec(block("reference/run.md", "job.remaining()"), names)
    assert sorted(made) == ["a", "b", "c"]
