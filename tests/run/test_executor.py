"""`headway.map(..., executor=E)`: items run in an executor of the user's, with the records of any other run."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.errors import HeadwayError, InvalidInput, Stopping
from headway.ledger import Job, Ledger
from headway.run.pool import executor as executors
from tests.run import executor_functions as functions
from tests.services.waiting import eventually

ROOT = Path(__file__).parents[2]
KINDS = ["process", "thread", "loky", "dask"]
Make = Callable[..., Executor]


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'headway.db'}"


@pytest.fixture(scope="module")
def dask_client() -> Iterator[Any]:
    """A real cluster on this machine: a scheduler and two worker processes."""
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1", silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
    # A thread of Dask outlives all that. Later tests of this process must be able to fork in peace.
    utils = distributed.utils
    utils._offload_executor.shutdown()
    utils._offload_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="Dask-Offload")


@pytest.fixture(scope="module")
def loky_executor() -> Iterator[Any]:
    loky = pytest.importorskip("loky")
    executor = loky.ProcessPoolExecutor(2, timeout=60)
    yield executor
    executor.shutdown()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """`make(kind, size)`: an executor. Those that take long to start are shared, unless the test breaks it."""
    made: list[Any] = []

    def make(kind: str, size: int = 2, *, alone: bool = False) -> Any:
        if kind == "dask":
            return request.getfixturevalue("dask_client").get_executor()
        if kind == "loky" and not alone:
            return request.getfixturevalue("loky_executor")
        if kind == "loky":
            loky = pytest.importorskip("loky")
            made.append(loky.ProcessPoolExecutor(size, timeout=60))
        elif kind == "process":
            made.append(ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("fork")))
        else:
            made.append(ThreadPoolExecutor(size))
        return made[-1]

    yield make
    for each in made:
        each.shutdown(wait=False)


def mapped(function: Any, items: Any, executor: Any, database: str, **options: Any) -> headway.Result:
    options = {"job": "ads", "progress": "none", "retry_delay": 0.01, **options}
    return headway.map(function, items, database=database, executor=executor, **options)


def executed(place: Path) -> Counter[int]:
    return Counter(map(int, (place / "executed").read_text().split()))


# ---- the same records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_items_are_recorded_retried_and_kept_as_by_any_other_run(kind: str, make: Make, database: str):
    executor = make(kind)
    result = mapped(functions.fussy, range(20), executor, database, retries=1, last_pass=False)
    assert (result.outcome, result.total, result.done, result.dead, result.failures) == ("finished", 20, 10, 10, 20)
    assert [(found.index, found.result) for found in result.results()] == [(n, {"n": n}) for n in range(0, 20, 2)]
    assert [(cause.type, cause.dead) for cause in result.causes] == [("ValueError", 10)]
    letters = list(result.dead_letters())
    assert [letter.idx for letter in letters] == list(range(1, 20, 2))
    with Ledger.open(database) as ledger:
        job = ledger.job("ads")
        history = job.history(3)
        assert [run.outcome for run in history] == ["failed", "failed"]
        assert history[0].printed == "about to refuse 3\n"
        assert "executor" in (history[0].worker or "")
        assert job.retry_dead() == 10
    again = mapped(functions.double, range(20), executor, database, accept_changes=True)
    assert (again.done, again.kept, again.dead) == (20, 10, 0)
    assert executor.submit(functions.double, 21).result(60) == 42, "the executor is as usable as before"


@pytest.mark.parametrize("kind", KINDS)
def test_many_short_items_go_in_batches(kind: str, make: Make, database: str):
    executor: Any = make(kind)
    calls: list[Any] = []
    submit = executor.submit

    class Counting:
        _max_workers = 2

        def submit(self, *call: Any) -> Any:
            calls.append(call)
            return submit(*call)

    result = mapped(functions.double, range(1500), Counting(), database)
    assert result.done == 1500
    assert sum(found.result for found in result.results()) == sum(range(0, 3000, 2))
    assert len(calls) < 300


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_results_are_encoded_where_they_were_made(kind: str, make: Make, database: str, tmp_path: Path):
    result = mapped(
        functions.imaginary, range(3), make(kind), database,
        encode=functions.as_text, decode=complex, output=tmp_path / "out.jsonl",
    )  # fmt: skip
    assert [found.result for found in result.results()] == [0j, 1j, 2j]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert {line["index"]: line["result"] for line in lines} == {0: "0j", 1: "1j", 2: "2j"}


@pytest.mark.parametrize("kind", ["process", "loky"])
def test_what_cannot_be_sent_back_costs_nothing_but_itself(kind: str, make: Make, database: str):
    result = mapped(functions.unsendable, range(5), make(kind), database, retries=0, last_pass=False)
    assert (result.done, result.dead) == (4, 1)
    assert [found.index for found in result.results()] == [3, 4]
    assert [cause.type for cause in result.causes] == ["UnsendableError"]


def test_an_executor_that_runs_everything_inside_submit_will_do(database: str):
    class Eager:
        def submit(self, function: Any, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(function(*arguments))
            return future

    assert mapped(functions.double, range(50), Eager(), database, workers=1).done == 50


def test_a_batch_that_takes_long_gives_back_what_it_has_not_begun(
    make: Make, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from headway.run.worker import batch

    def work(n: int) -> None:
        if n >= 300:
            functions.noted({"place": str(tmp_path), "n": n})

    monkeypatch.setattr(batch, "SPELL_SECONDS", 0.0)
    ends: list[headway.Result] = []
    run = threading.Thread(target=lambda: ends.append(mapped(work, range(303), make("thread", 1), database, workers=1)))
    run.start()
    with Ledger.open(database) as ledger:
        eventually((tmp_path / "begun-300").exists, timeout=60)
        (tmp_path / "free-300").touch()
        eventually(lambda: [each.outcome for each in ledger.job("ads").history(300)] == ["done"], timeout=60)
        assert ledger.job("ads").info().done < 303, "it was recorded although the next one runs"
        (tmp_path / "free").touch()
        run.join(60)
    assert ends[0].done == 303
    assert set(executed(tmp_path).values()) == {1}


def test_it_can_be_awaited(make: Make, database: str):
    import asyncio

    result = asyncio.run(
        headway.amap(functions.double, range(5), job="ads", database=database, executor=make("thread"), progress="none")
    )
    assert result.done == 5


def test_threads_share_what_a_closure_has_and_the_streams_are_put_back(make: Make, database: str):
    seen: list[int] = []
    before = sys.stdout, sys.stderr

    def work(n: int) -> None:
        seen.append(n)
        sys.stdout.write(f"{n}\n")

    result = mapped(work, range(10), make("thread"), database, keep_output="all")
    assert sorted(seen) == list(range(10))
    assert (sys.stdout, sys.stderr) == before
    with Ledger.open(result.database) as ledger:
        assert [ledger.job("ads").history(n)[0].printed for n in range(3)] == ["0\n", "1\n", "2\n"]


def test_a_child_that_comes_back_from_the_function_does_not_go_on_with_the_batch(make: Make, database: str):
    assert mapped(functions.forking, range(5), make("process"), database).done == 5


def test_max_failures_ends_a_run_in_an_executor(make: Make, database: str):
    result = mapped(
        functions.fussy, range(1, 400, 2), make("thread", 1), database,
        retries=0, max_failures=5, last_pass=False, workers=1,
    )  # fmt: skip
    assert (result.outcome, result.dead) == ("stopped", 5)


def test_nothing_is_asked_of_the_executor_when_nothing_is_left(make: Make, database: str):
    mapped(functions.double, range(3), make("thread"), database)

    class Refusing:
        def submit(self, *_: Any) -> Any:
            raise AssertionError("there is nothing to do")

    assert mapped(functions.double, range(3), Refusing(), database).kept == 3


def test_nothing_of_a_run_is_left_in_the_directory_for_temporary_files(
    make: Make, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import tempfile

    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    mapped(functions.double, range(3), make("process"), database)
    assert list(place.iterdir()) == []


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["process", "thread", "dask"])
def test_an_item_that_takes_too_long_is_recorded_as_timed_out_and_the_others_go_on(
    kind: str, make: Make, database: str, capsys: pytest.CaptureFixture[str]
):
    options: dict[str, Any] = {"timeout": 0.3, "retries": 0, "last_pass": False, "progress": "plain"}
    result = mapped(functions.endless, range(4), make(kind), database, **options)
    assert (result.done, result.dead) == (3, 1)
    assert [cause.type for cause in result.causes] == ["TimedOut"]
    with Ledger.open(database) as ledger:
        assert [run.outcome for run in ledger.job("ads").history(1)] == ["timeout"]
    assert ("runs items in threads" in capsys.readouterr().err) == (kind != "process")


def test_an_async_function_is_awaited_there_and_cancelled_when_it_takes_too_long(make: Make, database: str):
    result = mapped(functions.gentle, range(3), make("process"), database, timeout=0.2, retries=0, last_pass=False)
    assert (result.done, result.dead) == (2, 1)
    assert [cause.type for cause in result.causes] == ["TimedOut"]


def test_an_async_function_that_blocks_its_loop_again_and_again_has_no_more_time_than_others(make: Make, database: str):
    options: dict[str, Any] = {"timeout": 2.0, "retries": 0, "last_pass": False}
    result = mapped(functions.blocking, [1], make("thread"), database, **options)
    assert (result.done, result.dead) == (0, 1)
    with Ledger.open(database) as ledger:
        assert [run.outcome for run in ledger.job("ads").history(0)] == ["timeout"]


# ---- what is no executor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "options", "said"),
    [
        (object(), {}, "is a object, which has no submit"),
        (ThreadPoolExecutor, {}, "is the class ThreadPoolExecutor"),
        (ThreadPoolExecutor(1), {"mode": "thread"}, "exclude each other"),
        (ThreadPoolExecutor(1), {"workers": -1}, "workers must be a whole number"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    executor: Any, options: dict[str, Any], said: str, database: str, tmp_path: Path
):
    with pytest.raises(InvalidInput, match=said):
        mapped(functions.double, [1], executor, database, **options)
    assert not (tmp_path / "headway.db").exists()


def test_an_executor_that_gives_no_futures_is_refused(database: str):
    class Wrong:
        def submit(self, function: Any, *arguments: Any) -> int:
            return 7

    with pytest.raises(InvalidInput, match="returned a int, which is not a future"):
        mapped(functions.double, [1], Wrong(), database)


def test_an_executor_whose_futures_give_something_else_is_refused_and_nothing_is_recorded(database: str):
    class Wrong:
        def submit(self, function: Any, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(function(*arguments) if function.__name__ == "probe" else {"ticket": 99, "done": []})
            return future

    with pytest.raises(HeadwayError, match="returned a dict, which is not the result of the submitted call"):
        mapped(functions.double, [1], Wrong(), database)
    with Ledger.open(database) as ledger:
        assert ledger.job("ads").info().done == 0


def test_two_runs_at_once_share_an_executor(make: Make, tmp_path: Path):
    executor = make("thread", 4)
    ends: list[headway.Result] = []

    def run(job: str) -> None:
        ends.append(
            mapped(functions.double, range(300), executor, f"sqlite:///{tmp_path}/{job}.db", job=job, workers=2)
        )

    runs = [threading.Thread(target=run, args=(job,)) for job in ("one", "two")]
    for each in runs:
        each.start()
    for each in runs:
        each.join(60)
    assert [(end.done, end.dead) for end in ends] == [(300, 0)] * 2


@pytest.mark.parametrize("what", ["function", "encode"])
def test_a_function_that_cannot_be_sent_is_an_error_before_anything_runs(what: str, make: Make, database: str):
    executor = make("process")
    ran: list[int] = []
    options = {"encode": lambda value: value} if what == "encode" else {}
    function: Any = functions.double if what == "encode" else lambda n: ran.append(n)  # noqa: PLW0108 - a method of a list could be sent
    with pytest.raises(InvalidInput, match=r"cannot be sent to the executor: (PicklingError|AttributeError)"):
        mapped(function, [1, 2], executor, database, **options)
    with Ledger.open(database) as ledger:
        info = ledger.job("ads").info()
        assert (info.total, info.done, info.failures) == (2, 0, 0)
    assert executor.submit(functions.double, 21).result(60) == 42


@pytest.mark.parametrize("kind", ["loky", "dask"])
def test_an_executor_that_sends_functions_by_value_takes_closures(kind: str, make: Make, database: str):
    by = 3
    result = mapped(lambda n: by * n, range(4), make(kind), database)
    assert [found.result for found in result.results()] == [0, 3, 6, 9]


# ---- executors that end ----------------------------------------------------------------------------------------------


def test_an_executor_that_was_shut_down_is_an_error_and_another_one_goes_on(make: Make, database: str):
    closed = make("thread")
    closed.shutdown()
    with pytest.raises(HeadwayError, match="takes no more work: RuntimeError: cannot schedule new futures") as caught:
        mapped(functions.double, range(5), closed, database)
    assert "create a new executor" in (caught.value.hint or "")
    assert mapped(functions.double, range(5), make("thread"), database).done == 5


def test_what_ran_when_the_executor_was_shut_down_is_recorded(
    make: Make, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    executor = make("thread")
    refused = threading.Event()

    class Telling:
        def submit(self, *call: Any) -> Any:
            try:
                return executor.submit(*call)
            except RuntimeError:
                refused.set()
                raise

    items = [{"place": str(tmp_path), "n": n} for n in range(6)]

    def close() -> None:
        eventually(lambda: (tmp_path / "begun-0").exists() and (tmp_path / "begun-1").exists(), timeout=60)
        executor.shutdown(wait=False)
        (tmp_path / "free-0").touch()
        refused.wait(60)
        with Ledger.open(database) as ledger:
            ledger.job("ads").pause()
        eventually(lambda: "Paused by" in capsys.readouterr().err, timeout=60)  # it goes on, for item 1 still runs
        (tmp_path / "free").touch()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(HeadwayError, match="takes no more work"):
        mapped(functions.noted, items, Telling(), database, workers=2, progress="plain")
    closing.join()
    with Ledger.open(database) as ledger:
        assert (ledger.job("ads").info().done, ledger.job("ads").info().failures) == (2, 0)
    assert mapped(functions.noted, items, make("thread"), database).done == 6
    assert executed(tmp_path) == Counter(range(6))


def test_an_executor_that_cancels_everything_ends_the_run(database: str):
    class Cancelling:
        def submit(self, function: Any, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if function.__name__ == "probe":
                future.set_result(function(*arguments))
            else:
                future.cancel()
                future.set_running_or_notify_cancel()
            return future

    with pytest.raises(HeadwayError, match="gave back 5 batches in a row: CancelledError"):
        mapped(functions.double, range(3), Cancelling(), database, workers=1)
    with Ledger.open(database) as ledger:
        assert (ledger.job("ads").info().done, ledger.job("ads").info().failures) == (0, 0)


@pytest.mark.parametrize("kind", ["process", "loky"])
def test_the_item_that_kills_a_process_is_charged_and_the_same_call_with_a_new_executor_goes_on(
    kind: str, make: Make, database: str, tmp_path: Path
):
    items = [{"place": str(tmp_path), "n": n, "killer": 0} for n in range(6)]
    options: dict[str, Any] = {"retries": 1, "last_pass": False, "retry_delay": 0.0}
    for attempt in (1, 2):
        with pytest.raises(HeadwayError, match=r"The executor broke: .*Charged for it: item 0, which ran there"):
            mapped(functions.killing, items, make(kind, 1, alone=True), database, **options)
        with Ledger.open(database) as ledger:
            assert ledger.job("ads").info().failures == attempt, "nobody else was charged"
            assert [run.outcome for run in ledger.job("ads").history(0)] == ["failed"] * attempt
    last = mapped(functions.killing, items, make(kind, 1, alone=True), database, **options)
    assert (last.done, last.dead) == (5, 1)
    assert [cause.type for cause in last.causes] == ["WorkerDied"]
    assert executed(tmp_path) == Counter({0: 2})


def test_an_item_written_down_as_running_when_the_executor_breaks_is_not_charged(
    make: Make, database: str, tmp_path: Path
):
    items = [{"place": str(tmp_path), "n": n} for n in range(2)]

    def kill() -> None:
        with Ledger.open(database) as ledger:
            noted = "SELECT count(*) FROM progress WHERE lease_until IS NOT NULL"
            eventually(lambda: ledger.database.one(noted) == (2,), timeout=60)
        eventually((tmp_path / "begun-1").exists, timeout=60)
        pid = eventually((tmp_path / "begun-1").read_text, timeout=60)
        os.kill(int(pid), signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(HeadwayError, match="item 1, which ran there"):
        mapped(functions.noted, items, make("process"), database)
    killing.join()
    (tmp_path / "free").touch()
    assert mapped(functions.noted, items, make("process"), database).done == 2
    with Ledger.open(database) as ledger:
        job = ledger.job("ads")
        assert [run.outcome for run in job.history(0)] == ["done"]
        assert [run.outcome for run in job.history(1)] == ["failed", "done"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_worker_ended_from_outside_costs_its_item_one_attempt_and_the_others_nothing(
    number: signal.Signals, make: Make, database: str, tmp_path: Path
):
    """SIGTERM too: workers that were forked while the run had its handlers obey as if it had none."""
    items = [{"place": str(tmp_path), "n": n} for n in range(4)]

    def kill() -> None:
        eventually(lambda: all((tmp_path / f"begun-{n}").exists() for n in (0, 1)), timeout=60)
        eventually(lambda: (tmp_path / "begun-1").read_text() != "", timeout=60)
        os.kill(int((tmp_path / "begun-1").read_text()), number)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(HeadwayError, match="item 1, which ran there"):
        mapped(functions.noted, items, make("process"), database)
    killing.join()
    (tmp_path / "free").touch()
    result = mapped(functions.noted, items, make("process"), database)
    assert (result.done, result.dead) == (4, 0)
    with Ledger.open(database) as ledger:
        job = ledger.job("ads")
        assert [run.outcome for run in job.history(0)] == ["done"], "what ran beside it is not charged"
        assert [run.outcome for run in job.history(1)] == ["failed", "done"]


def test_a_cluster_that_loses_a_worker_goes_on_and_the_item_is_charged(
    make: Make, database: str, tmp_path: Path, dask_client: Any
):
    items = [{"place": str(tmp_path), "n": n, "killer": 3} for n in range(6)]
    result = mapped(functions.killing, items, make("dask"), database, retries=0, last_pass=False)
    assert (result.done, result.dead) == (5, 1)
    assert [(cause.type, cause.dead) for cause in result.causes] == [("WorkerDied", 1)]
    eventually(lambda: len(dask_client.scheduler_info()["workers"]) == 2, timeout=60)


# ---- ended in the middle ---------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from concurrent.futures import ProcessPoolExecutor
import headway
from tests.run import executor_functions as functions

if __name__ == "__main__":
    place = sys.argv[1]
    items = [{"place": place, "n": n} for n in range(6)]
    executor = ProcessPoolExecutor(2)  # a third would have none of our items, and Ctrl-C would end it
    list(executor.map(functions.double, range(3)))
    def work():
        return headway.map(functions.noted, items, job="ads", database=f"sqlite:///{place}/headway.db",
                           executor=executor, workers=2, progress="plain", timeout=float(sys.argv[2]) or None).done
    try:
        print(work(), flush=True)
    except KeyboardInterrupt:
        print("interrupted, the executor says", executor.submit(functions.double, 21).result(), flush=True)
        print(work(), flush=True)
"""


