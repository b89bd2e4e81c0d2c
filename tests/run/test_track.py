"""`headway.track`, `headway.amap`, DataFrames and notebooks: the ways in from a script, a loop, a prompt."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.errors import InputChanged, InvalidInput, JobHeld
from headway.ledger import Job, Ledger
from headway.run.display.display import RunSnapshot, open_display
from tests.services.waiting import eventually


@pytest.fixture(name="options")
def _options(tmp_path: Path) -> dict[str, Any]:
    return {"job": "t", "database": f"sqlite:///{tmp_path}/a.db", "progress": "none"}


def job_in(place: Path) -> Job:
    return Ledger.open(f"sqlite:///{place}/a.db", create=False).job("t")


# ---- track ----------------------------------------------------------------------------------------------------------


def test_a_loop_goes_on_with_the_item_that_failed(tmp_path: Path, options: dict[str, Any]):
    seen = []

    def loop() -> None:
        for item in headway.track([3, 2, 1, 0, 5], **options):
            seen.append(item)
            _ = 6 // item

    with pytest.raises(ZeroDivisionError):
        loop()
    assert seen == [3, 2, 1, 0]
    assert job_in(tmp_path).info().done == 3
    assert list(headway.track([3, 2, 1, 0, 5], **options)) == [0, 5]
    assert list(headway.track([3, 2, 1, 0, 5], **options)) == []
    assert job_in(tmp_path).info().finished_at is not None


def test_break_leaves_the_item_it_was_at(options: dict[str, Any]):
    for item in headway.track(range(10), **options):
        if item == 4:
            break
    assert next(headway.track(range(10), **options)) == 4


def test_a_child_that_is_forked_in_the_loop_and_leaves_it_says_and_records_nothing_of_it(tmp_path: Path):
    program = (
        "import os, sys, headway\n"
        "for item in headway.track(range(4), job='t', database='sqlite:///a.db', progress='plain'):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        sys.exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    # From 3.12 on Python itself may say that a process with threads is forked.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "4/4" in done.stderr
    assert job_in(tmp_path).info().done == 4


def test_the_loop_gets_the_items_themselves(tmp_path: Path, options: dict[str, Any]):
    items = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    assert all(given is one for given, one in zip(headway.track(items, **options), items, strict=True))
    with pytest.raises(InvalidInput):
        headway.track([object()], **{**options, "job": "other"})


@dataclass
class Page:
    url: str


@dataclass
class Picture:
    url: str


@pytest.mark.parametrize(
    ("one", "other"),
    [((1, 2), [1, 2]), (Path("a"), "a"), (date(2026, 1, 2), "2026-01-02"), (Page("a"), Picture("a"))],
    ids=["tuple and list", "path and text", "date and text", "two classes"],
)
def test_two_items_of_one_json_form_that_are_not_the_same_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], one: object, other: object
):
    with pytest.raises(InvalidInput, match=f"item 2: .* a {type(other).__name__} and the earlier one a ") as refused:
        headway.track([one, "between", other], **options)
    assert "key=" in (refused.value.hint or "")
    assert not list(tmp_path.iterdir())


def test_items_that_json_tells_apart_are_items_of_their_own(options: dict[str, Any]):
    items = [1, True, "1", 1.0, None, "null", [1], {"1": 1}]
    assert [(type(item), item) for item in headway.track(items, **options)] == [(type(item), item) for item in items]


def test_equal_items_are_each_worked_on_once_in_their_order_also_after_a_crash(options: dict[str, Any]):
    def given() -> list[Any]:
        return [{"at": (1,)}, "x", {"at": [1]}, "x", {"at": (1,)}]  # the three are one to JSON, and all are dicts

    seen = []
    for _ in range(5):
        tracker = headway.track(given(), **options)
        seen.append(next(tracker))
        time.sleep(0.03)
        next(tracker, None)
        tracker.close()
    assert seen == given()
    longer = [*given(), {"at": [1]}]
    assert list(headway.track(longer, accept_changes=True, **options)) == [{"at": [1]}]


def test_changed_items_are_noticed_and_accepted_on_request(options: dict[str, Any]):
    assert next(headway.track([1, 2, 3], **options)) == 1
    with pytest.raises(InputChanged):
        headway.track([9, 1, 2, 3], **options)
    assert list(headway.track([9, 1, 2, 3], accept_changes=True, **options)) == [1, 2, 3, 9]


def test_at_a_prompt_the_same_loop_can_be_started_again_while_a_traceback_keeps_the_first_alive(
    options: dict[str, Any],
):
    first = headway.track(range(5), **options)
    assert [next(first), next(first)] == [0, 1]
    assert list(headway.track(range(5), **options)) == [1, 2, 3, 4]
    assert list(first) == []


LOOP = """
import os, sys, time, headway
for item in headway.track(range(3000), job="t", database="sqlite:///a.db", progress="none"):
    with open("executed", "a") as file:
        file.write(f"{item}\\n")
    if item == int(sys.argv[1]):
        print("there", flush=True)
        time.sleep(600)
