"""``--output``: every result, once each, whatever was killed when; or a refusal that says why."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.cli import invoke
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, InvalidInput, StaleClaim
from headway.ledger import Done, Job, Ledger
from headway.ledger.values import NewItem
from headway.run.output.files import Output
from headway.run.output.results import as_plain, lines
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = """
import os, time

def square(item):
    if os.path.exists("slow"):
        time.sleep(0.02)
    with open("executed", "a") as file:
        file.write(f"{item}\\n")
    return item * item

def square_when_allowed(item):
    open("begun", "a").close()
    while os.path.exists("blocked"):
        time.sleep(0.02)
    return item * item
"""
RUN = ("run", "jobs:square", "-i", "items.jsonl", "-j", "ads", "-w", "2")


@pytest.fixture(name="run_cli")
def _run_cli(quick_cli: Cli) -> Cli:
    return quick_cli


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(FUNCTIONS)
    (tmp_path / "items.jsonl").write_text("".join(f"{n}\n" for n in range(40)))
    return tmp_path


def results(place: Path, name: str = "out.jsonl") -> list[int]:
    return sorted(json.loads(line)["result"] for line in (place / name).read_text().splitlines())


ALL = sorted(n * n for n in range(40))


def test_an_output_added_to_a_finished_job_has_every_result(place: Path, run_cli: Cli):
    assert run_cli(*RUN).returncode == 0
    assert run_cli(*RUN, "-o", "out.jsonl").returncode == 0
    assert results(place) == ALL


def test_an_output_added_when_a_run_is_resumed_has_the_results_of_before_too(
    place: Path, run_cli: Cli, spawn_cli: Spawn
):
    (place / "slow").touch()
    run = spawn_cli(*RUN, stderr=subprocess.DEVNULL)
    eventually((place / "executed").exists, 30)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    before = len((place / "executed").read_text().split())
    assert 0 < before < 40
    (place / "slow").unlink()
    done = run_cli(*RUN, "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert results(place) == ALL
    assert len((place / "executed").read_text().split()) == 40, "nothing was executed again for it"


def test_an_output_added_to_a_job_that_kept_no_results_is_refused_and_says_why(place: Path, run_cli: Cli):
    assert run_cli(*RUN, "--no-results").returncode == 0
    refused = run_cli(*RUN, "-o", "out.jsonl")
    assert refused.returncode == 2
    assert "the results of 40 were not kept" in refused.stderr
    assert "--fresh" in refused.stderr
    assert not (place / "out.jsonl").exists()
    fresh = run_cli(*RUN, "-o", "out.jsonl", "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    assert results(place) == ALL


def half(n: int) -> object:
    return {1: None, 2: object(), 3: "x" * 2_000_000}.get(n, n / 2)


def test_from_a_program_results_come_back_and_what_cannot_be_kept_costs_nothing_but_itself(tmp_path: Path):
    options = {"job": "ads", "database": f"sqlite:///{tmp_path}/a.db", "progress": "none", "workers": 1}
    done = headway.map(half, range(5), **options)  # type: ignore[arg-type]
    assert done.done == 5
    assert [(found.index, found.result) for found in done.results()] == [(0, 0.0), (1, None), (4, 2.0)]
    assert [found.index for found in done.results(ordered=False)] == [0, 4]
    with pytest.raises(InvalidInput, match="results of 2 were not kept"):
        headway.map(half, range(5), output=tmp_path / "out.jsonl", **options)  # type: ignore[arg-type]


def test_a_file_asked_for_later_names_those_that_returned_nothing_too(tmp_path: Path):
    options = {"job": "ads", "database": f"sqlite:///{tmp_path}/a.db", "progress": "none", "workers": 1}
    headway.map(abs_or_none, [1, -2, 0], **options)  # type: ignore[arg-type]
    headway.map(abs_or_none, [1, -2, 0], output=tmp_path / "out.jsonl", **options)  # type: ignore[arg-type]
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted((line["index"], line["result"]) for line in written) == [(0, 1), (1, 2), (2, None)]


def abs_or_none(n: int) -> int | None:
    return abs(n) or None


@dataclass
class Point:
    x: int
    at: datetime


def point(n: int) -> Point:
    return Point(n, datetime(2026, 1, n, tzinfo=UTC))


def test_dataclasses_and_dates_have_a_plain_form_and_decode_makes_them_again(tmp_path: Path):
    def again(value: dict[str, object]) -> Point:
        return Point(int(str(value["x"])), datetime.fromisoformat(str(value["at"])))

    done = headway.map(
        point, [1, 2], job="p", database=f"sqlite:///{tmp_path}/a.db", progress="none", workers=1, decode=again
    )
    assert [found.result for found in done.results()] == [point(1), point(2)]


def test_an_item_whose_result_the_callers_encode_cannot_encode_is_dead_and_not_done_without_a_result(tmp_path: Path):
    """It can be tried again when encode is repaired; of a done item the result would be lost."""

    def encode(value: int) -> float:
        return 1 / value

    options = {"job": "e", "database": f"sqlite:///{tmp_path}/e.db", "progress": "none", "encode": encode}
    done = headway.map(int, [0, 2], **options)  # type: ignore[arg-type]
    assert (done.done, done.dead) == (1, 1)
    assert [(found.index, found.result) for found in done.results()] == [(1, 0.5)]
    (letter,) = done.dead_letters()
    assert "ZeroDivisionError" in letter.error


def test_values_of_other_libraries_are_kept_as_the_caller_encodes_them(tmp_path: Path):
    done = headway.map(
        complex, [1, 2], job="p", database=f"sqlite:///{tmp_path}/a.db", progress="none", workers=1,
        encode=lambda value: [value.real, value.imag], decode=lambda pair: complex(*pair),
    )  # fmt: skip
    assert [found.result for found in done.results()] == [complex(1), complex(2)]


def test_models_of_pydantic_are_kept_and_decode_makes_them_again(tmp_path: Path):
    pydantic = pytest.importorskip("pydantic")
    model: Any = pydantic.create_model("Ad", sku=(str, ...), made=(date, ...), tags=(set[str], ...), inner=(Any, None))

    def advertise(item: int) -> Any:
        made = model(sku=f"p-{item}", made=date(2026, 1, item), tags={"new"})
        return {"ad": made, "all": [made]} if item == 2 else model(sku="outer", made=made.made, tags=set(), inner=made)

    done = headway.map(
        advertise, [1, 2], job="ads", database=f"sqlite:///{tmp_path}/a.db", workers=1, progress="none",
        decode=lambda value: model.model_validate(value.get("ad", value)),
    )  # fmt: skip
    assert done.dead == 0
    first, second = (found.result for found in done.results())
    assert (first.sku, first.made, first.inner["sku"]) == ("outer", date(2026, 1, 1), "p-1")
    assert (second.sku, second.tags) == ("p-2", {"new"})


def test_values_of_numpy_have_a_plain_form():
    numpy = pytest.importorskip("numpy")
    assert as_plain(numpy.arange(3)) == [0, 1, 2]
    assert as_plain(numpy.float64(0.5)) == 0.5


def test_sets_and_paths_have_a_plain_form_and_other_objects_have_none(tmp_path: Path):
    assert as_plain({"b", "a"}) == ["a", "b"]
    assert as_plain(tmp_path) == str(tmp_path)
    with pytest.raises(TypeError):
        as_plain(object())


# ---- the verb -------------------------------------------------------------------------------------------------------

RETURNS = """
def mixed(n):
    return {0: {"name": "a,b", "tags": [1, 2], "index": 9}, 1: {"name": None, "size": 3}, 2: "alone", 3: None}[n]
