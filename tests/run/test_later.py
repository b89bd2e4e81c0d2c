"""RetryLater in runs: no attempt is counted, the delay survives, and the whole job can wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.errors import InvalidInput, UsageError
from headway.ledger import Ledger
from headway.run.output.results import Keep
from headway.run.worker import batch
from headway.run.worker.attempt import later_row
from tests.services.waiting import eventually

CLI = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'headway.db'}"


def calls(folder: Path) -> Counter[int]:
    """How often each item was called: one line per call."""
    return Counter(int(line) for file in folder.glob("called-*") for line in file.read_text().split())


def called(folder: str, n: int) -> int:
    """Note a call of item ``n``. Return how many there were, also in processes that were killed."""
    file = Path(folder) / f"called-{n}"
    with file.open("a") as opened:
        opened.write(f"{n}\n")
    return len(file.read_text().split())


def later_once(item: dict[str, Any]) -> int:
    """Postpone every third item on its first call."""
    if called(item["at"], item["n"]) == 1 and item["n"] % 3 == 0:
        raise headway.RetryLater(0.05, "quota")
    return int(item["n"])


async def later_once_async(item: dict[str, Any]) -> int:
    return later_once(item)


def the_job_later_once(item: dict[str, Any]) -> float:
    """Let the whole job wait when the first item is called for the first time."""
    if called(item["at"], item["n"]) == 1 and item["n"] == 0:
        raise headway.RetryLater(1.5, "the server answered 429", scope="job")
    time.sleep(0.01)
    return time.time()


async def the_job_later_once_async(item: dict[str, Any]) -> float:
    return the_job_later_once(item)


def always_later(item: dict[str, Any]) -> None:
    called(item["at"], item["n"])
    raise headway.RetryLater(0.0, "never ready")


def items(folder: Path, count: int = 30) -> list[dict[str, Any]]:
    return [{"n": n, "at": str(folder)} for n in range(count)]


WAYS: list[dict[str, Any]] = [{"mode": "process"}, {"mode": "thread"}, {"mode": "async"}, {"start": "spawn"}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_postponed_items_run_again_without_an_attempt(tmp_path: Path, database: str, way: dict[str, Any]):
    function = later_once_async if way.get("mode") == "async" else later_once
    result = headway.map(
        function, items(tmp_path), job="ads", database=database, workers=3, retries=0, progress="none", **way
    )
    assert (result.done, result.dead, result.failures) == (30, 0, 0)
    assert calls(tmp_path) == Counter({n: 2 if n % 3 == 0 else 1 for n in range(30)})
    assert [each.result for each in result.results()] == list(range(30))


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_postponed_items_run_again_in_an_executor(tmp_path: Path, database: str, kind: Any):
    with kind(2) as executor:
        result = headway.map(
            later_once, items(tmp_path), job="ads", database=database, executor=executor, retries=0, progress="none"
        )
    assert (result.done, result.dead, result.failures) == (30, 0, 0)
    assert calls(tmp_path)[3] == 2


def waits_first(n: int) -> int:
    if n == 0:
        raise headway.RetryLater(60, "quota", scope="job")
    return n


def test_a_job_wait_ends_a_batch_of_an_executor():
    orders = batch.Orders(waits_first, Keep(), None, "nowhere")
    answer = batch.run(orders, 1, None, [(n, 0, str(n)) for n in range(3)], None)
    assert [row[0] for row in answer["later"]] == [0]
    assert (answer["done"], answer["failed"], answer["back"]) == ([], [], [1, 2])


@contextmanager
def _ways(way: str) -> Any:
    if way == "executor":
        with ThreadPoolExecutor(2) as executor:
            yield {"executor": executor}
    else:
        yield {"mode": way}


@pytest.mark.parametrize("way", ["process", "thread", "async", "executor"])
def test_with_scope_job_nothing_else_starts_until_then(
    tmp_path: Path, database: str, way: str, capsys: pytest.CaptureFixture[str]
):
    function = the_job_later_once_async if way == "async" else the_job_later_once
    began = time.time()
    with _ways(way) as options:
        result = headway.map(
            function, items(tmp_path, 60), job="ads", database=database, workers=2, progress="plain", **options
        )
    assert (result.done, result.dead, result.failures) == (60, 0, 0)
    ended = [began, *sorted(each.result for each in result.results())]
    longest, at = max((after - before, n) for n, (before, after) in enumerate(pairwise(ended)))
    assert longest > 1.2, "it did not wait"
    assert at < 20, "items went on in the meantime"
    assert "the server answered 429" in capsys.readouterr().err


def test_an_item_beyond_its_limit_is_dead_with_the_reason(tmp_path: Path, database: str):
    result = headway.map(
        always_later, items(tmp_path, 2), job="ads", database=database, later_limit=3, retries=5, progress="none"
    )
    assert (result.dead, result.failures) == (2, 2)
    assert [cause.type for cause in result.causes] == ["RetryLater"]
    assert "never ready" in result.causes[0].message
    assert calls(tmp_path) == Counter({0: 4, 1: 4})


def test_a_bad_delay_is_a_failure_of_its_item(tmp_path: Path, database: str):
    def work(n: int) -> None:
        raise headway.RetryLater(-n)

    result = headway.map(work, [1, 2], job="ads", database=database, retries=0, progress="none")
    assert result.dead == 2
    assert [
        (cause.type, "from 0 to 2,592,000" in cause.message or "from" in cause.message) for cause in result.causes
    ] == [("InvalidInput", True)]


def test_changed_fields_of_the_exception_do_no_harm():
    error = headway.RetryLater(5)
    assert later_row(1, 0.5, error) == (1, 0.5, 5.0, "", False)
    error.seconds = float("nan")
    assert later_row(1, 0.5, error) is None
    assert later_row(1, 0.5, ValueError()) is None
    secret = headway.RetryLater(5, "postgresql://me:secret@db/x \0 failed")
    row = later_row(1, 0.5, secret)
    assert row is not None
    assert "secret" not in row[3]
    assert "\0" not in row[3]


@pytest.mark.parametrize("limit", ["many", "-1", "1/2w", 1.5, "nan"])
def test_a_bad_limit_is_refused_before_anything_is_written(tmp_path: Path, database: str, limit: Any):
    with pytest.raises(UsageError, match="100/24h"):
        headway.map(always_later, items(tmp_path), job="ads", database=database, later_limit=limit)
    assert not (tmp_path / "headway.db").exists()


# ---- kills -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pathlib import Path
import headway
from tests.run.test_later import called

def work(item):
    times = called(item["at"], item["n"])
    if item["n"] % 2 == 0 and times == 1:
        raise headway.RetryLater(SECONDS, "quota", scope=SCOPE if item["n"] == 10 else "item")
    time.sleep(0.02)
    return times

headway.map(work, [{"n": n, "at": "FOLDER"} for n in range(40)], job="ads", database="DATABASE", workers=2,
            mode="MODE", retries=0, progress="none")
"""


