"""Items that do the worst they can: each costs itself and nobody else, in every mode."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from headway.ledger import Job, Ledger
from headway.run import plan as plans
from headway.run.items import FileItems
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = """
import asyncio, json, os, sys, threading, time

class Own(BaseException):
    pass

class NoStr(Exception):
    def __str__(self):
        raise RuntimeError("no text of me")

class NoStrAtAll(Exception):
    def __str__(self):
        raise KeyboardInterrupt

class NoRepr(Exception):
    def __repr__(self):
        raise Own("no repr of me")

class Closed(Exception):
    def __getattribute__(self, name):
        raise Own(name)

class Meta(type):
    def __getattribute__(cls, name):
        raise Own(name)

class Shy(Exception, metaclass=Meta):
    pass

class Starved(Exception):
    def __str__(self):
        raise MemoryError

class Text(str):
    def encode(self, *_):
        return 7
    def __len__(self):
        raise Own("no length")

class OddText(Exception):
    def __str__(self):
        return Text("odd")

class Mapping(dict):
    def items(self):
        raise Own("no items of me")
    __iter__ = keys = items

class Unhashable:
    __hash__ = None
    def __eq__(self, other):
        raise Own("no comparison")
    def __getattribute__(self, name):
        raise Own(name)

class Awaits:
    def __await__(self):
        yield

async def never():
    pass

def loop_in(value):
    value.append(value)
    return value

def deep():
    return deep()

def shut():
    os.closerange(3, 256)

def generate():
    yield 1

async def generate_later():
    yield 1

def fork_and_return():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        raise ValueError("the parent of a fork")
    return "the child"

def throw(error):
    raise error

ODD = {
    "interrupt": lambda: throw(KeyboardInterrupt()),
    "generator exit": lambda: throw(GeneratorExit()),
    "own": lambda: throw(Own("mine")),
    "exit": lambda: sys.exit(3),
    "exit with an object": lambda: sys.exit(Unhashable()),
    "cancelled": lambda: throw(asyncio.CancelledError()),
    "stop": lambda: throw(StopIteration(5)),
    "no str": lambda: throw(NoStr()),
    "no str at all": lambda: throw(NoStrAtAll()),
    "no repr": lambda: throw(NoRepr("x")),
    "closed": lambda: throw(Closed("x")),
    "shy": lambda: throw(Shy("x")),
    "starved": lambda: throw(Starved()),
    "odd text": lambda: throw(OddText()),
    "memory": lambda: throw(MemoryError()),
    "deep": deep,
    "group": lambda: throw(BaseExceptionGroup("several", [KeyboardInterrupt(), Own("x")])),
    "surrogate": lambda: throw(ValueError("\\ud800")),
    "no json": object,
    "hostile mapping": lambda: Mapping(a=1),
    "hostile object": Unhashable,
    "nan": lambda: float("nan"),
    "lone surrogate": lambda: "\\udc80",
    "endless": lambda: loop_in([]),
    "coroutine": never,
    "awaitable": Awaits,
    "generator": generate,
    "async generator": generate_later,
    "child": fork_and_return,
    "descriptors": shut,
    "end": lambda: os._exit(9),
}

def plain(item):
    with open("executed", "a") as file:
        file.write(f"{item}\\n")
    time.sleep(0.001)
    return ODD[item]() if item in ODD else item

async def aio(item):
    with open("executed", "a") as file:
        file.write(f"{item}\\n")
    await asyncio.sleep(0.001)
    return ODD[item]() if item in ODD else item

async def selfish(item):
    if item == "all":
        for task in asyncio.all_tasks():
            task.cancel()
    await asyncio.sleep(0.01)
    return item

async def cancels_itself(item):
    if item % 10 == 3:
        asyncio.current_task().cancel()
    return item