def start(place: Path, timeout: float = 0.0) -> subprocess.Popen[str]:
    (place / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, place / "script.py", place, str(timeout)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def two_have_begun(place: Path) -> None:
    eventually(lambda: len(list(place.glob("begun-*"))) == 2, timeout=60)


def test_ctrl_c_at_a_terminal_records_what_ran_and_leaves_the_executor_usable(tmp_path: Path):
    run = start(tmp_path)
    two_have_begun(tmp_path)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the executor's processes too
    assert run.stderr is not None
    for line in run.stderr:
        if "Stopping: finishing 2 items" in line:
            break
    (tmp_path / "free").touch()
    out, err = run.communicate(timeout=60)
    assert out.splitlines() == ["interrupted, the executor says 42", "6"], err
    assert executed(tmp_path) == Counter(range(6)), "what ran was finished, and nothing ran twice"


def test_a_second_ctrl_c_abandons_what_runs(tmp_path: Path):
    run = start(tmp_path)
    two_have_begun(tmp_path)
    os.kill(run.pid, signal.SIGINT)
    assert run.stderr is not None
    for line in run.stderr:
        if "Stopping" in line:
            break
    os.kill(run.pid, signal.SIGINT)
    for line in run.stderr:
        if "2 items may go on in the executor" in line:
            break
    (tmp_path / "free").touch()
    out, err = run.communicate(timeout=60)
    assert out.splitlines() == ["interrupted, the executor says 42", "6"], err
    assert executed(tmp_path)[0] == 2


def test_a_killed_parent_goes_on_by_the_same_call(tmp_path: Path):
    run = start(tmp_path)
    two_have_begun(tmp_path)
    (tmp_path / "free-0").touch()
    (tmp_path / "free-1").touch()
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        job = ledger.job("ads")
        eventually(lambda: job.info().done == 2, timeout=60)
        eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 4, timeout=60)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # workers of a killed ProcessPoolExecutor stay: that is its way
        run.communicate()
        (tmp_path / "free").touch()
        again = start(tmp_path)
        out, err = again.communicate(timeout=60)
        assert out.splitlines() == ["6"], err
        assert (job.info().done, job.info().dead) == (6, 0)
    assert executed(tmp_path)[0] == executed(tmp_path)[1] == 1, "what was recorded did not run again"


