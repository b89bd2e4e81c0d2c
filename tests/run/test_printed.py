"""What an item printed: kept apart for each, bounded, with those that failed or with all, shown where one looks."""

# ruff: noqa: T201 - printing is what is tried here

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import headway
from headway.ledger import Ledger
from headway.run.output.capture import LIMIT, Captured

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

log = logging.getLogger("tests.printed")


def talk(n: int) -> None:
    print("one of", n)
    time.sleep(0.01)  # so that in threads the others print meanwhile
    print("two of", n, file=sys.stderr)
    log.warning("three of %d", n)
    if n % 2:
        raise ValueError("odd")


async def talk_async(n: int) -> None:
    print("one of", n)
    await asyncio.sleep(0.01)
    talk(n)


def talk_in_a_thread(n: int) -> None:
    thread = threading.Thread(target=print, args=("said elsewhere",))
    thread.start()
    thread.join()
    raise ValueError(str(n))


def flood(n: int) -> None:
    print(f"first of {n}")
    for _ in range(2000):
        print("x" * 1000)
    print("password=hunter2-canary")
    print("a nul \0 and half a character \udcff")
    print("last")
    raise ValueError("too much")


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """As `logging.basicConfig` makes one when a module is imported: it keeps the stream of that moment."""
    made = logging.StreamHandler(sys.stderr)
    log.addHandler(made)
    yield
    log.removeHandler(made)


def run(place: Path, function: Callable[[Any], Any], items: Any, **options: Any) -> dict[int, list[str | None]]:
    """What was kept of each item, run by run."""
    database = f"sqlite:///{place}/a.db"
    headway.map(
        function, items, job="p", database=database, progress="none", retries=0, last_pass=False, workers=4, **options
    )
    with Ledger.open(database) as ledger:
        job = ledger.job("p")
        return {idx: [attempt.printed for attempt in job.history(idx)] for idx in range(len(items))}


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_what_items_print_is_kept_apart_with_those_that_failed(tmp_path: Path, mode: str):
    kept = run(tmp_path, talk, range(8), mode=mode)
    for n in range(8):
        said = f"one of {n}\ntwo of {n}\nthree of {n}\n"
        assert kept[n] == [said if n % 2 else None]


def test_items_on_one_loop_are_kept_apart_too(tmp_path: Path):
    kept = run(tmp_path, talk_async, range(6))
    assert kept[3] == ["one of 3\none of 3\ntwo of 3\nthree of 3\n"]
    assert kept[2] == [None]


@pytest.mark.parametrize(("keep", "of_done", "of_failed"), [("all", True, True), ("none", False, False)])
def test_the_caller_says_of_which_items_it_is_kept(
    tmp_path: Path, keep: Literal["all", "none"], of_done: bool, of_failed: bool
):
    kept = run(tmp_path, talk, range(2), keep_output=keep)
    assert [bool(kept[0][0]), bool(kept[1][0])] == [of_done, of_failed]


def test_one_item_at_a_time_owns_what_its_threads_print(tmp_path: Path):
    assert run(tmp_path, talk_in_a_thread, range(1)) == {0: ["said elsewhere\n"]}


def test_of_much_output_head_and_tail_are_kept_without_secrets(tmp_path: Path):
    ((text,),) = run(tmp_path, flood, range(1)).values()
    assert text is not None
    assert text.startswith("first of 0\nxxx")
    assert text.endswith("half a character ?\nlast\n")
    assert "bytes left out" in text
    assert "hunter2-canary" not in text
    assert "\0" not in text
    assert len(text) < LIMIT + 1000


def test_a_bounded_text_holds_what_it_says():
    captured = Captured(10)
    captured.add(b"abc")
    assert (captured.text(), captured.whole, captured.last_line()) == ("abc", True, "abc")
    captured.add(b"de")
    captured.add(b"fg")
    assert captured.last_line() == "abcdefg", "the line goes on beyond the part that is kept as the head"
    captured = Captured(10)
    captured.add(b"abcde\nfghij")
    assert captured.text() == "abcde\n... 1 bytes left out ...\nfghij"
    for _ in range(1000):
        captured.add(b"0123456789\n")
    assert captured.text() == "abcde\n... 11,001 bytes left out ...\n6789\n"
    assert captured.last_line() == "6789"
    assert not captured.whole


def test_it_is_shown_with_the_item_and_with_its_cause(tmp_path: Path, headway_cli: Cli):
    (tmp_path / "items.txt").write_text("one\n")
    script = "echo working; echo cannot go on >&2; exit 3"
    command = (
        "run",
        "--items",
        "items.txt",
        "--job",
        "p",
        "--retries",
        "0",
        "--no-last-pass",
        "--",
        "sh",
        "-c",
        script,
    )
    assert headway_cli(*command, "sh", "{}").returncode == 3
    item = headway_cli("item", "p", "0").stdout
    assert "It printed:" in item
    assert "| working" in item
    assert "| cannot go on" in headway_cli("dead", "show", "p").stdout
    assert (
        '"printed": "--- stdout ---\\nworking\\n--- stderr ---\\ncannot go on\\n"'
        in headway_cli("dead", "export", "p").stdout
    )


def test_what_functions_print_still_goes_where_it_went(tmp_path: Path, headway_cli: Cli):
    (tmp_path / "jobs.py").write_text("def f(item):\n    print('hello', item)\n")
    (tmp_path / "items.txt").write_text("one\n")
    assert headway_cli("run", "jobs:f", "-i", "items.txt").stdout == "hello one\n"


def meddle(n: int) -> None:
    if n == 0:
        sys.stdout = io.StringIO()
    elif n == 1:
        with sys.stdout as stream:
            stream.write("within")
        sys.stderr.close()
    print("out", n)
    print("err", n, file=sys.stderr)
    raise ValueError(n)


def test_what_one_item_does_to_the_streams_is_no_other_items_trouble(tmp_path: Path):
    database = f"sqlite:///{tmp_path}/a.db"
    headway.map(
        meddle, [0, 1, 2], job="m", database=database, workers=1, retries=0, last_pass=False, progress="none"
    )  # fmt: skip
    with Ledger.open(database) as ledger:
        printed = [[run.printed for run in ledger.job("m").history(idx)] for idx in range(3)]
    assert printed == [["err 0\n"], ["withinout 1\nerr 1\n"], ["out 2\nerr 2\n"]]
