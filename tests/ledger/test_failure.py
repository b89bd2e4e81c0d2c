"""From exceptions to causes."""

from __future__ import annotations

import json

import pytest

from headway.ledger import describe, normalise
from headway.ledger.values import DETAIL_LIMIT


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
def test_what_differs_between_items_is_replaced(message: str, cause: str):
    assert normalise(message) == cause


def test_the_items_own_key_is_replaced_whatever_it_looks_like():
    assert normalise("no stock for garden chair", "garden chair") == "no stock for {id}"


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


def test_an_exception_that_cannot_be_shown_is_still_a_fault():
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Broken()).message == "(its message cannot be shown)"


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
