"""Where items come from: arrays, odd CSV, pipes that end early; and what a dry run says of them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.errors import InputChanged
from headway.ledger import Ledger
from headway.run import plan as plans
from headway.run.items import FileItems
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = """
import time

def echo(item):
    with open("executed", "a") as file:
        file.write(f"{item if not isinstance(item, dict) else item.get('id')}\\n")
    return item

def fails(item):
    echo(item)
    raise ValueError("no")

def slow(item):
    echo(item)
    time.sleep(0.05)
"""
RUN = ("run", "jobs:echo", "-j", "ads", "-w", "1")


@pytest.fixture(name="run_cli")
def _run_cli(quick_cli: Cli) -> Cli:
    return quick_cli


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(FUNCTIONS)
    return tmp_path


def outcome(place: Path) -> list[object]:
    lines = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    return [line["result"] for line in sorted(lines, key=lambda line: line["index"])]


def executed(place: Path) -> Counter[str]:
    file = place / "executed"
    return Counter(file.read_text().split()) if file.exists() else Counter()


# ---- tables and compressed files ------------------------------------------------------------------------------------


def test_a_tsv_file_has_a_header_and_is_divided_by_tabs_alone(place: Path, run_cli: Cli):
    (place / "items.tsv").write_text('id\tname, first\nx\tAnna\ny\t"Bert, C"\n')
    done = run_cli(*RUN, "--items", "items.tsv", "--key", "id", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert outcome(place) == [{"id": "x", "name, first": "Anna"}, {"id": "y", "name, first": "Bert, C"}]


CONTENTS = {
    "items.csv": "id,n\nx,1\ny,2\n",
    "items.tsv": "id\tn\nx\t1\ny\t2\n",
    "items.jsonl": '{"id": "x"}\n{"id": "y"}\n',
    "items.json": '[{"id": "x"}, {"id": "y"}]',
    "items.txt": "x\ny\n",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_compressed_by_gzip_is_the_same_items(place: Path, run_cli: Cli, name: str):
    (place / name).write_text(CONTENTS[name])
    (place / f"{name}.gz").write_bytes(gzip.compress(CONTENTS[name].encode()))
    plain, packed = FileItems(place / name), FileItems(place / f"{name}.gz")
    assert list(packed) == list(plain)
    assert packed.digest() == plain.digest() == packed.digest_read
    done = run_cli(*RUN, "--items", f"{name}.gz")
    assert done.returncode == 0, done.stderr
    assert executed(place) == Counter("xy")


def test_a_gzip_file_that_was_cut_is_refused_and_nothing_is_run(place: Path, run_cli: Cli):
    whole = gzip.compress("".join(f"{os.urandom(20).hex()}\n" for _ in range(20_000)).encode())
    (place / "items.txt.gz").write_bytes(whole[: len(whole) // 2])
    done = run_cli(*RUN, "--items", "items.txt.gz")
    assert (done.returncode, "damaged gzip file" in done.stderr) == (2, True)
    assert not executed(place)


@pytest.mark.parametrize(
    ("head", "hint"), [(b"PK\x03\x04\xff", "save it as CSV"), (b"BZh9\xff", "bzip2"), (b"\xe4\n", "iconv")]
)
def test_a_file_that_is_no_text_is_refused_with_what_to_do(place: Path, run_cli: Cli, head: bytes, hint: str):
    (place / "items.txt").write_bytes(head)
    done = run_cli(*RUN, "--items", "items.txt")
    assert (done.returncode, hint in done.stderr) == (2, True), done.stderr


def test_a_gzip_file_on_a_pipe_is_refused_with_what_to_do(place: Path, spawn_cli: Spawn):
    with open(place / "items.gz", "wb") as file:
        file.write(gzip.compress(b"x\ny\n"))
    with subprocess.Popen(["cat", place / "items.gz"], stdout=subprocess.PIPE) as cat:
        process = spawn_cli(*RUN, "--items", "-", stdin=cat.stdout)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "zcat" in errors) == (2, True), errors


# ---- arrays ---------------------------------------------------------------------------------------------------------

ARRAY = [{"id": "a"}, {"id": "b"}, 3, [4, 5]]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ARRAY),
        json.dumps(ARRAY, indent=2),
        "\n\n  " + json.dumps(ARRAY, indent=2) + "\n\n",
        "\ufeff" + json.dumps(ARRAY),
        json.dumps(ARRAY, indent=4).replace("\n", "\r\n"),
    ],
    ids=["one line", "pretty", "with blank lines", "with a mark", "of Windows"],
)
def test_the_elements_of_a_json_array_are_the_items(place: Path, run_cli: Cli, text: str):
    (place / "items.json").write_bytes(text.encode())
    done = run_cli(*RUN, "-i", "items.json", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert outcome(place) == ARRAY
    again = run_cli(*RUN, "-i", "items.json", "-o", "out.jsonl")
    assert "was finished already" in again.stderr


def test_a_json_file_with_a_value_on_each_line_is_read_by_lines(place: Path, run_cli: Cli):
    (place / "items.json").write_text('{"id": "a"}\n[3]\n')
    assert run_cli(*RUN, "-i", "items.json", "-o", "out.jsonl").returncode == 0
    assert outcome(place) == [{"id": "a"}, [3]]


def test_arrays_on_each_line_of_a_json_file_are_items_when_that_is_said(place: Path, run_cli: Cli):
    (place / "items.json").write_text("[1, 2]\n[3]\n")
    assert run_cli(*RUN, "-i", "items.json", "-o", "out.jsonl", "--format", "jsonl").returncode == 0
    assert outcome(place) == [[1, 2], [3]]


def test_an_array_in_a_file_of_another_name_is_asked_for_by_its_format(place: Path, run_cli: Cli):
    (place / "items.txt").write_text(json.dumps(ARRAY, indent=2))
    assert run_cli(*RUN, "-i", "items.txt", "--format", "json", "-o", "out.jsonl").returncode == 0
    assert outcome(place) == ARRAY


def test_in_a_jsonl_file_a_line_with_an_array_is_one_item(place: Path, run_cli: Cli):
    (place / "items.jsonl").write_text("[1, 2]\n")
    assert run_cli(*RUN, "-i", "items.jsonl", "-o", "out.jsonl").returncode == 0
    assert outcome(place) == [[1, 2]]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("broken.json", "[\n  1,\n  2\n", "broken.json, line 3: not JSON"),
        ("two.json", "[1,\n 2]\n\n[3]\n", "two.json, line 4: there is text after the end of the array"),
        ("more.json", "[1, 2] x", "more.json, line 1: there is text after the end of the array"),
        ("pretty.jsonl", "[\n  1\n]\n", "an array over several lines: name the file .json"),
        ("empty.json", "[]", "has no items"),
        ("key.json", '[{"id": 1},\n {"name": 2}]', "key.json, element 2: the item has no usable key"),
    ],
)
def test_a_bad_array_is_one_clear_error(place: Path, run_cli: Cli, name: str, text: str, said: str):
    (place / name).write_text(text)
    done = run_cli("run", "jobs:echo", "-i", name, *(("--key", "id") if name == "key.json" else ()))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (place / "headway.db").exists()


# ---- CSV and text ---------------------------------------------------------------------------------------------------


def test_a_column_that_is_there_twice_is_refused_by_its_name(place: Path, run_cli: Cli):
    (place / "rows.csv").write_text("id,price,price\n1,2,3\n")
    done = run_cli(*RUN, "-i", "rows.csv")
    assert done.returncode == 2
    assert "the column 'price' occurs twice" in done.stderr
    assert not (place / "headway.db").exists()


def test_a_long_field_is_taken_up_to_the_limit_of_an_item_and_beyond_it_the_error_says_what_to_do(
    place: Path, run_cli: Cli
):
    (place / "rows.csv").write_text(f"id,text\n1,{'x' * 200_000}\n")
    done = run_cli(*RUN, "-i", "rows.csv", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert outcome(place) == [{"id": "1", "text": "x" * 200_000}]
    (place / "rows.csv").write_text(f"id,text\n1,{'x' * 300_000}\n")
    refused = run_cli("run", "jobs:echo", "-i", "rows.csv")
    assert refused.returncode == 2
    assert "payload_limit" in refused.stderr


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("id;price\n1;2,50\n2;3,00\n", [{"id": "1", "price": "2,50"}, {"id": "2", "price": "3,00"}]),
        ("id\tnote\n1\ta;b,c\n", [{"id": "1", "note": "a;b,c"}]),
        ("id|note\n1|a,b\n", [{"id": "1", "note": "a,b"}]),
        ("id;price, EUR;note\n1;2,50;x\n", [{"id": "1", "price, EUR": "2,50", "note": "x"}]),
        ("id,a;b\n1,2;3\n", [{"id": "1", "a;b": "2;3"}]),
        ('"a;b"\n1;2\n', [{"a;b": "1;2"}]),
        ("id\n1;2\n", [{"id": "1;2"}]),
    ],
    ids=["semicolons", "tabs", "bars", "semicolons beside a comma", "commas", "a quoted header", "one column"],
)
def test_columns_are_divided_by_what_gives_the_header_most_of_them(
    place: Path, run_cli: Cli, text: str, rows: list[dict[str, str]]
):
    (place / "items.csv").write_text("\ufeff" + text)
    done = run_cli(*RUN, "-i", "items.csv", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert outcome(place) == rows


def test_a_row_of_another_length_says_what_divides_and_how_many_fields_it_has(place: Path, run_cli: Cli):
    (place / "items.csv").write_text("id;name\n1;a\n2;b;c;d\n")
    done = run_cli(*RUN, "-i", "items.csv")
    assert done.returncode == 2
    assert "line 3: 4 fields where the header has 2, divided by semicolons." in done.stderr


def test_the_six_characters_of_an_escaped_nul_are_a_text_like_any_other(place: Path, run_cli: Cli):
    (place / "items.jsonl").write_text(r'"a\\u0000b"' + "\n" + r'"\\\\u0000"' + "\n")
    done = run_cli(*RUN, "-i", "items.jsonl", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert outcome(place) == [r"a\u0000b", r"\\u0000"]
    (place / "nul.jsonl").write_text(r'"\\\u0000"' + "\n")
    assert "NUL" in run_cli(*RUN[:2], "-i", "nul.jsonl").stderr


def test_a_file_instead_of_a_module_gets_the_right_words_to_type(place: Path, run_cli: Cli):
    (place / "items.jsonl").write_text("1\n")
    done = run_cli("run", "jobs.py:echo", "-i", "items.jsonl")
    assert done.returncode == 2
    assert "Write jobs:echo" in done.stderr


def test_an_items_file_that_changes_while_it_is_registered_is_noticed(tmp_path: Path):
    path = tmp_path / "items.jsonl"
    path.write_text("1\n2\n3\n")
    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        plan = plans.compare(ledger, "ads", "jobs:echo", FileItems(path))
        path.write_text("1\n2\n4\n")
        job = ledger.create("ads")
        with pytest.raises(InputChanged, match="changed while they were being read"):
            plans.carry_out(ledger, job, plan, max_retries=2)
        assert job.info().sealed is False


def test_a_new_job_reads_its_file_twice_and_a_known_one_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "items.jsonl"
    path.write_text("1\n2\n3\n")
    reads: list[object] = []

    class Counted(FileItems):
        def __iter__(self):
            reads.append("items")
            return super().__iter__()

        def digest(self) -> str:
            reads.append("bytes")
            return super().digest()

    with Ledger.open(f"sqlite:///{tmp_path}/a.db") as ledger:
        plan = plans.compare(ledger, "ads", "jobs:echo", Counted(path))
        plans.carry_out(ledger, ledger.create("ads"), plan, max_retries=2)
        assert reads == ["items", "items"], "checked as a whole, then registered"
        plans.compare(ledger, "ads", "jobs:echo", Counted(path))
        assert reads[2:] == ["bytes"]


# ---- a pipe ---------------------------------------------------------------------------------------------------------


def test_a_pipe_that_ends_earlier_than_the_last_time_is_refused(place: Path, run_cli: Cli):
    items = "".join(f"{n}\n" for n in range(30))
    assert run_cli(*RUN, "-i", "-", stdin=items).returncode == 0
    shorter = run_cli(*RUN, "-i", "-", stdin="".join(f"{n}\n" for n in range(20)))
    assert shorter.returncode == 5, shorter.stderr
    assert "ended after 20 items, but job ads has 30" in shorter.stderr
    assert run_cli(*RUN, "-i", "-", stdin=items).returncode == 0, "the whole of it is taken again"
    assert executed(place) == Counter(str(n) for n in range(30))


def test_another_function_for_the_items_of_a_pipe_is_refused(place: Path, run_cli: Cli):
    assert run_cli(*RUN, "-i", "-", stdin="1\n2\n").returncode == 0
    other = run_cli("run", "jobs:slow", "-i", "-", "-j", "ads", stdin="1\n2\n")
    assert other.returncode == 5
    assert "jobs:echo" in other.stderr


def test_the_waits_that_the_user_chose_are_the_job_s_own_also_when_items_come_from_a_pipe(place: Path, run_cli: Cli):
    assert run_cli(*RUN, "-i", "-", stdin="1\n", env={"HEADWAY_RETRY_DELAY": "77"}).returncode == 0
    with Ledger.open(f"sqlite:///{place}/headway.db", create=False) as ledger:
        assert ledger.database.one("SELECT retry_base FROM jobs") == (77.0,)


# ---- a dry run ------------------------------------------------------------------------------------------------------


def write_items(place: Path, names: list[str], *, value: int = 0) -> None:
    (place / "items.jsonl").write_text("".join(json.dumps({"id": name, "v": value}) + "\n" for name in names))


NAMES = [f"p{n}" for n in range(10)]


def interrupt_after(place: Path, spawn_cli: Spawn, count: int, *arguments: str) -> None:
    run = spawn_cli(*arguments, stderr=subprocess.DEVNULL)
    eventually(lambda: sum(executed(place).values()) >= count, timeout=20)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130


def test_the_first_ones_of_a_dry_run_are_those_that_are_left(place: Path, run_cli: Cli, spawn_cli: Spawn):
    write_items(place, NAMES * 1)
    arguments = ("run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", "--key", "id", "-w", "1")
    interrupt_after(place, spawn_cli, 3, *arguments)
    finished = set(executed(place))
    dry = run_cli(*arguments, "--dry-run", "--json")
    facts = json.loads(dry.stdout)
    left = [name for name in NAMES if name not in finished]
    assert dry.returncode == 0
    assert (facts["to_do"], facts["kept"], facts["first_keys"]) == (len(left), len(finished), left[:3])


EDITS: dict[str, tuple[list[str], int]] = {
    "changed": (NAMES, 1),
    "gone": (NAMES[3:], 0),
    "new": ([*NAMES, "q0", "q1"], 0),
    "gone and new": (["q0", *NAMES[4:], "q1"], 0),
    "nothing": (NAMES, 0),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("key", [("--key", "id"), ()], ids=["by key", "by place"])
@pytest.mark.parametrize("accept", [("--accept-changes",), ()], ids=["accepted", "not accepted"])
def test_a_dry_run_foretells_what_the_same_command_does(
    place: Path, run_cli: Cli, edit: str, key: tuple[str, ...], accept: tuple[str, ...]
):
    arguments = ("run", "jobs:echo", "-i", "items.jsonl", "-j", "ads", "-w", "1", *key)
    write_items(place, NAMES)
    assert run_cli(*arguments).returncode == 0
    names, value = EDITS[edit]
    write_items(place, names, value=value)
    before = executed(place)
    dry = run_cli(*arguments, *accept, "--dry-run", "--json")
    facts = json.loads(dry.stdout)
    assert executed(place) == before
    real = run_cli(*arguments, *accept, "--json")
    assert dry.returncode == real.returncode, (dry.stderr, real.stderr)
    if real.returncode == 0:
        assert facts["to_do"] == sum((executed(place) - before).values())
        assert facts["kept"] == json.loads(real.stdout)["kept"]
        assert facts["first_keys"][:1] in (
            [],
            *([name] for name in executed(place) - before),
            *([str(n)] for n in range(20)),
        )


def test_a_dry_run_ends_with_3_where_the_dead_stay_dead(place: Path, run_cli: Cli):
    write_items(place, NAMES)
    arguments = ("run", "jobs:fails", "-i", "items.jsonl", "-j", "ads", "--retries", "0")
    assert run_cli(*arguments).returncode == 3
    dry = run_cli(*arguments, "--dry-run")
    assert dry.returncode == 3
    assert "Nothing is left to do" in dry.stderr


def test_a_dry_run_is_refused_where_the_real_one_would_be(place: Path, run_cli: Cli, spawn_cli: Spawn):
    write_items(place, NAMES * 1)
    (place / "precious").write_text("mine")
    arguments = ("run", "jobs:slow", "-i", "items.jsonl", "-j", "ads", "-w", "1")
    assert run_cli(*arguments, "-o", "precious", "--dry-run").returncode == 2
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(2000)))
    run = spawn_cli(*arguments, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: executed(place), timeout=20)
        assert run_cli(*arguments, "--dry-run").returncode == 5
    finally:
        os.kill(run.pid, signal.SIGINT)
        run.wait(30)


def test_a_pipe_without_line_breaks_is_refused_before_it_fills_the_memory(place: Path, run_cli: Cli):
    endless = run_cli(*RUN, "-i", "-", stdin="1\n" + 20_000 * "x", env={"HEADWAY_PAYLOAD_LIMIT": "1000"})
    assert endless.returncode == 2
    assert "line 2: 20,000 bytes without a line break; an item may have 1,000" in endless.stderr


@pytest.mark.parametrize("given", ["< /dev/null", "<&-", "< /dev/zero"])
def test_where_nobody_pipes_anything_in_it_is_said_and_nothing_is_written(place: Path, given: str):
    """As under cron or a service."""
    command = f"exec {sys.executable} -m headway run jobs:echo --items - --job a {given}"
    done = subprocess.run(["sh", "-c", command], cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "no items on standard input" in done.stderr
    assert not (place / "headway.db").exists()


@pytest.mark.parametrize("text", ['{"id": 1}\n{"id": 2}\n', "\n [1]\n[2]\n", "1\nx\n"])
def test_a_file_on_standard_input_has_the_items_that_a_pipe_of_it_has(place: Path, run_cli: Cli, text: str):
    (place / "file").write_text(text)
    for job, given in (("piped", "cat file |"), ("redirected", "< file")):
        command = f"{given} {sys.executable} -m headway run jobs:echo -i - -j {job} -o {job}.jsonl"
        done = subprocess.run(["sh", "-c", command], cwd=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert sorted((place / "piped.jsonl").open()) == sorted((place / "redirected.jsonl").open())


def test_spaces_around_a_line_of_a_pipe_are_part_of_it_as_in_a_file(place: Path, run_cli: Cli):
    lines = " a\nb \n  \n\tc\r\n"
    (place / "items.txt").write_text(lines)
    assert run_cli(*RUN, "-i", "items.txt", "-o", "out.jsonl").returncode == 0
    assert run_cli(*RUN[:2], "-j", "piped", "-i", "-", "-o", "piped.jsonl", stdin=lines).returncode == 0
    piped = [json.loads(line)["result"] for line in (place / "piped.jsonl").read_text().splitlines()]
    assert sorted(piped) == sorted(map(str, outcome(place))) == ["\tc", " a", "b "]