def test_an_item_is_not_charged_for_the_time_in_which_the_whole_run_stood_still(tmp_path: Path):
    """As when a container is paused: all its processes stand still, and the clock does not."""
    run = start(tmp_path, timeout=5.0)
    two_have_begun(tmp_path)
    try:
        os.killpg(run.pid, signal.SIGSTOP)
        time.sleep(5.5)
    finally:
        os.killpg(run.pid, signal.SIGCONT)
    (tmp_path / "free").touch()
    out, err = run.communicate(timeout=60)
    assert out.splitlines() == ["6"], err
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        assert [each.outcome for idx in (0, 1) for each in ledger.job("ads").history(idx)] == ["done", "done"]


class Silent:
    """Takes everything and begins nothing."""

    def submit(self, *_: Any) -> Future[Any]:
        return Future()


def test_an_executor_that_begins_nothing_is_said_and_can_be_left(
    database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(executors, "SILENT_SECONDS", 0.2)

    def stop() -> None:
        eventually(lambda: "has started nothing" in capsys.readouterr().err, timeout=60)
        with Ledger.open(database) as ledger:
            ledger.job("ads").stop(now=True)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(Stopping):
        mapped(functions.double, range(3), Silent(), database, progress="plain")
    stopping.join()


# ---- control ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def background(
    database: str, tmp_path: Path, make: Make
) -> Iterator[Callable[..., tuple[Job, list[Any], threading.Thread]]]:
    """A run of twelve items in an executor of two threads, in a thread of its own, with two items begun."""
    threads: list[threading.Thread] = []
    with Ledger.open(database) as ledger:

        def begin(**options: Any) -> tuple[Job, list[Any], threading.Thread]:
            ends: list[Any] = []
            items = [{"place": str(tmp_path), "n": n} for n in range(12)]

            def run() -> None:
                try:
                    ends.append(mapped(functions.noted, items, make("thread", 4), database, workers=2, **options))
                except HeadwayError as error:
                    ends.append(error)

            threads.append(threading.Thread(target=run))
            threads[-1].start()
            eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2, timeout=60)
            return ledger.job("ads"), ends, threads[-1]

        yield begin
        (tmp_path / "free").touch()
        for thread in threads:
            thread.join(60)