"""


def test_results_are_printed_by_index_in_three_formats(place: Path, run_cli: Cli):
    (place / "jobs.py").write_text(RETURNS)
    (place / "items.jsonl").write_text("0\n1\n2\n3\n")
    assert run_cli("run", "jobs:mixed", "-i", "items.jsonl", "-j", "ads", "-o", "run.csv").returncode == 0
    lines = [json.loads(line) for line in run_cli("results", "ads").stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert lines[3] == {"index": 3, "key": None, "result": None}
    assert json.loads(run_cli("results", "ads", "--format", "json").stdout) == lines
    table = run_cli("results", "ads", "--output", "ads.csv")
    assert table.returncode == 0, table.stderr
    assert "In 'tags' 1 value is a list or object: the cells hold their JSON." in table.stderr
    text = (place / "ads.csv").read_text()
    assert text == (place / "run.csv").read_text()
    assert text.splitlines() == [
        "index,key,name,tags,result.index,size,result", '0,,"a,b","[1, 2]",9,,', "1,,,,,3,", "2,,,,,,alone", "3,,,,,,",
    ]  # fmt: skip
    again = run_cli("results", "ads", "--output", "ads.csv")
    assert again.returncode == 2
    assert "already exists" in again.stderr
    assert run_cli("results", "ads", "--output", "ads.xyz").returncode == 2
    assert run_cli("results", "nobody").returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "iso8859-15"])
def test_results_are_utf_8_whatever_the_locale_is(place: Path, run_cli: Cli, headway_cli: Cli, encoding: str):
    (place / "words.py").write_text("def same(item):\n    return item\n")
    (place / "words.txt").write_text("grün ¤ €\n", "utf-8")
    assert run_cli("run", "words:same", "-i", "words.txt", "-j", "w").returncode == 0
    for options in ([], ["--format", "csv"], ["--follow"]):
        done = headway_cli("results", "w", *options, env={"PYTHONIOENCODING": encoding})
        assert (done.returncode, "grün ¤ €" in done.stdout) == (0, True), done.stdout


def test_a_table_of_somebody_else_is_not_overwritten(place: Path, run_cli: Cli):
    (place / "mine.csv").write_text("index,key,precious\n")
    assert run_cli(*RUN, "-o", "mine.csv").returncode == 2
    assert (place / "mine.csv").read_text() == "index,key,precious\n"


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_a_link_stays_one_and_the_file_it_leads_to_is_written_and_written_again(place: Path, run_cli: Cli, name: str):
    """The next run knows the file by the same name."""
    (place / "store").mkdir()
    (place / name).symlink_to(f"store/{name}")
    for _ in range(2):
        done = run_cli(*RUN, "-o", name)
        assert done.returncode == 0, done.stderr
    assert (place / name).is_symlink()
    assert len((place / "store" / name).read_text().splitlines()) >= len(ALL)
    (place / f"loop-{name}").symlink_to(f"loop-{name}")
    assert "Traceback" not in run_cli(*RUN, "-o", f"loop-{name}").stderr


def test_results_that_have_thousands_of_fields_together_are_one_cell_each(tmp_path: Path):
    """A column for each would make a table of a million cells of a thousand results."""
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        job = ledger.create("ads")
        job.register([NewItem(idx, str(idx), None, idx) for idx in range(1002)])
        job.record([Done(idx, None, json.dumps({f"word-{idx}": idx} if idx else 7)) for idx in range(1002)])
        told: list[str] = []
        rows = list(csv.reader(io.StringIO("".join(lines(job, "csv", told.append)))))
    assert rows[:3] == [["index", "key", "result"], ["0", "", "7"], ["1", "", '{"word-1": 1}']]
    assert len(rows) == 1003
    few = "over 1,000 different fields, few of them in common"
    assert told == [f"The results have {few}: the column 'result' has each one as JSON."]


def test_a_wide_table_whose_rows_have_the_same_fields_keeps_its_columns(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        job = ledger.create("ads")
        job.register([NewItem(idx, str(idx), None, idx) for idx in range(2)])
        row = json.dumps({f"feature-{n}": n for n in range(1500)})
        job.record([Done(idx, None, row) for idx in range(2)])
        rows = list(csv.reader(io.StringIO("".join(lines(job, "csv")))))
    assert [len(row) for row in rows] == [1502, 1502, 1502]


def test_a_table_of_results_that_grow_meanwhile_lacks_no_column_of_a_row_it_has(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        job = ledger.create("ads")
        job.register([NewItem(idx, str(idx), None, idx) for idx in range(3003)])
        job.record([Done(idx, result=json.dumps({"text": "x" * 100})) for idx in range(3000)])
        told: list[str] = []
        pieces = lines(job, "csv", told.append)
        table = next(pieces)  # the columns are known now
        job.record([Done(3000, result='{"other": 1}'), Done(3001, result="7"), Done(3002, result='{"text": "late"}')])
        table += "".join(pieces)
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [row["index"] for row in rows] == [*map(str, range(3000)), "3002"]
    assert rows[-1]["text"] == "late"
    assert told == ["2 results came meanwhile that have no place in these columns. Ask again."]


def test_columns_are_never_called_alike(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        job = ledger.create("ads")
        job.register([NewItem(0, "0", None, 0)])
        job.record([Done(0, result='{"index": 1, "result.index": 2, "result": 3}')])
        table = "".join(lines(job, "csv"))
    assert table.splitlines() == ["index,key,result.result.index,result.index,result.result", "0,,1,2,3"]


def test_whoever_follows_a_run_that_does_not_finish_is_told(place: Path, run_cli: Cli, spawn_cli: Spawn):
    (place / "items.jsonl").write_text("0\n300\n300\n")
    run = spawn_cli("run", "time:sleep", "-i", "items.jsonl", "-j", "naps", "-w", "1")
    database = f"sqlite:///{place}/headway.db"

    def begun() -> bool:
        with suppress(HeadwayError), Ledger.open(database, create=False) as ledger:
            return ledger.job("naps").info().done >= 1
        return False

    eventually(begun, timeout=60)
    follower = spawn_cli("results", "naps", "--follow")
    run.kill()
    run.wait(30)
    _, said = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert "The run has ended, and 2 items are left." in said
    assert "headway run time:sleep -i items.jsonl -j naps -w 1" in said


def test_a_result_that_is_committed_after_later_ones_is_followed_too(postgres_with_tables: str, spawn_cli: Spawn):
    """The slots of a fleet record at the same time, and the numbers of their results are given before they commit."""
    psycopg = pytest.importorskip("psycopg")
    with Ledger.open(postgres_with_tables) as ledger, psycopg.connect(postgres_with_tables) as slot:
        job = ledger.create("ads")
        job.register([NewItem(idx, str(idx), None, idx) for idx in range(4)])
        hold = ledger.hold(job, {"mode": "process"})
        slot.execute("INSERT INTO results (job, idx, result) VALUES (%s, 0, '\"late\"')", (job.no,))
        follower = spawn_cli("results", "ads", "--follow", "--database", postgres_with_tables)
        assert follower.stdout is not None
        indices = []
        for idx in (1, 2, 3):  # the last look at the results of the first is over when the third is printed
            job.record([Done(idx, None, "1")], hold=hold, policy=RetryPolicy(0, 0.0))
            indices.append(json.loads(follower.stdout.readline())["index"])
        slot.commit()
        ledger.release(hold, "interrupted")
        output, _ = follower.communicate(timeout=60)
    assert [*indices, *(json.loads(line)["index"] for line in output.splitlines())] == [1, 2, 3, 0]


def test_results_are_followed_as_they_come_until_the_run_ends(place: Path, run_cli: Cli, spawn_cli: Spawn):
    (place / "blocked").touch()
    run = spawn_cli("run", "jobs:square_when_allowed", "-i", "items.jsonl", "-j", "ads", stderr=subprocess.DEVNULL)
    eventually((place / "begun").exists, timeout=60)
    follower = spawn_cli("results", "ads", "--follow")
    (place / "blocked").unlink()
    output, _ = follower.communicate(timeout=60)
    assert run.wait(60) == 0
    assert sorted(json.loads(line)["result"] for line in output.splitlines()) == ALL


def test_a_job_that_writes_results_keeps_them_also_in_a_run_that_does_not_name_the_file(
    place: Path, run_cli: Cli, spawn_cli: Spawn
):
    (place / "slow").touch()
    run = spawn_cli(*RUN, "-o", "out.jsonl", stderr=subprocess.DEVNULL)
    eventually(lambda: (place / "executed").exists() and len((place / "executed").read_text().split()) > 5, timeout=20)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    assert run_cli(*RUN).returncode == 0
    assert run_cli(*RUN, "-o", "out.jsonl").returncode == 0
    assert results(place) == ALL
    assert run_cli(*RUN, "-o", "second.jsonl").returncode == 0
    assert results(place, "second.jsonl") == ALL


def run_until(call: str, arguments: list[str], *, after: bool) -> int:
    """Run the command in a child that is killed at its first `os.call` for the file of results; how the child ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        real = getattr(os, call)

        def killing(*given: object, **options: object) -> object:
            ours = call != "open" or str(given[0]).endswith("out.jsonl")
            if ours and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            done = real(*given, **options)
            if ours:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        setattr(os, call, killing)
        sys.argv = ["headway", *arguments]
        sys.stdout = sys.stderr = io.StringIO()
        invoke(arguments)
    finally:
        os._exit(0)