"""
ODD = [
    "interrupt", "generator exit", "own", "exit", "exit with an object", "cancelled", "stop", "no str", "no str at all",
    "no repr", "closed", "shy", "starved", "odd text", "memory", "deep", "group", "surrogate", "no json",
    "hostile mapping", "hostile object", "nan", "lone surrogate", "endless", "coroutine", "awaitable", "generator",
    "async generator", "child", "descriptors", "end",
]  # fmt: skip
MODES = {"process": "odd:plain", "thread": "odd:plain", "async": "odd:aio"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "odd.py").write_text(FUNCTIONS)
    return tmp_path


def write_items(place: Path, odd: list[str], ordinary: int) -> list[str]:
    """Odd items among ordinary ones."""
    items = [f"item {n}" for n in range(ordinary)]
    for position, kind in enumerate(odd):
        items.insert(1 + position * (1 + ordinary // max(1, len(odd))), kind)
    (place / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return items


def job_in(place: Path) -> Job:
    return Ledger.open(f"sqlite:///{place / 'headway.db'}", create=False).job("ads")


@pytest.mark.parametrize("timeout", [(), ("--timeout", "30")], ids=["", "with a timeout"])
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_odd_item_costs_only_itself(place: Path, headway_cli: Cli, mode: str, timeout: tuple[str, ...]):
    items = write_items(place, ODD, 200)
    done = headway_cli(
        "run", MODES[mode], "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "3", "--retries", "1",
        "-o", "out.jsonl", "--no-last-pass", *timeout, env={"HEADWAY_RETRY_DELAY": "0.01"}, timeout=90,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    dead = {letter.idx: letter for letter in job.dead_letters()}
    assert sorted(items[idx] for idx in dead) == sorted(ODD)
    assert job.info().done == 200
    charged = {info.idx for info in job.items() if info.attempts}
    assert charged == set(dead), "an ordinary item was charged an attempt"
    assert all(letter.error for letter in dead.values())
    results = [json.loads(line)["result"] for line in (place / "out.jsonl").read_text().splitlines()]
    assert sorted(results) == sorted(item for item in items if item not in ODD)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["interrupt", "no str at all", "hostile mapping", "descriptors"])
def test_an_odd_item_alone_is_charged_with_a_reason_and_the_run_ends(
    place: Path, headway_cli: Cli, mode: str, kind: str
):
    (place / "items.jsonl").write_text(json.dumps(kind) + "\n")
    done = headway_cli(
        "run", MODES[mode], "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-o", "out.jsonl", "--retries", "0",
        "--no-last-pass",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    (letter,) = job_in(place).dead_letters()
    said = {
        "interrupt": "KeyboardInterrupt: raised by the function",
        "no str at all": "NoStrAtAll: (its message cannot be shown)",
        "hostile mapping": "ResultNotJson: the function returned Mapping, which is not JSON: Own: no items of me",
        "descriptors": "WorkerDied: the worker process lost its connection to the run while it ran this item",
    }
    allowed = [said[kind]]
    if (kind, mode) == ("descriptors", "async"):
        # A loop that loses its descriptors may end before anybody notices that the socket is gone as well.
        allowed.append("WorkerDied: the worker process ended by itself")
    assert letter.error.startswith(tuple(allowed)), letter.error


def test_a_connection_that_gets_the_number_of_the_closed_socket_hears_nothing_of_ours(place: Path, headway_cli: Cli):
    (place / "jobs.py").write_text(
        "import os, socket\nkept = []\n"
        "def work(item):\n"
        "    os.closerange(3, 256)\n"
        "    for _ in range(50):\n"
        "        kept.append(socket.socket(socket.AF_UNIX))\n"
        "        kept[-1].connect('server')\n"
    )
    (place / "items.jsonl").write_text("1\n")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "server"))
        server.listen(200)
        done = headway_cli(
            "run", "jobs:work", "-i", "items.jsonl", "-j", "ads", "-w", "1", "--retries", "0", "--no-last-pass"
        )
        assert done.returncode == 3, done.stderr
        server.setblocking(False)  # who noticed the loss may have ended the worker before the last of them
        heard = []
        with suppress(BlockingIOError):
            while True:
                connection, _ = server.accept()
                with connection:
                    heard.append(connection.recv(1000))
        assert heard
        assert set(heard) == {b""}


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_works_after_odd_items(place: Path, spawn_cli: Spawn, mode: str):
    (place / "items.jsonl").write_text('"interrupt"\n"own"\n"no str at all"\n' + '"x"\n' * 100_000)
    run = spawn_cli(
        "run", MODES[mode], "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "2", stderr=subprocess.PIPE
    )
    executed = place / "executed"
    eventually(lambda: executed.exists() and executed.read_text().count("\n") > 20, timeout=30)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130, said


def test_cancelling_every_task_of_the_loop_fails_items_and_does_not_stop_the_run(place: Path, headway_cli: Cli):
    (place / "items.jsonl").write_text('"a"\n' * 20 + '"all"\n' + '"b"\n' * 20)
    done = headway_cli(
        "run", "odd:selfish", "-i", "items.jsonl", "-j", "ads", "-w", "4", "--retries", "2", "--no-last-pass",
        env={"HEADWAY_RETRY_DELAY": "0.01"},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    assert [letter.idx for letter in job.dead_letters()] == [20]
    assert job.info().done == 40
    assert {idx: job.item(idx).attempts for idx in range(41) if job.item(idx).attempts} == {20: 3}


def test_a_cancellation_that_an_item_asked_for_and_did_not_wait_for_does_not_reach_the_next(
    place: Path, headway_cli: Cli
):
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(40)))
    done = headway_cli("run", "odd:cancels_itself", "-i", "items.jsonl", "-j", "ads", "-w", "1", "--retries", "0")
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    assert [letter.idx for letter in job.dead_letters()] == [3, 13, 23, 33]
    assert job.info().done == 36


# ---- what the function starts ---------------------------------------------------------------------------------------

PROCESSES = """
import multiprocessing, os, signal, subprocess, sys, time