"""


def test_killed_in_the_middle_the_same_program_goes_on_and_nothing_is_left_out(tmp_path: Path):
    (tmp_path / "loop.py").write_text(LOOP)
    for stop in ("1500", "-1"):
        run = subprocess.Popen([sys.executable, "loop.py", stop], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        if stop != "-1":
            assert run.stdout.readline() == "there\n"
            with pytest.raises(JobHeld):
                headway.track(range(3000), job="t", database=f"sqlite:///{tmp_path}/a.db", progress="none")
            run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
    executed = [int(line) for line in (tmp_path / "executed").read_text().split()]
    assert set(executed) == set(range(3000))
    repeated = len(executed) - 3000
    assert 1 <= repeated < 1100, "the item it was killed in, and what had not been committed with others"
    assert job_in(tmp_path).info().done == 3000


def test_long_items_are_recorded_at_once(tmp_path: Path, options: dict[str, Any]):
    tracker = headway.track(range(3), **options)
    next(tracker)
    time.sleep(0.03)
    next(tracker)
    assert job_in(tmp_path).info().done == 1
    tracker.close()


# ---- amap -----------------------------------------------------------------------------------------------------------


def test_amap_leaves_the_loop_free(tmp_path: Path, options: dict[str, Any]):
    async def main() -> tuple[headway.Result, int]:
        ticks = 0
        work = asyncio.create_task(headway.amap(slowly, range(4), workers=2, **options))
        while not work.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return await work, ticks

    result, ticks = asyncio.run(main())
    assert (result.done, [found.result for found in result.results()]) == (4, [0, 1, 4, 9])
    assert ticks > 3


def slowly(n: int) -> int:
    time.sleep(0.1)
    return n * n


async def slowly_async(n: int) -> int:
    await asyncio.sleep(0.01)
    return n * n


def test_amap_takes_async_functions_too(options: dict[str, Any]):
    result = asyncio.run(headway.amap(slowly_async, range(4), **options))
    assert [found.result for found in result.results()] == [0, 1, 4, 9]


def test_a_cancelled_amap_finishes_what_runs_and_can_go_on(tmp_path: Path, options: dict[str, Any]):
    def noted(n: int) -> None:
        (tmp_path / f"begun-{n}").touch()
        time.sleep(0.2)

    async def main() -> None:
        work = asyncio.create_task(headway.amap(noted, range(50), workers=1, **options))
        await asyncio.to_thread(eventually, lambda: list(tmp_path.glob("begun-*")), timeout=30)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())
    info = job_in(tmp_path).info()
    assert 1 <= info.done < 50
    assert info.done == len(list(tmp_path.glob("begun-*"))), "what had begun was finished and recorded"
    assert not info.held


# ---- DataFrames -----------------------------------------------------------------------------------------------------


def returned(row: dict[str, Any]) -> dict[str, Any]:
    return row


def test_rows_of_a_dataframe_are_items_and_its_index_is_their_key(options: dict[str, Any]):
    pandas = pytest.importorskip("pandas")
    columns = {"price": [1.5, float("nan")], "n": [1, 2], "at": pandas.to_datetime(["2026-01-02", None])}
    frame = pandas.DataFrame(columns, index=["ab", "cd"])
    done = headway.map(returned, frame, workers=1, **options)
    assert [(found.key, found.result) for found in done.results()] == [
        ("ab", {"at": "2026-01-02T00:00:00", "n": 1, "price": 1.5}),
        ("cd", {"at": None, "n": 2, "price": None}),
    ]
    longer = pandas.concat([pandas.DataFrame({"price": [7.0], "n": [3]}, index=["ef"]), frame])
    assert headway.map(returned, longer, workers=1, **options).kept == 2, (
        "rows are known by their index, wherever they stand"
    )
    with pytest.raises(InvalidInput, match="twice"):
        headway.map(returned, pandas.concat([frame, frame]), workers=1, **options)


def square(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] == 2:
        raise ValueError("two")
    return {"square": row["n"] ** 2, "odd": bool(row["n"] % 2)}


def test_results_are_joined_with_the_frame_they_came_from_whatever_its_index_is(options: dict[str, Any]):
    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2026-01-01", periods=3)
    pairs = pandas.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)])
    for number, index in enumerate(([10, 20, 30], days, pairs, ["x", "y", "z"])):
        frame = pandas.DataFrame({"n": [1, 2, 3]}, index=index)
        result = headway.map(square, frame, **options | {"job": f"j{number}", "retries": 0, "last_pass": False})
        labels = list(frame.index)
        assert [found.key for found in result.results()] == [labels[0], labels[2]]
        assert [letter.key for letter in result.dead_letters()] == [labels[1]]
        joined = frame.join(result.to_frame())
        assert joined["square"].fillna(-1).tolist() == [1, -1, 9], f"index {index}"
        assert joined["odd"].tolist()[0] is True


def test_an_integer_key_stays_an_integer(options: dict[str, Any]):
    items = [{"id": 7, "n": 1}, {"id": 8, "n": 3}, {"id": "nine", "n": 5}]
    result = headway.map(square, items, key="id", **options)
    assert [found.key for found in result.results()] == [7, 8, "nine"]
    assert list(result.to_frame().index) == [7, 8, "nine"]


def test_results_are_a_series_by_position_without_keys(options: dict[str, Any]):
    pytest.importorskip("pandas")
    series = headway.map(abs, [-4, 5], **options).to_series()
    assert (series.to_dict(), series.name) == ({0: 4, 1: 5}, "result")
    assert headway.map(abs, [-4, 5], **options).to_frame().to_dict("list") == {"result": [4, 5]}
    assert headway.map(square, [{"n": 1}], **options | {"job": "d"}).to_series()[0] == {"square": 1, "odd": True}
    assert len(headway.map(abs, [], **options | {"job": "empty"}).to_frame()) == 0


def test_rows_of_a_polars_dataframe_are_items_with_everything_json_has_a_form_for(options: dict[str, Any]):
    polars = pytest.importorskip("polars")
    day, moment = date(2026, 1, 2), datetime(2026, 1, 2, 3, 4)  # noqa: DTZ001 - polars' moments have no zone by default
    frame = polars.DataFrame(
        {
            "sku": ["a", "b"],
            "n": [1, None],
            "price": [1.5, float("nan")],
            "day": [day, None],
            "days": [[day, None], []],
            "more": [{"at": moment, "n": 1}, {"at": None, "n": None}],
            "kind": polars.Series(["x", "y"], dtype=polars.Categorical),
        }
    )
    done = headway.map(returned, frame, key="sku", workers=1, **options)
    assert [(found.key, found.result) for found in done.results()] == [
        ("a", {"sku": "a", "n": 1, "price": 1.5, "day": "2026-01-02", "days": ["2026-01-02", None],
               "more": {"at": "2026-01-02T03:04:00", "n": 1}, "kind": "x"}),
        ("b", {"sku": "b", "n": None, "price": None, "day": None, "days": [], "more": {"at": None, "n": None}, "kind": "y"}),
    ]  # fmt: skip
    assert headway.map(returned, frame.reverse(), key="sku", workers=1, **options).kept == 2
    assert [row["sku"] for row in headway.track(frame, **{**options, "job": "loop"})] == ["a", "b"]


def test_a_frame_that_cannot_be_items_is_refused_with_what_to_do(options: dict[str, Any]):
    polars = pytest.importorskip("polars")
    with pytest.raises(InvalidInput, match="LazyFrame") as refused:
        headway.map(returned, polars.LazyFrame({"a": [1]}), **options)
    assert "collect()" in (refused.value.hint or "")
    with pytest.raises(InvalidInput, match="bytes"):
        headway.map(returned, polars.DataFrame({"a": [b"x"]}), **options)


# ---- notebooks ------------------------------------------------------------------------------------------------------


class Notebook(io.StringIO):
    """A stream as a notebook's kernel has it."""


