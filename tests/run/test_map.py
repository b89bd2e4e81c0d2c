"""`headway.map` and `headway.open_job`: the same from a program."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.config import Config
from headway.errors import InputChanged, InvalidInput, ItemsFailed, JobHeld, NotFound, StaleClaim
from headway.events import Event
from headway.ledger import Job, Ledger
from headway.run import Settings
from headway.run.function import default_job, earlier_default_job, source_form
from headway.run.items import GivenItems
from headway.run.session import RunRequest, Session
from tests.services.waiting import eventually

PRODUCTS = [{"n": n} for n in range(30)]


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'headway.db'}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def note(log: Path, n: int) -> None:
    with log.open("a") as file:
        file.write(f"{n}\n")


def executed(log: Path) -> Counter[int]:
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()


def jobs_of(database: str) -> list[str]:
    if not Path(database.removeprefix("sqlite:///")).exists():
        return []
    with Ledger.open(database) as ledger:
        return [info.id for info in ledger.jobs()]


# ---- map ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_closure_is_mapped_over_items_and_the_result_counts(database: str, log: Path, mode: str):
    result = headway.map(
        lambda item: note(log, item["n"]), PRODUCTS, job="ads", database=database, mode=mode, workers=2, progress="none"
    )
    assert (result.total, result.done, result.dead, result.kept, result.outcome) == (30, 30, 0, 0, "finished")
    assert executed(log) == Counter(range(30))


def test_an_async_function_is_mapped_concurrently(database: str):
    import asyncio

    inside = 0
    together = asyncio.Event()

    async def meet(item: dict[str, int]) -> None:
        nonlocal inside
        inside += 1
        if inside == len(PRODUCTS):
            together.set()
        await together.wait()  # one after the other, the first would wait for ever

    options: dict[str, Any] = {"timeout": 60, "retries": 0, "last_pass": False}
    result = headway.map(meet, PRODUCTS, job="ads", database=database, workers=30, progress="none", **options)
    assert result.done == 30


def test_called_again_it_does_only_what_is_left(database: str, log: Path):
    def work(item: dict[str, int]) -> None:
        if item["n"] >= 20 and not log.with_name("second").exists():
            raise RuntimeError("not yet")
        note(log, item["n"])

    options: dict[str, Any] = {"job": "ads", "database": database, "retries": 0, "last_pass": False, "progress": "none"}
    first = headway.map(work, PRODUCTS, **options)
    assert (first.done, first.dead, first.causes[0].dead) == (20, 10, 10)
    assert sorted(letter.idx for letter in first.dead_letters()) == list(range(20, 30))
    log.with_name("second").touch()
    with Ledger.open(database) as ledger:
        assert ledger.job("ads").retry_dead() == 10
    second = headway.map(work, PRODUCTS, **options)
    assert (second.done, second.kept, second.dead) == (30, 20, 0)
    assert executed(log) == Counter(range(30))


def test_on_complete_is_told_once_per_completion_with_one_event_id(database: str):
    told: list[Event] = []
    for _ in range(2):
        headway.map(abs, [1, -2], job="ads", database=database, progress="none", on_complete=told.append)
    assert [(event.type, event.job, event.data["succeeded"]) for event in told] == [("job.completed", "ads", 2)]


def test_changed_items_are_refused_unless_accepted(database: str):
    headway.map(abs, [1, 2, 3], job="ads", database=database, progress="none")
    with pytest.raises(InputChanged, match="1 changed"):
        headway.map(abs, [1, 5, 3], job="ads", database=database, progress="none")
    result = headway.map(abs, [1, 5, 3], job="ads", database=database, progress="none", accept_changes=True)
    assert (result.total, result.done, result.kept) == (3, 3, 2)


def test_results_go_to_a_file(database: str, tmp_path: Path):
    headway.map(abs, [-3, 4], job="ads", database=database, output=tmp_path / "out.jsonl", progress="none", workers=1)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert {line["index"]: line["result"] for line in lines} == {0: 3, 1: 4}


def test_numbers_of_numpy_are_the_numbers_they_are(database: str):
    numpy = pytest.importorskip("numpy")
    items = [*numpy.arange(2), numpy.float32(0.5), numpy.bool_(True), {"n": numpy.int16(7)}, [numpy.int64(8)]]
    result = headway.map(lambda item: [item, str(type(item))], items, job="n", database=database, progress="none")
    expected = [0, 1, 0.5, True, {"n": 7}, [8]]
    assert [found.result for found in result.results()] == [[item, str(type(item))] for item in expected]
    assert headway.map(abs, numpy.arange(3), job="m", database=database, progress="none").done == 3
    assert headway.map(abs, range(3), job="m", database=database, progress="none").kept == 3  # the same items


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("item", "hint"),
    [
        (Point(1), r"dataclasses.asdict\(item\).*Point\(\*\*item\)"),
        ({"at": [Point(1)]}, "dataclasses.asdict"),
        (Path("a"), r"str\(item\).*Path\(item\)"),
        (datetime(2026, 1, 1, tzinfo=UTC), "Use dicts, lists, strings and numbers"),
    ],
)
def test_an_object_is_not_made_something_else_behind_the_functions_back(database: str, item: object, hint: str):
    with pytest.raises(InvalidInput, match="item 0: An item cannot be stored as JSON: it contains a") as refused:
        headway.map(abs, [item], job="ads", database=database, progress="none")
    assert re.search(hint, refused.value.hint or "")


def test_models_of_pydantic_and_arrays_of_numpy_are_refused_with_what_to_give_instead(database: str):
    pydantic, numpy = pytest.importorskip("pydantic"), pytest.importorskip("numpy")
    model = pydantic.create_model("Page", number=(int, ...))
    for item, hint in ((model(number=1), 'model_dump(mode="json")'), (numpy.zeros(2), "item.tolist()")):
        with pytest.raises(InvalidInput) as refused:
            headway.map(abs, [item], job="ads", database=database, progress="none")
        assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("function", "items", "options", "said"),
    [
        (abs, [object()], {}, "item 0: An item cannot be stored as JSON: it contains a object"),
        (abs, "items.txt", {}, "must be a list, not a string"),
        ("no function", [1], {}, "is not a function"),
        (lambda: None, [1], {}, "cannot be called with one item"),
        (abs, {"a": 1}, {}, "items is a dict: it could mean its keys, its values or both"),
        (abs, None, {}, "items must be a list or another iterable"),
        (abs, [1], {"workers": -1}, r"workers must be a whole number of at least 0 \(got -1\)"),
        (abs, [1], {"workers": "four"}, "workers must be"),
        (abs, [1], {"mode": "banana"}, r"mode must be one of process, thread, async \(got 'banana'\)"),
        (abs, [1], {"start": "later"}, "start must be one of auto, fork, spawn"),
        (abs, [1], {"timeout": 0}, "timeout must be a number above 0"),
        (abs, [1], {"rate": "fast"}, r"rate must be a number above 0 \(got 'fast'\)"),
        (abs, [1], {"rate": [5]}, "rate must be a single value"),
        (abs, [1], {"job": "a/b"}, "cannot be a job id"),
        (abs, [1], {"retries": -1}, "retries must be a whole number of at least 0"),
        (abs, [1], {"retries": True}, "retries must be a whole number"),
        (abs, [1], {"retry_delay": -1}, "retry_delay must be a number from 0"),
        (abs, [1], {"max_failures": 0}, "max_failures must be"),
        (abs, [1], {"payload_limit": 0}, "payload_limit must be"),
        (abs, [1], {"progress": "loud"}, "progress must be one of"),
        (abs, [1], {"keep_output": "some"}, "keep_output must be failed, all or none"),
        (abs, [1], {"key": 5}, "key must be the name of a field"),
        (abs, [1], {"fresh": "no"}, r"fresh must be True or False \(got 'no'\)"),
        (abs, [1], {"results": None}, "results must be True or False"),
        (abs, [1], {"output": 5}, "output must be the path of a file"),
        (abs, [1], {"on_complete": "print"}, "on_complete must be a function or None"),
        (abs, [1], {"encode": "json"}, "encode must be a function or None"),
        (abs, [{"a": 1}], {"key": "b"}, "no usable key"),
        (abs, ["x" * 300_000], {}, "at most 262,144"),
    ],
)
def test_bad_arguments_are_one_clear_error(
    database: str, function: object, items: list[object], options: dict[str, Any], said: str
):
    with pytest.raises(InvalidInput, match=said):
        headway.map(function, items, **{"job": "ads", "database": database, "progress": "none"} | options)  # type: ignore[arg-type]
    assert not jobs_of(database), "something was written"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"items": {"a": 1}}, "items is a dict"),
        ({"items": [1], "retries": "many"}, "retries must be"),
        ({"items": [1], "retry_delay": -1}, "retry_delay must be"),
        ({"items": [1], "fresh": 1}, "fresh must be True or False"),
        ({"items": [1], "key": ""}, "key must be the name"),
        ({"job": 5}, "cannot be a job id"),
    ],
)
def test_bad_arguments_of_open_job_are_one_clear_error(database: str, options: dict[str, Any], said: str):
    with pytest.raises(InvalidInput, match=said):
        headway.open_job(**{"job": "ads", "database": database} | options)
    assert not jobs_of(database), "something was written"


@pytest.mark.parametrize(
    ("items", "options", "said"),
    [
        ([1], {"progress": "loud"}, "progress must be one of"),
        ([1], {"accept_changes": "yes"}, "accept_changes must be True or False"),
        ([1], {"key": 5}, "key must be the name"),
        (5, {}, "items must be a list or another iterable"),
        ([1], {"job": "a/b"}, "cannot be a job id"),
    ],
)
def test_bad_arguments_of_track_are_one_clear_error(database: str, items: Any, options: dict[str, Any], said: str):
    with pytest.raises(InvalidInput, match=said):
        headway.track(items, **{"job": "ads", "database": database} | options)
    assert not jobs_of(database), "something was written"


def test_a_loop_over_a_dict_is_tracked_by_its_keys(database: str):
    assert list(headway.track({"a": 1, "b": 2}, job="ads", database=database, progress="none")) == ["a", "b"]


def test_an_item_that_is_no_json_is_one_error_with_its_hint(tmp_path: Path):
    """What a person reads who gives paths: one traceback, and what to do below it."""
    code = "import headway, pathlib; headway.map(len, [pathlib.Path('a')], job='x', progress='none')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr.count("Traceback") == 1
    *_, error, hint = done.stderr.strip().splitlines()
    assert error == "headway.errors.InvalidInput: item 0: An item cannot be stored as JSON: it contains a PosixPath."
    assert hint == "Hint: Give str(item), and let the function rebuild it: Path(item)"


def test_a_hint_names_arguments_not_options(database: str):
    headway.map(abs, [1, 2], job="ads", database=database, progress="none", workers=1)
    with pytest.raises(InputChanged) as refused:
        headway.map(abs, [1, 3], job="ads", database=database, progress="none", workers=1)
    assert refused.value.hint == (
        "If that is intended, run again with accept_changes=True, or start over with fresh=True."
    )


def test_dead_items_raise_if_asked_for_and_the_error_has_the_result(database: str):
    def fails(n: int) -> int:
        if n > 1:
            raise ValueError("too large")
        return n

    options: dict[str, Any] = {"database": database, "progress": "none", "retries": 0, "last_pass": False, "workers": 1}
    with pytest.raises(ItemsFailed) as failed:
        headway.map(fails, [1, 2, 3], job="ads", raise_on_dead=True, **options)
    assert str(failed.value) == "2 of 3 items of job ads failed for good: 2 x ValueError: too large."
    assert failed.value.hint.startswith("See them: headway dead show ads --database ")
    assert (failed.value.exit_code, failed.value.result.done) == (3, 1)
    assert headway.map(fails, [1], job="fine", raise_on_dead=True, **options).dead == 0


def test_the_text_of_a_result_says_what_failed(database: str):
    def fails(n: int) -> None:
        raise [ValueError, LookupError, OSError, TypeError][n % 4]("no")

    options: dict[str, Any] = {"database": database, "progress": "none", "retries": 0, "last_pass": False, "workers": 1}
    result = headway.map(fails, range(5), job="ads", **options)
    assert repr(result) == (
        "<Result of job ads: finished, 0 of 5 done, 5 dead (2 x ValueError: no; 1 x LookupError: no; 1 x OSError: no; "
        "1 more cause)>"
    )
    assert (
        repr(headway.map(abs, [1], job="fine", **options)) == "<Result of job fine: finished, 1 of 1 done, none dead>"
    )


def test_an_empty_list_is_finished_at_once(database: str):
    result = headway.map(abs, [], job="ads", database=database, progress="none")
    assert (result.total, result.done, result.outcome) == (0, 0, "finished")


def test_it_works_in_a_thread_of_a_program(database: str):
    results: list[headway.Result] = []
    thread = threading.Thread(
        target=lambda: results.append(headway.map(abs, [1, 2], job="ads", database=database, progress="none"))
    )
    thread.start()
    thread.join(30)
    assert [result.done for result in results] == [2]


def test_a_long_item_does_not_hold_back_short_ones_of_its_batch(database: str, log: Path):
    """The worker that got the long item gives the others back; they do not wait for it."""

    def work(item: int) -> None:
        if item == 500:
            eventually(lambda: len(executed(log)) == 3999, timeout=20, message="the others waited for the long one")
        note(log, item)

    result = headway.map(
        work, range(4000), job="ads", database=database, workers=2, progress="none", retries=0, last_pass=False
    )
    assert result.done == 4000
    assert executed(log) == Counter(range(4000))


def test_a_long_item_is_seen_as_running_from_outside(database: str, log: Path):
    script = (
        "import headway, sys, time\n"
        f"headway.map(lambda item: time.sleep(30), [1, 2, 3], job='ads', database={database!r}, workers=2, progress='none')"
    )
    run = subprocess.Popen([sys.executable, "-c", script])
    try:
        with Ledger.open(database) as ledger:
            job = eventually(lambda: _job_or_none(ledger), timeout=20)
            eventually(lambda: job.progress().running == 2, timeout=20)
            assert [item.worker for item in job.items(status="processing")] == ["run 1 worker 1", "run 1 worker 2"]
            assert job.info().status == "processing"
    finally:
        run.kill()
        run.wait(20)


def _job_or_none(ledger: Ledger) -> Job | None:
    try:
        return ledger.job("ads")
    except NotFound:
        return None


def test_interrupting_a_program_raises_keyboard_interrupt_after_saving(database: str, log: Path):
    script = (
        "import headway, sys, time\n"
        "def work(item):\n    open(sys.argv[1], 'a').write(f'{item}\\n'); time.sleep(0.02)\n"
        "try:\n"
        f"    headway.map(work, range(500), job='ads', database={database!r}, workers=2, progress='none')\n"
        "except KeyboardInterrupt:\n    print('interrupted'); sys.exit(9)"
    )
    run = subprocess.Popen([sys.executable, "-c", script, str(log)], stdout=subprocess.PIPE, text=True)
    eventually(lambda: len(executed(log)) > 5, timeout=20)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=20)
    assert (run.returncode, out.strip()) == (9, "interrupted")
    with Ledger.open(database) as ledger:
        assert ledger.job("ads").info().done == len(executed(log))


# ---- a job that nobody named ----------------------------------------------------------------------------------------

SCRIPT = """
import headway, functools, sys
{code}
result = headway.map({function}, [1, 2, 3], database=sys.argv[1], progress="none", workers=1)
print(result.job, result.kept, result.done)
"""


def unnamed(
    tmp_path: Path, database: str, code: str, function: str, name: str = "program.py", *, anew: bool = False
) -> list[str]:
    """[job, kept, done] of the program; ``anew``: in a process of its own, where sets have another order."""
    (tmp_path / name).write_text(SCRIPT.format(code=code, function=function))
    if not anew:
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", [name, database])
            runpy.run_path(str(tmp_path / name), run_name="__main__")
        return out.getvalue().split()
    done = subprocess.run(
        [sys.executable, name, database], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ONE = "def work(n):\n    return n + 1\n"
FUNCTIONS_AND_OTHERS = {
    "a function": ((ONE, "work"), (ONE.replace("+ 1", "+ 2"), "work")),
    "a lambda": (("", "lambda n: n + 1"), ("", "lambda n: n + 2")),
    "a closure": (
        ("def make(k):\n    return lambda n: n + k", "make(1)"),
        ("def make(k):\n    return lambda n: n + k", "make(2)"),
    ),
    "a partial": (
        ("def add(k, n):\n    return n + k", "functools.partial(add, 1)"),
        ("def add(k, n):\n    return n + k", "functools.partial(add, 2)"),
    ),
    "a default": (("def work(n, k=1):\n    return n + k", "work"), ("def work(n, k=2):\n    return n + k", "work")),
    "a function that calls another": (
        ("def part(n):\n    return n\ndef work(n):\n    return part(n)", "work"),
        ("def part(n):\n    return -n\ndef work(n):\n    return part(n)", "work"),
    ),
    "a set of constants": (
        ("def work(n):\n    return n in {'a', 'b', 'c'}", "work"),
        ("def work(n):\n    return n in {'a', 'b', 'd'}", "work"),
    ),
    "an inner function": (
        ("def work(n):\n    return (lambda: n + 1)()", "work"),
        ("def work(n):\n    return (lambda: n + 2)()", "work"),
    ),
    "a class": (
        ("class Work:\n    def __init__(self, n):\n        self.n = n", "Work"),
        ("class Work:\n    def __init__(self, n):\n        self.n = -n", "Work"),
    ),
    "a built-in": (("", "abs"), ("", "hash")),
}


@pytest.mark.parametrize("kind", FUNCTIONS_AND_OTHERS)
def test_a_job_without_a_name_is_found_by_the_same_code_and_never_by_other_code(
    tmp_path: Path, database: str, kind: str
):
    (code, function), (other_code, other_function) = FUNCTIONS_AND_OTHERS[kind]
    first = unnamed(tmp_path, database, code, function)
    assert first[1:] == ["0", "3"]
    assert unnamed(tmp_path, database, code, function, anew=True) == [first[0], "3", "3"]
    assert unnamed(tmp_path, database, "\n\n# moved down\n" + code, function) == [first[0], "3", "3"]
    other = unnamed(tmp_path, database, other_code, other_function)
    assert other[1:] == ["0", "3"], "other code was taken for done"
    assert other[0] != first[0]
    if kind != "a built-in":
        assert unnamed(tmp_path, database, code, function, "another.py")[1:] == ["0", "3"], "of another file"


def ran(tmp_path: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_job_of_a_function_without_a_name_does_not_depend_on_its_bytecode(tmp_path: Path, database: str):
    """Python makes other bytecode with -O, as another version of Python does."""
    code = (
        "class Part:\n    def __init__(self, n):\n        assert n\n        self.n = n\n"
        "def part(n):\n    assert n, 'none'\n    return f'{n:>{3}}'\n"
        "def work(n, *, k: int = 1):\n    assert n\n    return [part(each) for each in range(n) if each]\n"
    )
    for function in ("work", "functools.partial(work, k=2)", "lambda n: work(n) or (lambda: n)()", "Part"):
        (tmp_path / "program.py").write_text(SCRIPT.format(code=code, function=function))
        job, *counts = ran(tmp_path, "program.py", database)
        assert counts == ["0", "3"] or function == "Part"
        assert ran(tmp_path, "-O", "program.py", database)[0] == job, function


def test_the_form_of_a_source_is_the_same_in_every_version_of_python():
    """The text is written here, and the tests run under every version: `make compat`."""
    code = "async def f(a, /, b: int = 1, *c, d=None, **e):\n  'doc'\n  return f'{a!r:>{b}}' 'x' + \"\u00e9\" # no\n"
    assert source_form(ast.parse(code)) == (
        "Module(body=[AsyncFunctionDef(args=arguments(args=[arg(annotation=Name(id='int'), arg='b')], "
        "defaults=[Constant(value=1)], kw_defaults=[Constant()], kwarg=arg(arg='e'), kwonlyargs=[arg(arg='d')], "
        "posonlyargs=[arg(arg='a')], vararg=arg(arg='c')), body=[Expr(value=Constant(value='doc')), "
        "Return(value=BinOp(left=JoinedStr(FormattedValue(conversion=114, "
        "format_spec=JoinedStr(Constant(value='>'), FormattedValue(conversion=-1, value=Name(id='b'))), "
        "value=Name(id='a')), Constant(value='x')), op=Add(), right=Constant(value='\\xe9')))], name='f')])"
    )


def test_of_two_lambdas_in_one_line_each_is_a_job_of_its_own(tmp_path: Path, database: str):
    code = "both = [lambda n: n + 1, lambda n: n + 2, lambda n: (lambda: n + 1)()]\n"
    jobs = [unnamed(tmp_path, database, code, f"both[{number}]") for number in range(3)]
    assert [counts for _, *counts in jobs] == [["0", "3"]] * 3
    assert len({job for job, *_ in jobs}) == 3


def test_formatting_and_comments_do_not_make_another_job(tmp_path: Path, database: str):
    first = unnamed(tmp_path, database, "def work(n):\n    return {'a': n, 'b': 1}\n", "work")
    again = unnamed(
        tmp_path, database, 'def work(n):  # the work\n    return {\n        "a": n,\n        "b": 1,\n    }\n', "work"
    )
    assert again == [first[0], "3", "3"]


def test_a_file_that_was_edited_after_its_import_does_not_name_the_job_of_its_old_code(tmp_path: Path, database: str):
    (tmp_path / "work.py").write_text("def work(n):\n    return n + 1\n")
    code = "import headway, pathlib, sys, work\n{edit}\nresult = headway.map(work.work, [1], database=sys.argv[1], workers=1)\n"
    code += "print(result.job, result.kept)\n"
    edit = "pathlib.Path('work.py').write_text('def work(n):\\n    return n + 2\\n')"
    (tmp_path / "program.py").write_text(code.format(edit=edit))
    old = ran(tmp_path, "-B", "program.py", database)
    (tmp_path / "program.py").write_text(code.format(edit=""))
    new = ran(tmp_path, "-B", "program.py", database)
    assert new[1] == "0", "the results of other code were taken for done"
    assert old[0] != new[0]


def test_a_job_that_an_earlier_version_of_headway_named_goes_on(database: str):
    def work(n: int) -> int:
        return n

    before = earlier_default_job(work)
    assert before != default_job(work)
    headway.map(work, [1, 2], job=before, database=database, progress="none", workers=1)
    result = headway.map(work, [1, 2], database=database, progress="none", workers=1)
    assert (result.job, result.kept) == (before, 2)


def test_changed_code_is_a_new_job_and_the_earlier_one_is_named(tmp_path: Path, database: str):
    first = unnamed(tmp_path, database, ONE, "work")[0]
    text = SCRIPT.format(code=ONE.replace("+ 1", "+ 2"), function="work").replace('progress="none", ', "")
    (tmp_path / "program.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py", database], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert f'To go on with the earlier one: job="{first}"' in done.stderr


def test_a_function_defined_again_in_a_shell_is_another_job(database: str):
    """As typed at a prompt: no file, the same name, other code."""
    jobs = []
    for text in ("def work(n): return n", "def work(n): return -n"):
        place: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, "<stdin>", "exec"), place)  # what a prompt does
        result = headway.map(place["work"], [1, 2], database=database, progress="none", workers=1)
        jobs.append((result.job, result.kept))
    assert jobs[0][0] != jobs[1][0]
    assert [kept for _, kept in jobs] == [0, 0]


class Adder:
    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, n: int) -> int:
        return n + self.k

    def add(self, n: int) -> int:
        return n + self.k


def test_a_function_that_cannot_be_recognised_needs_a_name(database: str):
    adder = Adder(1)
    for function in (adder, adder.add, lambda n: adder(n)):  # noqa: PLW0108 - the point is what it carries
        with pytest.raises(InvalidInput) as raised:
            headway.map(function, [1], database=database, progress="none")
        assert 'job="..."' in str(raised.value.hint)
        assert headway.map(function, [1], job=f"j{id(function)}", database=database, progress="none").done == 1


def test_the_limit_of_a_payload_can_be_raised(database: str):
    with pytest.raises(InvalidInput, match="at most 262,144"):
        headway.map(len, ["x" * 300_000], job="ads", database=database, progress="none")
    result = headway.map(
        len, ["x" * 300_000], job="ads", database=database, progress="none", payload_limit=400_000, workers=1
    )
    assert result.done == 1


# ---- open_job -------------------------------------------------------------------------------------------------------


def test_a_program_may_keep_its_own_loop(database: str):
    with headway.open_job("ads", PRODUCTS, database=database, retries=1, retry_delay=0.01) as job:
        tries = Counter[int]()
        for item in job.remaining():
            with item:
                tries[item.payload["n"]] += 1
                item.meta = {"ad": item.index}
                if item.payload["n"] == 7:
                    raise ValueError("no price")
                if item.payload["n"] == 8 and item.attempts == 0:
                    raise ValueError("try again")
        progress = job.progress()
    assert (progress.done, progress.dead, progress.retrying) == (29, 1, 0)
    assert (tries[7], tries[8], tries[9]) == (2, 2, 1)
    with Ledger.open(database) as ledger:
        kept = ledger.job("ads")
        assert kept.info().status == "completed"
        assert kept.item(9).meta == '{"ad":9}'
        assert [run.outcome for run in kept.runs()] == ["finished"]


def test_leaving_the_loop_early_keeps_what_was_done_and_it_is_continued_without_items(database: str):
    with headway.open_job("ads", PRODUCTS, database=database) as job:
        for item in job.remaining():
            with item:
                pass
            if item.index == 9:
                break
    with headway.open_job("ads", database=database) as job:
        left = [item.index for item in job.remaining()]
    assert left == list(range(10, 30))


def test_an_interrupt_inside_an_item_leaves_it_as_it_was(database: str):
    def interrupted_loop() -> None:
        with headway.open_job("ads", PRODUCTS, database=database) as job:
            for item in job.remaining():
                with item:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_loop()
    with Ledger.open(database) as ledger:
        job = ledger.job("ads")
        assert (job.info().done, job.info().failures, job.item(0).status) == (0, 0, "pending")
        assert [run.outcome for run in job.runs()] == ["interrupted"]


def test_a_job_that_is_open_elsewhere_is_refused(database: str):
    with headway.open_job("ads", PRODUCTS, database=database):
        with pytest.raises(JobHeld):
            headway.open_job("ads", database=database)
        with pytest.raises(JobHeld):
            headway.map(abs, [1], job="ads", database=database, progress="none", accept_changes=True)


def request(database: str, name: str) -> RunRequest:
    return RunRequest(Config(cli={"database": database}), Settings(workers=1), abs, name)


def test_a_job_that_another_process_did_while_the_items_were_read_is_not_put_aside(database: str, log: Path):
    def work(item: dict[str, int]) -> None:
        note(log, item["n"])

    with Ledger.open(database) as ledger:
        session = Session(request(database, "work"))
        plan = session.compare("ads", GivenItems(PRODUCTS, key=None, limit=10_000))
        headway.map(work, PRODUCTS, job="ads", database=database, workers=1, progress="none")
        with pytest.raises(JobHeld, match="at the same moment"), session:
            session.hold(plan)
        assert [(job.id, job.done, job.held) for job in ledger.jobs(archived=True)] == [("ads", 30, False)]


def test_a_plan_for_items_that_another_process_replaced_is_not_carried_out(database: str):
    headway.map(abs, [-1, -2], job="ads", database=database, workers=1, progress="none")
    session = Session(request(database, "builtins:abs"))
    plan = session.compare("ads", GivenItems([-1, -2], key=None, limit=10_000))
    headway.map(abs, [-3], job="ads", database=database, workers=1, progress="none", fresh=True)
    with pytest.raises(JobHeld, match="at the same moment"), session:
        session.hold(plan)


def test_a_child_that_leaves_the_block_of_its_parent_does_not_release_the_job(database: str):
    with headway.open_job("ads", PRODUCTS, database=database) as job:
        child = os.fork()
        if not child:
            with suppress(BaseException):
                job.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with Ledger.open(database) as ledger:
            assert ledger.job("ads").info().held
        for item in job.remaining(wait=False):
            with item:
                pass
    with Ledger.open(database) as ledger:
        assert [run.outcome for run in ledger.job("ads").runs()] == ["finished"]


def test_a_child_forked_inside_an_item_neither_records_it_nor_goes_on_with_the_loop(database: str):
    with headway.open_job("ads", PRODUCTS, database=database) as job:
        items = job.remaining()
        child, status = 0, -1
        with suppress(headway.HeadwayError), next(items):
            child = os.fork()
            if child:  # before the parent records anything
                status = os.waitpid(child, 0)[1]
        if not child:
            code = 1  # it recorded the item of its parent
            with Ledger.open(database) as ledger:
                if ledger.job("ads").info().done == 0:
                    code = 0
                    with suppress(headway.HeadwayError), next(items):
                        code = 2  # it works off the items of its parent
            os._exit(code)
        assert os.waitstatus_to_exitcode(status) == 0
        assert job.progress().done == 1


def test_a_loop_that_lost_its_job_records_nothing_more(database: str):
    with headway.open_job("ads", PRODUCTS, database=database) as job:
        with Ledger.open(database) as ledger:  # as if this process had been stopped for a minute
            ledger.database.run(
                lambda tx: tx.execute(
                    'UPDATE jobs SET lease_until = 0, holder = \'{"host": "x", "space": "", "pid": 1, "born": ""}\''
                )
            )
            taken = ledger.hold(ledger.job("ads"), {})
        item = next(job.remaining())
        with pytest.raises(StaleClaim), item:
            pass
        with Ledger.open(database) as ledger:
            assert ledger.job("ads").info().done == 0
            ledger.renew(taken)


def test_an_item_that_the_loop_skips_is_not_offered_again_and_again(database: str):
    with headway.open_job("ads", [1, 2, 3], database=database, retries=5, retry_delay=0.001) as job:
        for item in job.remaining():
            with item:
                raise ValueError("each of them fails once")
            if item.index == 2:
                break
        offered = Counter(item.index for item in job.remaining())
    assert offered == Counter([0, 1, 2])


def test_loops_of_several_threads_share_the_items(database: str):
    executed: list[int] = []
    together = threading.Barrier(4)

    with headway.open_job("ads", range(1200), database=database, retries=2, retry_delay=0.01) as job:

        def work() -> None:
            together.wait(30)
            for item in job.remaining():
                with item:
                    executed.append(item.index)
                    if item.index % 50 == 0 and item.attempts == 0:
                        raise ValueError("each of these fails once")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        progress = job.progress()
    assert Counter(executed) == Counter([*range(1200), *range(0, 1200, 50)])
    assert (progress.done, progress.errors) == (1200, 24)


def test_a_loop_gets_no_item_that_another_thread_still_works_on(database: str):
    with headway.open_job("ads", range(5), database=database) as job:
        entered, leave = threading.Event(), threading.Event()
        first, *_ = job.remaining()

        def work() -> None:
            with first:
                entered.set()
                leave.wait(30)

        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(30)
        assert [item.index for item in job.remaining(wait=False)] == [1, 2, 3, 4]
        leave.set()
        thread.join(30)
        assert job.progress().done == 1


def test_a_process_of_multiprocessing_cannot_share_the_items_and_is_told_so(database: str):
    with headway.open_job("ads", range(5), database=database) as job:
        child = os.fork()
        if not child:
            code = 1
            try:
                next(job.remaining())
            except headway.HeadwayError:
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_unknown_job_without_items_is_not_found_and_no_file_is_made(tmp_path: Path):
    with pytest.raises(NotFound):
        headway.open_job("ads", database=f"sqlite:///{tmp_path / 'none.db'}")
    assert os.listdir(tmp_path) == []


def test_the_public_names_are_these():
    assert sorted(headway.__all__) == [
        "FinishLine", "GiveUp", "HeadwayError", "Ledger", "ProgressManager", "Result", "RetryLater", "__version__", "amap",
        "map", "open_job", "retry_after", "track",
    ]  # fmt: skip
    for name in headway.__all__:
        assert getattr(headway, name) is not None


def test_a_worker_that_dies_while_something_it_started_lives_on_is_noticed(database: str, tmp_path: Path):
    """A grandchild that left the process group keeps our socket open: the stream of the dead worker does not end."""
    ended = tmp_path / "ended"

    def leaves_a_daemon(item: int) -> None:
        if item == 1:
            if os.fork() == 0:
                os.setsid()
                eventually(ended.exists, timeout=100)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    result = headway.map(
        leaves_a_daemon, [0, 1, 2], job="ads", database=database, retries=0, last_pass=False, workers=1, progress="none"
    )
    took = time.monotonic() - began
    ended.touch()
    assert (result.done, result.dead) == (2, 1)
    assert took < 60, "it does not wait for the grandchild"


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_large_items_and_large_results_do_not_make_both_ends_wait_for_each_other(
    database: str, tmp_path: Path, mode: str
):
    items = [f"{n}:" + "x" * 200_000 for n in range(120)]
    result = headway.map(
        lambda item: item * 2, items, job="ads", database=database, mode=mode, workers=2, progress="none",
        output=tmp_path / "out.jsonl",
    )  # fmt: skip
    assert result.done == 120
    assert sum(1 for _ in (tmp_path / "out.jsonl").open()) == 120
