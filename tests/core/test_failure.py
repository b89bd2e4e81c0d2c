"""From exceptions to causes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from headway.core.failure import DETAIL_LIMIT
from headway.ledger import describe, normalise
from tests.services.tracing import untraced_environment


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "GET https://store.internal/docs/inv-00421.pdf timed out",
            "GET https://store.internal/docs/{id}.pdf timed out",
        ),
        ("xref table not found at offset 81231", "xref table not found at offset {n}"),
        ("'page_count'", "'page_count'"),
        ("user 550e8400-e29b-41d4-a716-446655440000 is gone", "user {id} is gone"),
        ("at 2026-11-15T14:02:11Z and 2026-11-15", "at {time} and {time}"),
        ("object at 0x7f3a91b2c4d0", "object at {address}"),
        ("commit deadbeef12 not found", "commit {id} not found"),
        ("took 1.5 s, not -3", "took {n} s, not {n}"),
        ("two\n  lines", "two lines"),
        ("no price", "no price"),
    ],
)
def test_parts_that_vary_between_items_are_replaced(message: str, cause: str):
    assert normalise(message) == cause


@pytest.mark.parametrize(
    "message",
    [
        "the server answered {n}",
        "HTTP {n}",
        "HTTP/1.1 {n} Service Unavailable",
        "HTTP Error {n}: Not Found",
        "{n} Client Error: Too Many Requests for url: https://x.example/a",
        "status code: {n}",
        "status={n}",
        "[Errno {n}] it failed",
        "(errno {n})",
        "exit code {n}",
        "exit status {n}.",
        "returned non-zero exit status {n}.",
        "exited with code {n}",
        "killed by signal {n}",
        "error {n} from the driver",
        "SQLSTATE {n}00",
        "SQLSTATE[{n}00]",
        "({n}, 'Lock wait timeout exceeded')",
        "rc={n}",
        "returncode -{n}",
        "{n} schema v1",
        "{n}: quota exceeded",
    ],
)
def test_an_error_code_separates_causes(message: str):
    causes = {normalise(message.replace("{n}", number)) for number in ("404", "429", "500")}
    assert len(causes) == 3
    assert {cause.count("{n}") for cause in causes} == {0}


@pytest.mark.parametrize(
    "message",
    [
        "row {n} is bad",
        "line {n}, column {n}",
        "returned {n} rows",
        "got {n} bytes of {n}",
        "offset {n}",
        "after {n} s",
        "took {n}.5 ms",
        "item {n} not found",
        "status of item {n}",
        "user {n}: no such user",
        "port {n}",
        "10.0.0.{n}:5432 is away",
        "error at {n}",
        "error 1{n}000{n}",
        "inv-{n}.pdf",
        "expected {n} columns",
        "{n} is not a price",
        "{n} rows are missing",
        "{n}",
    ],
)
def test_a_number_that_varies_between_items_does_not_separate_causes(message: str):
    assert len({normalise(message.replace("{n}", number)) for number in ("404", "429", "500")}) == 1


def test_the_items_key_is_replaced_in_every_form():
    assert normalise("no stock for garden chair", "garden chair") == "no stock for {id}"


def test_versions_make_causes_of_their_own():
    assert normalise("422 schema v1") == "422 schema v1"
    assert normalise("schema v2 is not known") == "schema v2 is not known"
    assert normalise("API v2.1 has ended") == "API v2.1 has ended"


def test_keys_of_digits_are_one_cause_at_any_length():
    assert {normalise(f"no price for row {key}", key) for key in ("7", "42", "123", "45678")} == {
        "no price for row {n}"
    }


def test_messages_of_like_failures_are_the_same_cause():
    assert len({normalise(f"row {n} of file-{n}.csv: bad value {n * 3.7:.2f}") for n in range(50)}) == 1


def test_an_exception_is_described_by_type_message_own_frame_and_traceback():
    def make_ad() -> None:
        json.loads("{")

    with pytest.raises(ValueError, match="Expecting") as caught:
        make_ad()
    failure = describe(caught.value)
    assert failure.type == "JSONDecodeError"
    assert failure.message.startswith("Expecting property name")
    assert failure.frame == "test_failure.py:make_ad", "the innermost frame of the user's code, not the library's"
    assert "json/decoder.py" in (failure.detail or "")


@pytest.mark.req("S3-42")
def test_secrets_are_out_of_message_and_traceback():
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("login failed for password=canary-one at postgresql://u:canary-two@db/x")
    failure = describe(caught.value)
    assert "canary" not in failure.message + (failure.detail or "")
    assert "login failed" in failure.message


class RaisingStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class InterruptedStr(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class ExitingStr(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class StrOfAnotherType(Exception):
    def __str__(self) -> str:
        answer: Any = 3
        return answer  # type: ignore[no-any-return]  # on purpose


class OwnText(str):
    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError

    def __format__(self, _: str) -> str:
        raise RuntimeError


class StrOfOwnText(Exception):
    def __str__(self) -> str:
        return OwnText("said")


class RecursiveStr(Exception):
    def __str__(self) -> str:
        return str(self)


class NoMemoryStr(Exception):
    def __str__(self) -> str:
        raise MemoryError


class NoAttribute(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt


class LyingClass(Exception):
    @property  # type: ignore[misc]  # on purpose
    def __class__(self) -> Any:
        raise SystemExit

    def __repr__(self) -> str:
        raise SystemExit


class RaisingNotes(Exception):
    __notes__ = property(lambda _: 1 / 0)


class NotesOfAnything(Exception):
    def __init__(self) -> None:
        super().__init__("noted")
        notes: list[Any] = [OwnText("x"), 3, None, "kept note", "y" * 10**6]
        self.__notes__ = notes


class OwnBase(BaseException):
    pass


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (RaisingStr, "(its message cannot be shown)"),
        (InterruptedStr, "(its message cannot be shown)"),
        (ExitingStr, "(its message cannot be shown)"),
        (StrOfAnotherType, "(its message cannot be shown)"),
        (StrOfOwnText, "said"),
        (RecursiveStr, "(its message cannot be shown)"),
        (NoMemoryStr, "(its message cannot be shown)"),
        (NoAttribute, ""),
        (LyingClass, ""),
        (RaisingNotes, ""),
        (NotesOfAnything, "noted"),
        (OwnBase, ""),
        (KeyboardInterrupt, ""),
        (MemoryError, ""),
    ],
)
def test_a_hostile_exception_is_still_described(kind: type[BaseException], message: str):
    def work() -> None:
        raise kind

    try:
        work()
    except BaseException as error:  # noqa: BLE001 - it is described
        failure = describe(error)
    assert failure.type == type.__getattribute__(kind, "__name__")
    assert failure.message == message
    assert failure.frame == "test_failure.py:work"
    assert "in work" in (failure.detail or "")
    assert failure.type in (failure.detail or "")


def test_a_class_that_cannot_even_be_asked_for_its_name_is_described():
    class Silent(type):
        def __getattribute__(cls, name: str) -> Any:
            raise MemoryError

    class Odd(Exception, metaclass=Silent):
        pass

    failure = describe(Odd("said"))
    assert (failure.type, failure.message) == ("Odd", "said")


def test_a_few_members_of_a_group_and_notes_are_described():
    error = ExceptionGroup("many", [ValueError(f"no {n}") for n in range(100_000)])
    error.add_note("seen at night")
    failure = describe(error)
    assert failure.type == "ExceptionGroup"
    detail = failure.detail or ""
    assert "seen at night" in detail
    assert "  1. ValueError: no 0" in detail
    assert "and 99995 more" in detail


def test_a_group_inside_groups_without_end_is_described():
    error: Exception = ValueError("the innermost")
    for _ in range(50_000):
        error = ExceptionGroup("outer", [error])
    assert describe(error).type == "ExceptionGroup"
    while isinstance(error, ExceptionGroup):  # so deep that releasing it at once might overflow the stack
        error = error.exceptions[0]


def test_causes_that_go_in_circles_or_on_for_ever_are_cut():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    detail = describe(first).detail or ""
    assert detail.index("KeyError: 'second'") < detail.index("ValueError: first")
    assert detail.count("ValueError: first") == 1

    last: BaseException = ValueError("0")
    for number in range(100_000):
        following = ValueError(str(number))
        following.__context__ = last
        last = following
    detail = describe(last).detail or ""
    assert detail.count("During handling") == 5
    assert detail.endswith("ValueError: 99999\n")
    while last.__context__ is not None:
        last, last.__context__ = last.__context__, None


def test_a_cause_is_described_before_its_effect():
    def load() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("cannot load") from error

    with pytest.raises(RuntimeError) as caught:
        load()
    detail = describe(caught.value).detail or ""
    assert detail.index("JSONDecodeError") < detail.index("direct cause") < detail.index("RuntimeError: cannot load")


def test_a_recursion_without_end_is_described_where_it_is_caught():
    def down() -> None:
        down()

    with pytest.raises(RecursionError) as caught:
        down()
    failure = describe(caught.value)
    assert failure.type == "RecursionError"
    assert failure.frame == "test_failure.py:down"
    assert "Previous line repeated" in (failure.detail or "")


def test_describing_at_the_very_end_of_the_stack_gives_at_least_something():
    """In a process without a tracer, whose own frame would be the one that finds no room."""
    code = (
        "from headway.core.failure import describe\n"
        "described, escaped = [], []\n"
        "def down():\n"
        "    try:\n"
        "        down()\n"
        "    except RecursionError as error:\n"
        "        try:\n"
        "            described.append(describe(error))\n"
        "        except RecursionError as another:\n"
        # There may be no room to call it at all; once it is entered, nothing comes out of it.
        "            if another.__traceback__.tb_next is not None:\n"
        "                escaped.append(another)\n"
        "        raise\n"
        "try:\n"
        "    down()\n"
        "except RecursionError:\n"
        "    pass\n"
        "assert escaped == [], escaped\n"
        "assert {failure.type for failure in described} <= {'RecursionError', 'Exception'}, described\n"
        "assert described[-1].type == 'RecursionError', described[-1]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=untraced_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.req("S3-42")
def test_ten_megabytes_of_message_cost_hardly_more_than_a_line():
    def seconds(size: int) -> float:
        error = ValueError("login with password=canary failed\n" * (size // 33))
        began = time.process_time()
        failure = describe(error)
        assert "canary" not in failure.message + (failure.detail or "")
        assert len(failure.message) <= 300
        return time.process_time() - began

    small, large = (min(seconds(size) for _ in range(3)) for size in (20_000, 10_000_000))
    assert large < 10 * small + 0.05, f"{large:.3f} s, and {small:.3f} s for 20 KB"


def test_no_memory_left_while_describing_is_survived():
    """In a process of its own with a limit on its memory: the message alone takes more than there is."""
    code = (
        "import resource\n"
        "from headway.ledger import describe\n"
        "describe(ValueError('warm'))\n"
        "class Big(Exception):\n"
        "    def __str__(self): return 'x' * 2**33\n"
        "limit = 2**30\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "failure = describe(Big())\n"
        "assert failure.type == 'Big', failure\n"
        "assert failure.message == '(its message cannot be shown)', failure\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_type_tells_that_two_bare_strings_are_a_user_and_a_password():
    class AuthError(Exception):
        pass

    failure = describe(AuthError("ann", "hunter"))
    assert failure.message == "('ann', ***)"
    assert "hunter" not in (failure.detail or "")


def test_a_long_traceback_is_bounded_and_keeps_its_end():
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise ValueError("x" * 10_000)

    with pytest.raises(ValueError, match="x") as caught:
        deep(50)
    failure = describe(caught.value)
    assert len(failure.detail or "") <= DETAIL_LIMIT + 10
    assert len(failure.message) < 400


def test_text_no_store_could_keep_is_made_storable():
    failure = describe(ValueError("lone \ud800 and nul \0"))
    failure.message.encode()
    assert "\0" not in failure.message