def double(n):
    return 2 * n

def pool(item):
    with multiprocessing.Pool(2) as pool:
        return pool.map(double, [item, 1])

def terminate(item):
    process = multiprocessing.Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(20)
    return process.exitcode

def handlers(item):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        names = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        usual = names == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]
        os.write(theirs, b"usual" if usual else repr(names).encode())
        os._exit(0)
    os.wait()
    return os.read(ours, 1000).decode()

def command(item):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.terminate()
    return process.wait(20)

def leaves_one(item):
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **quiet)
    with open("left", "w") as file:
        file.write(str(process.pid))
"""


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize(
    ("function", "result"), [("pool", [6, 2]), ("terminate", -15), ("handlers", "usual"), ("command", -15)]
)
def test_processes_that_the_function_starts_obey_signals_as_usual(
    place: Path, headway_cli: Cli, mode: str, function: str, result: object
):
    (place / "processes.py").write_text(PROCESSES)
    (place / "items.jsonl").write_text("3\n")
    done = headway_cli(
        "run", f"processes:{function}", "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "2", "-o", "out.jsonl",
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((place / "out.jsonl").read_text())["result"] == result


def test_what_a_function_started_and_left_behind_ends_with_the_run(place: Path, headway_cli: Cli):
    (place / "processes.py").write_text(PROCESSES)
    (place / "items.jsonl").write_text("3\n")
    done = headway_cli("run", "processes:leaves_one", "-i", "items.jsonl", "-j", "ads", "-w", "1")
    assert done.returncode == 0, done.stderr
    stat = Path(f"/proc/{(place / 'left').read_text()}/stat")
    eventually(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX", timeout=10)


# ---- functions that cannot work ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["generate", "generate_later"])
def test_a_generator_function_is_refused_before_anything_runs(place: Path, headway_cli: Cli, function: str):
    (place / "lazy.py").write_text(
        "def generate(item):\n    yield item\nasync def generate_later(item):\n    yield item\n"
    )
    (place / "items.jsonl").write_text("1\n2\n")
    done = headway_cli("run", f"lazy:{function}", "-i", "items.jsonl")
    assert done.returncode == 2, done.stderr
    assert "generator" in done.stderr
    assert "return" in done.stderr
    assert not (place / "headway.db").exists()


@pytest.mark.parametrize("body", ["work(item)", "(part for part in [item])", "asyncio.gather(work(item))"])
def test_a_function_that_returns_what_nobody_awaits_fails_its_items_and_says_what_to_do(
    place: Path, headway_cli: Cli, body: str
):
    (place / "lazy.py").write_text(
        "import asyncio\nasync def work(item):\n    open('ran', 'w').close()\n"
        f"def start(item):\n    asyncio.set_event_loop(asyncio.new_event_loop())\n    return {body}\n"
    )
    (place / "items.jsonl").write_text("1\n2\n")
    done = headway_cli("run", "lazy:start", "-i", "items.jsonl", "-j", "ads")
    assert done.returncode == 3, done.stderr
    assert "nothing was run" in done.stderr
    job = job_in(place)
    assert (job.info().done, job.info().dead, job.info().failures) == (0, 2, 2), "tried once each: trying cannot help"


# ---- a ledger that was damaged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("damage", ["{bad", "", '1],[7,0,"', "[1,2", b"\xff\x00", "1 2"], ids=repr)
def test_a_damaged_payload_kills_its_own_item_at_once_and_no_other(
    place: Path, headway_cli: Cli, mode: str, damage: str | bytes
):
    write_items(place, [], 30)
    with Ledger.open(f"sqlite:///{place / 'headway.db'}") as ledger:
        plan = plans.compare(ledger, "ads", MODES[mode], FileItems(place / "items.jsonl"))
        plans.carry_out(ledger, ledger.create("ads"), plan, max_retries=3)
        ledger.database.run(lambda tx: tx.execute("UPDATE input_products SET payload = ? WHERE idx = 7", (damage,)))
    done = headway_cli(
        "run", MODES[mode], "-i", "items.jsonl", "-j", "ads", "--mode", mode, "-w", "2", "--retries", "3"
    )
    assert done.returncode == 3, done.stderr
    job = job_in(place)
    assert [letter.idx for letter in job.dead_letters()] == [7]
    assert (job.info().done, job.info().failures) == (29, 1), "trying again cannot help"


def damage(place: Path, indices: range) -> None:
    """A job of 30 items, none of them run, with the payloads of some changed."""
    write_items(place, [], 30)
    with Ledger.open(f"sqlite:///{place / 'headway.db'}") as ledger:
        plan = plans.compare(ledger, "ads", "odd:plain", FileItems(place / "items.jsonl"))
        plans.carry_out(ledger, ledger.create("ads"), plan, max_retries=3)
        for idx in indices:
            ledger.database.write("UPDATE input_products SET payload = '7' WHERE idx = ?", (idx,))


def test_damaged_payloads_are_counted_by_the_run_that_finds_them(place: Path, headway_cli: Cli):
    damage(place, range(5, 8))
    done = headway_cli("run", "odd:plain", "-i", "items.jsonl", "-j", "ads", "-w", "2", "--json")
    assert done.returncode == 3, done.stderr
    facts = json.loads(done.stdout)
    assert {name: facts[name] for name in ("done", "dead", "retrying", "failures")} == {
        "done": 27, "dead": 3, "retrying": 0, "failures": 3,
    }  # fmt: skip
    last = next(line for line in reversed(done.stderr.splitlines()) if "27/30" in line)
    assert "dead 3" in last
    assert "last error: DamagedPayload x3" in last
    assert "27 done, 3 dead, 0 retries" in done.stderr


def test_damaged_payloads_count_towards_the_deaths_that_stop_a_run(place: Path, headway_cli: Cli):
    damage(place, range(5, 8))
    done = headway_cli("run", "odd:plain", "-i", "items.jsonl", "-j", "ads", "-w", "2", "--max-failures", "3")
    assert done.returncode == 4, done.stderr
    assert "3 items died in this run" in done.stderr
    assert not (place / "executed").exists(), "it stops before anything is handed to a worker"
    assert job_in(place).info().remaining == 27