def test_killed_while_a_changed_item_is_accepted_the_file_has_no_result_of_what_it_was(place: Path, run_cli: Cli):
    arguments = [*RUN, "-o", "out.jsonl", "--key", "id"]
    items = [{"id": n, "version": 1} for n in range(5)]
    (place / "jobs.py").write_text("def square(item):\n    return item['version']\n")
    (place / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    assert run_cli(*arguments).returncode == 0
    items[0]["version"] = 2
    (place / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    real = Job.replace_items
    if (pid := os.fork()) == 0:

        def killing(job: Job, items: Sequence[NewItem]) -> None:
            real(job, items)
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            Job.replace_items = killing  # type: ignore[method-assign, assignment]
            sys.argv = ["headway", *arguments, "--accept-changes"]
            sys.stdout = sys.stderr = io.StringIO()
            invoke([*arguments, "--accept-changes"])
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    assert sorted((row["index"], row["result"]) for row in rows) == [(0, 2), (1, 1), (2, 1), (3, 1), (4, 1)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["open", "ftruncate", "pwrite", "fsync"])
def test_killed_around_any_step_of_writing_the_file_the_same_command_continues(
    place: Path, run_cli: Cli, call: str, after: bool
):
    arguments = [*RUN, "-o", "out.jsonl"]
    for fresh in ([], ["--fresh"]):
        status = run_until(call, [*arguments, *fresh], after=after)
        assert os.WIFSIGNALED(status)
        done = run_cli(*arguments)
        assert done.returncode == 0, done.stderr
        assert results(place) == ALL


def test_a_full_disk_under_the_output_file_ends_the_run_and_the_same_command_continues(
    place: Path, run_cli: Cli, small_disk: Callable[[int], Path]
):
    disk = small_disk(2**20)
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * (2**20 - 4096))
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(2000)))
    full = run_cli(*RUN, "-o", disk / "out.jsonl")
    assert full.returncode == 1, full.stderr
    assert "safe in the ledger" in full.stderr
    ballast.unlink()
    done = run_cli(*RUN, "-o", disk / "out.jsonl")
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line)["result"] for line in (disk / "out.jsonl").read_text().splitlines())
    assert found == sorted(n * n for n in range(2000))