def start_script(tmp_path: Path, database: str, **parts: object) -> subprocess.Popen[bytes]:
    text = SCRIPT.replace("FOLDER", str(tmp_path)).replace("DATABASE", database)
    for name, value in parts.items():
        text = text.replace(name.upper(), str(value))
    file = tmp_path / "script.py"
    file.write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    return subprocess.Popen([sys.executable, str(file)], env=environment, cwd=tmp_path)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_delays_survive_kills_and_the_items_run_exactly_once_more(tmp_path: Path, database: str, mode: str):
    first = start_script(tmp_path, database, seconds=2.0, scope="'item'", mode=mode)
    eventually(lambda: sum(calls(tmp_path).values()) >= 40)
    eventually(lambda: _postponed(database) == 20)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with Ledger.open(database) as ledger:
        waiting = ledger.job("ads").postponed()
    assert waiting is not None
    assert (waiting.items, waiting.reason) == (20, "quota")
    second = start_script(tmp_path, database, seconds=2.0, scope="'item'", mode=mode)
    assert second.wait(30) == 0
    with Ledger.open(database) as ledger:
        info = ledger.job("ads").info()
    assert (info.done, info.dead, info.failures, info.failed) == (40, 0, 0, 0)
    assert calls(tmp_path) == Counter({n: 1 + (n % 2 == 0) for n in range(40)})


