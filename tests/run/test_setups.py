"""What a worker opens once: entered per process, thread or loop, closed at the end, and one clear error if it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.errors import HeadwayError, InvalidInput, SetupFailed
from headway.ledger import Ledger
from tests.services.waiting import eventually

CLI = Callable[..., subprocess.CompletedProcess[str]]
#: Where set-ups note what they do. Workers inherit it.
NOTES = "HEADWAY_TEST_NOTES"


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'headway.db'}"


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


def note(word: str) -> None:
    with open(os.environ[NOTES], "a") as file:
        file.write(f"{word} {os.getpid()}.{threading.get_ident()}\n")


def told(notes: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in notes.read_text().splitlines())


class Client:
    def __enter__(self) -> str:
        note("open")
        return f"{os.getpid()}.{threading.get_ident()}"

    def __exit__(self, *_: object) -> None:
        note("closed")


def open_client() -> Iterator[str]:
    with Client() as name:
        yield name


async def open_client_async() -> AsyncIterator[str]:
    note("open")
    yield f"{os.getpid()}.{threading.get_ident()}"
    note("closed")


def which(n: int, client: str) -> str:
    time.sleep(0.005)
    assert client == f"{os.getpid()}.{threading.get_ident()}", "it was opened elsewhere"
    return client


async def which_async(n: int, client: str) -> str:
    return which(n, client)


WAYS: list[tuple[Any, Any, dict[str, Any], int]] = [
    (which, open_client, {"mode": "process"}, 3),
    (which, Client, {"mode": "process", "start": "spawn"}, 3),
    (which, open_client, {"mode": "thread"}, 3),
    (which_async, open_client_async, {"mode": "async"}, 1),
    (which_async, Client, {"mode": "async"}, 1),
]


@pytest.mark.parametrize(("function", "setup", "way", "most"), WAYS)
def test_each_worker_enters_it_once_and_closes_it(
    database: str, notes: Path, function: Any, setup: Any, way: dict[str, Any], most: int
):
    result = headway.map(
        function, range(60), setup=setup, job="ads", database=database, workers=3, progress="none", **way
    )
    assert (result.done, result.failures) == (60, 0)
    opened = told(notes)
    assert 1 <= opened["open"] <= most
    assert opened["closed"] == opened["open"]
    assert len({each.result for each in result.results()}) <= opened["open"]


def test_it_may_be_a_closure_in_forked_workers(database: str):
    def open_list() -> Iterator[list[int]]:
        yield [7]

    result = headway.map(
        lambda n, value: n + value[0], range(5), setup=open_list, job="ads", database=database, progress="none"
    )
    assert [each.result for each in result.results()] == [7, 8, 9, 10, 11]


def refuses() -> Iterator[None]:
    raise OSError("no route to the model store")
    yield


async def refuses_async() -> AsyncIterator[None]:
    raise OSError("no route to the model store")
    yield


@pytest.mark.parametrize(
    "way", [{"mode": "process"}, {"mode": "thread"}, {"mode": "async"}, {"start": "spawn"}], ids=str
)
def test_a_failing_set_up_ends_the_run_with_one_error_and_costs_no_attempt(database: str, way: dict[str, Any]):
    is_async = way.get("mode") == "async"
    function: Any = which_async if is_async else which
    setup: Any = refuses_async if is_async else refuses
    with pytest.raises(SetupFailed, match=r"The set-up of a worker failed: OSError: no route to the model store\."):
        headway.map(function, range(50), setup=setup, job="ads", database=database, workers=2, progress="none", **way)
    with Ledger.open(database) as ledger:
        info = ledger.job("ads").info()
    assert (info.total, info.done, info.dead, info.failed, info.failures) == (50, 0, 0, 0, 0)
    setup = open_client_async if is_async else open_client
    result = headway.map(
        function, range(50), setup=setup, job="ads", database=database, workers=2, progress="none", **way
    )
    assert (result.done, result.failures) == (50, 0)


def dies() -> Iterator[None]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def test_a_set_up_that_kills_its_process_ends_the_run_and_costs_no_attempt(database: str):
    with pytest.raises(HeadwayError, match=r"killed by SIGKILL.* before they started an item") as caught:
        headway.map(which, range(50), setup=dies, job="ads", database=database, workers=2, progress="none")
    assert "set-up" in caught.value.hint
    with Ledger.open(database) as ledger:
        info = ledger.job("ads").info()
    assert (info.done, info.dead, info.failures) == (0, 0, 0)


def fails_after_a_death(n: int, _: object) -> int:
    if n == 20 and not Path(os.environ[NOTES] + ".died").exists():
        Path(os.environ[NOTES] + ".died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return n


def opens_until_a_death() -> Iterator[None]:
    if Path(os.environ[NOTES] + ".died").exists() and not Path(os.environ[NOTES] + ".repaired").exists():
        raise OSError("the server went away")
    yield


def test_a_set_up_that_fails_in_the_middle_loses_nothing_and_charges_nobody_else(database: str, notes: Path):
    with pytest.raises(SetupFailed, match="the server went away"):
        headway.map(
            fails_after_a_death,
            range(60),
            setup=opens_until_a_death,
            job="ads",
            database=database,
            workers=2,
            progress="none",
        )
    with Ledger.open(database) as ledger:
        before = ledger.job("ads").info()
    assert before.failures <= 1, "only the item that killed its worker"
    Path(os.environ[NOTES] + ".repaired").touch()
    result = headway.map(
        fails_after_a_death,
        range(60),
        setup=opens_until_a_death,
        job="ads",
        database=database,
        workers=2,
        progress="none",
    )
    assert (result.done, result.dead, result.kept) == (60, 0, before.done)
    assert sorted(each.result for each in result.results()) == list(range(60))


def long_beside_a_death(n: int, _: object) -> None:
    if Path(os.environ[NOTES] + ".repaired").exists():
        return
    if n == 0:
        time.sleep(60)
    time.sleep(1.5)  # by then the long item is noted as running
    Path(os.environ[NOTES] + ".died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_set_up_that_fails_in_the_middle_does_not_charge_a_long_item(database: str):
    options: dict[str, Any] = {"setup": opens_until_a_death, "job": "ads", "database": database, "workers": 2}
    with pytest.raises(SetupFailed, match="the server went away"):
        headway.map(long_beside_a_death, range(2), progress="none", **options)
    Path(os.environ[NOTES] + ".repaired").touch()
    headway.map(long_beside_a_death, range(2), progress="none", **options)
    with Ledger.open(database) as ledger:
        job = ledger.job("ads")
        assert (job.info().done, len(job.history(0))) == (2, 1), "its success only"


def test_it_is_closed_when_items_fail_and_when_a_run_is_stopped(database: str, notes: Path):
    def fail(n: int, _: object) -> None:
        raise ValueError("no")

    result = headway.map(
        fail, range(10), setup=open_client, job="ads", database=database, retries=0, max_failures=3, workers=2,
        progress="none",
    )  # fmt: skip
    assert result.outcome == "stopped"
    assert told(notes)["closed"] == told(notes)["open"]


def test_ctrl_c_closes_it(tmp_path: Path, notes: Path):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom tests.run.test_setups import Client, note\n"
        "def work(n, client):\n    note('work')\n    time.sleep(0.05)\n"
    )
    (tmp_path / "items.txt").write_text("".join(f"{n}\n" for n in range(2000)))
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "run", "slow:work", "--setup", "tests.run.test_setups:Client", "-i", "items.txt",
         "--progress", "none", "-w", "2"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
    )  # fmt: skip
    eventually(lambda: told(notes)["work"] > 5)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert told(notes)["closed"] == told(notes)["open"] > 0


def closes_badly() -> Iterator[None]:
    yield
    raise OSError("the server went away")


def test_an_error_while_closing_costs_nothing(database: str, capfd: pytest.CaptureFixture[str]):
    result = headway.map(
        lambda n, _: n, range(10), setup=closes_badly, job="ads", database=database, workers=2, progress="none"
    )
    assert (result.done, result.failures) == (10, 0)
    assert "the server went away" in capfd.readouterr().err


def takes_one(n: int) -> int:
    return n


@pytest.mark.parametrize(
    ("function", "setup", "options", "why"),
    [
        (which, "module:function", {}, "must be a function that returns a context manager"),
        (which, Client(), {}, "each worker needs one of its own"),
        (which, open_client_async, {}, "is async, and the function is not"),
        (which, which, {}, "must not need arguments"),
        (takes_one, open_client, {}, "cannot be called with an item and the value of its set-up"),
        (which, None, {}, "cannot be called with one item"),
        (which, open_client, {"executor": ThreadPoolExecutor(1)}, "cannot be used with executor="),
    ],
)
def test_a_bad_set_up_is_refused_before_anything_is_written(
    tmp_path: Path, database: str, function: Any, setup: Any, options: dict[str, Any], why: str
):
    with pytest.raises(InvalidInput, match=why):
        headway.map(function, range(5), setup=setup, job="ads", database=database, **options)
    assert not (tmp_path / "headway.db").exists()


def test_the_command_line_names_it(tmp_path: Path, quick_cli: CLI):
    (tmp_path / "shop.py").write_text(
        "def opens():\n    yield 5\ndef work(n, value):\n    return int(n) + value\n"
        "def fails():\n    raise OSError('no')\n    yield\n"
    )
    (tmp_path / "items.txt").write_text("1\n2\n")
    refused = quick_cli("run", "shop:work", "-i", "items.txt")
    assert (refused.returncode, "It must take one argument" in refused.stderr) == (2, True)
    refused = quick_cli("run", "shop:work", "--setup", "shop:nothing", "-i", "items.txt")
    assert (refused.returncode, "has no function 'nothing'" in refused.stderr) == (2, True)
    refused = quick_cli("run", "--setup", "shop:opens", "-i", "items.txt", "--", "echo", "{}")
    assert (refused.returncode, "--setup is for functions" in refused.stderr) == (2, True)
    failed = quick_cli("run", "shop:work", "--setup", "shop:fails", "-i", "items.txt", "-j", "ads")
    assert (failed.returncode, failed.stderr.count("The set-up of a worker failed: OSError: no.")) == (1, 1)
    done = quick_cli("run", "shop:work", "--setup", "shop:opens", "-i", "items.txt", "-j", "ads", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert '"result":6' in (tmp_path / "out.jsonl").read_text().replace(" ", "")