def test_a_fresh_start_may_write_the_file_that_the_job_wrote_before(place: Path, run_cli: Cli):
    assert run_cli(*RUN, "-o", "out.jsonl").returncode == 0
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(20)))
    for _ in range(2):
        fresh = run_cli(*RUN, "-o", "out.jsonl", "--fresh")
        assert fresh.returncode == 0, fresh.stderr
        assert results(place) == ALL[:20]


def test_the_file_of_another_job_is_not_touched(place: Path, run_cli: Cli):
    assert run_cli(*RUN, "-o", "out.jsonl").returncode == 0
    before = (place / "out.jsonl").read_bytes()
    for arguments in ((), ("--fresh",)):
        other = run_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "b", "-o", "out.jsonl", *arguments)
        assert other.returncode == 2, other.stderr
        assert "was not written by this job" in other.stderr
    assert (place / "out.jsonl").read_bytes() == before


def test_a_file_that_took_the_place_of_ours_is_not_touched(place: Path, run_cli: Cli):
    assert run_cli(*RUN, "-o", "out.jsonl").returncode == 0
    (place / "out.jsonl").write_text("precious\n" * 10_000)
    refused = run_cli(*RUN, "-o", "out.jsonl")
    assert refused.returncode == 2
    assert (place / "out.jsonl").read_text() == "precious\n" * 10_000