def test_a_killed_run_leaves_the_wait_of_its_job_to_the_next(tmp_path: Path, database: str):
    first = start_script(tmp_path, database, seconds=4.0, scope="'job'", mode="process")

    def waits() -> bool:
        if not (tmp_path / "headway.db").exists():
            return False
        with Ledger.open(database) as ledger:
            return any(info.wait_until is not None for info in ledger.jobs())

    eventually(waits)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with Ledger.open(database) as ledger:
        until = ledger.job("ads").info().wait_until
    assert until is not None
    before = calls(tmp_path)
    second = start_script(tmp_path, database, seconds=4.0, scope="'job'", mode="process")
    assert second.wait(30) == 0
    changed = [n for n, count in calls(tmp_path).items() if count > before[n]]
    assert len(changed) > 20
    assert min((tmp_path / f"called-{n}").stat().st_mtime for n in changed) > until.timestamp() - 0.1, "it did not wait"
    with Ledger.open(database) as ledger:
        info = ledger.job("ads").info()
    assert (info.done, info.dead, info.remaining) == (40, 0, 0)


def _postponed(database: str) -> int:
    with Ledger.open(database) as ledger:
        found = ledger.job("ads").postponed()
    return 0 if found is None else found.items


def test_ctrl_c_ends_a_waiting_run_at_once_and_says_until_when(tmp_path: Path, headway_cli: CLI):
    (tmp_path / "waits.py").write_text(
        "import headway\ndef work(n):\n    raise headway.RetryLater(3600, 'quota is used up', scope='job')\n"
    )
    (tmp_path / "items.txt").write_text("1\n2\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "run", "waits:work", "-i", "items.txt", "-j", "ads", "--progress", "json"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    seen: list[dict[str, Any]] = []
    for line in process.stderr:
        seen.append(json.loads(line))
        if seen[-1].get("wait_reason") == "quota is used up":
            break
    assert 3500 < seen[-1]["waits_seconds"] <= 3600
    assert seen[-1]["postponed"] >= 1
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=10)
    assert process.returncode == 130, rest
    shown = headway_cli("show", "ads").stdout
    assert "starts nothing until" in shown
    assert "quota is used up" in shown
    facts = json.loads(headway_cli("show", "ads", "--json").stdout)
    assert facts["wait_reason"] == "quota is used up"
    assert (facts["postponed"] in (1, 2), facts["postponed_reason"]) == (True, "quota is used up")
    assert facts["waits_until"] is not None


# ---- programs --------------------------------------------------------------------------------------------------------


def test_a_program_with_exit_status_75_runs_again_later(tmp_path: Path, quick_cli: CLI):
    (tmp_path / "items.txt").write_text("".join(f"item{n}\n" for n in range(6)))
    script = 'test -e "$1" && exit 0; touch "$1"; echo busy >&2; echo "Retry-After: 0.1" >&2; exit 75'
    done = quick_cli("run", "-i", "items.txt", "-j", "ads", "--retries", "0", "--", "sh", "-c", script, "sh", "{}")
    assert done.returncode == 0, done.stderr
    assert "6 done, 0 dead, 0 retries, 6 postponed" in done.stderr
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        assert ledger.job("ads").info().failures == 0