Notebook.__module__ = "ipykernel.iostream"


def test_in_a_notebook_one_line_is_written_again_and_again():
    stream, now = Notebook(), 0.0
    display = open_display("auto", stream=stream, clock=lambda: now)
    display.begin("Run t: 100 items")
    for done in (10, 20):
        now += 1.0
        display.show(RunSnapshot(100, 0, done, 2, 0, 0, 0))
    display.say("careful")
    display.end(RunSnapshot(100, 0, 100, 0, 0, 1, 0))
    drawn = [part.rstrip() for part in stream.getvalue().split("\r")]
    assert drawn[1] == "Run t: 100 items"
    assert drawn[2].startswith("10.0%   10/100")
    assert drawn[4] == "careful"
    assert drawn[5].startswith("100.0%   100/100")
    assert "\x1b" not in stream.getvalue()


CELLS = [
    "import headway\ndef square(n):\n    print('working on', n)\n    return n * n",
    "result = headway.map(square, range(5), job='t', database='sqlite:///a.db')\n[found.result for found in result.results()]",
    "result = await headway.amap(lambda n: -n, range(5), job='a', database='sqlite:///a.db')\nresult.done",
    "[item for item in headway.track(['x', 'y'], job='l', database='sqlite:///a.db')]",
]


def test_a_notebook_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in notebook.cells
    ]
    assert "[0, 1, 4, 9, 16]" in shown[1]
    assert "working on 3" in shown[1]
    assert "100.0%" in shown[1]
    assert shown[2].rstrip().endswith("5")
    assert "['x', 'y']" in shown[3]