def test_two_jobs_at_once_cannot_write_one_file(place: Path, run_cli: Cli, spawn_cli: Spawn):
    """Before the first line is written the file is empty, and nobody's by its looks."""
    (place / "blocked").touch()
    blocked = ("run", "jobs:square_when_allowed", "-i", "items.jsonl", "-j", "ads", "-o", "out.jsonl")
    first = spawn_cli(*blocked, stderr=subprocess.DEVNULL)
    eventually((place / "out.jsonl").exists, timeout=30)
    second = run_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "other", "-o", "out.jsonl")
    (place / "blocked").unlink()
    assert second.returncode == 5, second.stderr
    assert f"Another run is writing results to {place}/out.jsonl" in second.stderr
    assert first.wait(60) == 0
    assert results(place) == ALL
    refused = run_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "other", "-o", "out.jsonl")
    assert refused.returncode == 2
    assert results(place) == ALL


def test_who_takes_a_job_over_from_a_stopped_run_writes_its_file(place: Path, run_cli: Cli, spawn_cli: Spawn):
    (place / "blocked").touch()
    command = ("run", "jobs:square_when_allowed", "-i", "items.jsonl", "-j", "ads", "-o", "out.jsonl")
    stopped = spawn_cli(*command, stderr=subprocess.PIPE)
    eventually((place / "begun").exists, timeout=30)
    stopped.send_signal(signal.SIGSTOP)  # it waits for its items, and writes nothing at this moment
    try:
        (place / "blocked").unlink()
        with Ledger.open(f"sqlite:///{place}/headway.db") as ledger:  # as if its lease had lapsed
            ledger.database.run(lambda tx: tx.execute("UPDATE jobs SET holder = NULL, lease_until = NULL"))
        successor = run_cli(*command)
        assert successor.returncode == 0, successor.stderr
    finally:
        stopped.send_signal(signal.SIGCONT)
    said = stopped.communicate(timeout=60)[1]
    assert stopped.returncode == 5, said
    assert results(place) == ALL