def test_the_delay_of_a_program_comes_from_its_option_or_from_stderr(tmp_path: Path):
    from headway.run.program import Program

    def postponed(script: str, **options: Any) -> headway.RetryLater:
        with pytest.raises(headway.RetryLater) as caught:
            Program(["sh", "-c", script, "sh", "{}"], **options).run(0, "inv-00421", None)
        return caught.value

    assert postponed("exit 75").seconds == 30.0
    assert postponed("exit 75").reason == "sh ended with exit status 75"
    assert postponed("exit 75", later=5.0).seconds == 5.0
    error = postponed("echo no quota for $1 >&2; echo retry-after: 7 >&2; exit 75", later=5.0)
    assert (error.seconds, error.reason) == (7.0, "no quota for {}")
    for line in ("Retry-After: soon", "Retry-After: -1", "Retry-After: 999999999", "Retry-After: 3 or so"):
        assert postponed(f"echo '{line}' >&2; exit 75", later=5.0).seconds == 5.0
    assert postponed("echo 'Retry-After: 9' >&2; echo done >&2; exit 75", later=5.0).seconds == 5.0, (
        "the last line counts"
    )


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "9999999999"])
def test_a_bad_delay_on_the_command_line_is_refused(tmp_path: Path, quick_cli: CLI, seconds: str):
    (tmp_path / "items.txt").write_text("1\n")
    done = quick_cli("run", "-i", "items.txt", f"--later={seconds}", "--", "echo", "{}")
    assert done.returncode == 2
    assert "--later must be from 0 to" in done.stderr
    assert not (tmp_path / "headway.db").exists()


def test_later_is_for_programs(tmp_path: Path, quick_cli: CLI):
    (tmp_path / "items.txt").write_text("1\n")
    done = quick_cli("run", "builtins:len", "-i", "items.txt", "--later", "5")
    assert (done.returncode, "--later is for programs" in done.stderr) == (2, True)


# ---- a program's own loop --------------------------------------------------------------------------------------------


def test_with_item_postpones_and_yields_again(database: str):
    seen: Counter[int] = Counter()
    with headway.open_job("ads", range(4), database=database, retries=0) as job:
        for item in job.remaining():
            with item:
                seen[item.payload] += 1
                if item.payload == 2 and seen[2] == 1:
                    raise headway.RetryLater(0.2, "quota")
        assert job.progress().done == 4
    assert seen == Counter({0: 1, 1: 1, 2: 2, 3: 1})


def test_with_scope_job_the_loop_yields_nothing_until_then(database: str):
    times: list[float] = []
    with headway.open_job("ads", range(4), database=database) as job:
        for item in job.remaining():
            with item:
                times.append(time.monotonic())
                if len(times) == 2:
                    raise headway.RetryLater(0.6, "quota", scope="job")
    assert len(times) == 5
    assert times[2] - times[1] >= 0.55


def test_an_opened_job_obeys_the_wait_that_an_earlier_process_left(database: str):
    with headway.open_job("ads", range(2), database=database) as job:
        for item in job.remaining():
            with item:
                raise headway.RetryLater(1.0, "quota", scope="job")
            break
    began = time.monotonic()
    with headway.open_job("ads", database=database) as job:
        assert list(job.remaining(wait=False)) == []
        for item in job.remaining():
            assert time.monotonic() - began > 0.5
            with item:
                pass
        assert job.progress().done == 2


def test_a_tracked_loop_postpones_its_current_item(database: str):
    seen: list[int] = []
    loop = headway.track(range(4), job="ads", database=database, progress="none")
    for n in loop:
        seen.append(n)
        if n == 1 and seen.count(1) == 1:
            loop.later(0.2, "quota")
    assert seen == [0, 1, 2, 3, 1]
    with Ledger.open(database) as ledger:
        assert (ledger.job("ads").info().done, ledger.job("ads").info().failures) == (4, 0)


def test_a_tracked_loop_that_ends_while_items_wait_is_resumed(database: str):
    loop = headway.track(range(3), job="ads", database=database, progress="none")
    for n in loop:
        if n == 1:
            loop.later(0.3, "quota", scope="job")
        if n == 2:
            break
    loop.close()
    assert list(headway.track(range(3), job="ads", database=database, progress="none")) in ([1, 2], [2, 1])


def test_later_outside_of_the_loop_is_refused(database: str):
    loop = headway.track(range(3), job="ads", database=database, progress="none")
    with pytest.raises(InvalidInput, match="there is none"):
        loop.later(5)
    with pytest.raises(InvalidInput, match="from 0 to"):
        loop.later(-5)
    loop.close()