def test_a_run_in_an_executor_is_paused_scaled_and_resumed(
    background: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job, ends, thread = background(progress="plain")

    def begun() -> int:
        return len(list(tmp_path.glob("begun-*")))

    job.scale(4)
    eventually(lambda: begun() == 4, timeout=60)
    job.pause(actor="alice")
    eventually(lambda: "Paused by alice: finishing 4 items" in capsys.readouterr().err, timeout=60)
    for n in range(4):
        (tmp_path / f"free-{n}").touch()
    eventually(lambda: job.info().done == 4, timeout=60)
    assert begun() == 4, "nothing is begun by a paused run"
    (tmp_path / "free").touch()
    job.resume(actor="bob")
    thread.join(60)
    assert ends[0].done == 12


def test_a_run_in_an_executor_is_stopped_from_elsewhere_and_goes_on_later(
    background: Any, tmp_path: Path, make: Make, database: str, capsys: pytest.CaptureFixture[str]
):
    job, ends, thread = background(progress="plain")
    job.stop(actor="alice")
    eventually(lambda: "Stopping, as alice asked: finishing 2 items" in capsys.readouterr().err, timeout=60)
    (tmp_path / "free-0").touch()
    (tmp_path / "free-1").touch()
    thread.join(60)
    assert isinstance(ends[0], Stopping)
    assert (job.info().done, job.info().failures) == (2, 0)
    (tmp_path / "free").touch()
    items = [{"place": str(tmp_path), "n": n} for n in range(12)]
    assert mapped(functions.noted, items, make("thread"), database).done == 12
    assert set(executed(tmp_path).values()) == {1}