def test_a_file_that_somebody_edited_between_two_runs_is_written_anew_and_not_cut_within_a_line(
    place: Path, run_cli: Cli
):
    assert run_cli(*RUN, "-o", "out.jsonl").returncode == 0
    file = place / "out.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace('"key": null', '"key": null, "checked": "by hand"'))
    again = run_cli(*RUN, "-o", "out.jsonl")
    assert again.returncode == 0
    assert "it is rewritten" in again.stderr
    assert file.read_text() == whole


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_items_that_change_the_directory_of_this_process_change_no_file_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def moves(item: int) -> int:
        os.chdir(tmp_path / "elsewhere")
        return item

    with ThreadPoolExecutor(1) as executor:
        result = headway.map(moves, range(3), job="moves", executor=executor, output=name, progress="none")
    assert os.listdir(tmp_path / "elsewhere") == []
    assert len((tmp_path / name).read_text().splitlines()) == 3 + name.endswith("csv")
    assert [found.result for found in result.results()] == [0, 1, 2]


def test_items_that_change_the_directory_of_this_process_change_no_database_that_a_link_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    Ledger.open("sqlite:///real.db").close()
    (tmp_path / "link.db").symlink_to("real.db")

    def moves(item: int) -> int:
        os.chdir(tmp_path / "elsewhere")
        return item

    with ThreadPoolExecutor(1) as executor:
        result = headway.map(
            moves, range(3), job="moves", database="sqlite:///link.db", executor=executor, progress="none"
        )
    assert [found.result for found in result.results()] == [0, 1, 2]


def test_a_result_that_somebody_made_longer_in_the_ledger_has_the_file_written_anew(tmp_path: Path):
    given: dict[str, Any] = {
        "job": "one", "database": f"sqlite:///{tmp_path}/headway.db", "output": tmp_path / "out.jsonl", "progress": "none"
    }  # fmt: skip
    headway.map(abs, [-1], **given)
    with Ledger.open(given["database"]) as ledger:
        ledger.database.run(lambda tx: tx.execute("UPDATE results SET result = ?", (json.dumps("x" * 100),)))
    headway.map(abs, [-1], **given)
    assert json.loads(given["output"].read_text())["result"] == "x" * 100


def test_items_run_in_a_directory_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = os.fsencode(tmp_path) + b"/caf\xe9 #1 100%"  # as an older system wrote it
    os.mkdir(place)
    monkeypatch.chdir(os.fsdecode(place))
    with ThreadPoolExecutor(1) as executor:
        result = headway.map(abs, [-1, -2], job="odd", executor=executor, progress="none")
    assert list(headway.track(range(3), job="tracked", progress="none")) == [0, 1, 2]
    monkeypatch.chdir(tmp_path)
    assert [found.result for found in result.results()] == [1, 2]


@pytest.mark.parametrize("change", ["removed", "emptied", "moved", "edited"])
def test_a_file_that_was_changed_while_the_run_went_on_is_whole_at_the_end(place: Path, spawn_cli: Spawn, change: str):
    (place / "slow").touch()
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(200)))
    run = spawn_cli(*RUN, "-o", "out.jsonl", stderr=subprocess.DEVNULL)
    file = place / "out.jsonl"
    eventually(lambda: file.exists() and file.stat().st_size > 0, timeout=30)
    if change == "removed":
        file.unlink()
    elif change == "moved":
        file.rename(place / "elsewhere.jsonl")
    elif change == "emptied":
        os.truncate(file, 0)
    else:
        with file.open("r+") as opened:
            text = opened.read()
            opened.seek(0)
            opened.write(text.replace('"key": null', '"key":       null'))
    assert run.wait(60) == 0
    assert results(place) == sorted(n * n for n in range(200))


def test_what_somebody_put_in_the_place_of_the_file_while_the_run_went_on_is_not_touched(
    place: Path, run_cli: Cli, spawn_cli: Spawn
):
    (place / "slow").touch()
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(200)))
    run = spawn_cli(*RUN, "-o", "out.jsonl", stderr=subprocess.PIPE)
    file = place / "out.jsonl"
    eventually(lambda: file.exists() and file.stat().st_size > 0, timeout=30)
    (place / "mine").write_text("my notes\n" * 10_000)
    (place / "mine").replace(file)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 2, said
    assert "was not written by this job" in said
    assert file.read_text() == "my notes\n" * 10_000
    file.unlink()
    assert run_cli(*RUN, "-o", "out.jsonl").returncode == 0
    assert results(place) == sorted(n * n for n in range(200))


def test_a_pipe_does_not_overwrite_a_foreign_file_either(place: Path, run_cli: Cli):
    (place / "out.jsonl").write_text("precious\n")
    refused = run_cli("run", "jobs:square", "-i", "-", "-j", "ads", "-o", "out.jsonl", stdin="1\n2\n")
    assert refused.returncode == 2, refused.stderr
    assert (place / "out.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("out.xlsx", "JSON lines or CSV, not as XLSX"),
        ("/dev/null", "not a file"),
        ("no/out.jsonl", "directory"),
        ("-", "headway results ads"),
    ],
)
def test_a_name_that_cannot_hold_results_is_refused_before_anything_runs(
    place: Path, run_cli: Cli, name: str, said: str
):
    refused = run_cli(*RUN, "-o", name)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert not (place / "headway.db").exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_directory_that_cannot_be_written_is_said_before_anything_runs(
    place: Path, run_cli: Cli, small_disk: Callable[[int], Path], name: str
):
    disk = small_disk(1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    done = run_cli("run", "jobs:square", "-i", "items.jsonl", "-j", "a", "-o", disk / name)
    assert done.returncode == 2, done.stderr
    assert f"{disk} is not writable" in done.stderr
    assert not (place / "headway.db").exists()


def test_results_do_not_stay_in_the_memory_of_a_worker(tmp_path: Path):
    def large(item: int) -> str:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return f"{peak}:" + "x" * 500_000

    headway.map(
        large, range(120), job="ads", database=f"sqlite:///{tmp_path}/a.db", workers=1, progress="none",
        output=tmp_path / "out.jsonl",
    )  # fmt: skip
    peaks = [int(json.loads(line)["result"].partition(":")[0]) for line in (tmp_path / "out.jsonl").open()]
    assert len(peaks) == 120
    assert max(peaks) - min(peaks) < 30_000, "kilobytes; all results together take 60,000"
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        assert ledger.job("ads").info().done == 120
    assert os.stat(tmp_path / "out.jsonl").st_mode & 0o777 == 0o600


def talk_half(n: int) -> object:
    print("at", n)  # noqa: T201 - what is printed is kept too
    return half(n)


def test_postgresql_keeps_results_and_what_was_printed_as_sqlite_does(tmp_path: Path, postgres_url: str):
    done = headway.map(
        talk_half, range(5), job="kept", database=postgres_url, progress="none", workers=2, keep_output="all"
    )
    assert [(found.index, found.result) for found in done.results()] == [(0, 0.0), (1, None), (4, 2.0)]
    with Ledger.open(postgres_url) as ledger:
        job = ledger.job("kept")
        assert job.unkept_results() == 2
        assert [attempt.printed for attempt in job.history(3)] == ["at 3\n"]
    plain = headway.map(abs_or_none, [0, -1], job="plain", database=postgres_url, progress="none", workers=1)
    assert plain.done == 2
    headway.map(
        abs_or_none,
        [0, -1],
        job="plain",
        database=postgres_url,
        progress="none",
        workers=1,
        output=tmp_path / "a.jsonl",
    )
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert sorted((line["index"], line["result"]) for line in lines) == [(0, None), (1, 1)]


def test_a_run_that_lost_its_job_does_not_touch_the_file_that_its_successor_began_anew(tmp_path: Path):
    """Places in the file are those of the successor: what the earlier run wrote at its own would overwrite other lines."""
    path = tmp_path / "out.jsonl"
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        job = ledger.create("ads", max_retries=0)
        job.register([NewItem(idx, str(idx), None, None) for idx in range(4)])
        hold = ledger.hold(job, {})
        stopped = Output(job.held_by(hold), path)
        job.record([Done(0, None, '"long enough"'), Done(1, None, "1")], hold=hold)
        stopped.write()
        ledger.database.run(  # as if it had been stopped for a minute
            lambda tx: tx.execute(
                'UPDATE jobs SET lease_until = 0, holder = \'{"host": "x", "space": "", "pid": 1, "born": ""}\''
            )
        )
        successor = ledger.hold(job, {})
        own = job.held_by(successor)
        own.drop([0])
        own.rewrite_outputs()
        own.record([Done(2, None, "2")], hold=successor)
        output = Output(own, path)
        output.write()
        own.record([Done(3, None, "3")], hold=successor)
        before = path.read_bytes()
        with pytest.raises(StaleClaim):
            stopped.write()
        assert path.read_bytes() == before
        output.write()
        assert results(tmp_path) == [1, 2, 3]
        stopped.close()
        output.close()
