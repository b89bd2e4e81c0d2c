"""Ids that come from outside."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.core.ids import check_id
from headway.errors import InvalidInput


@given(st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True))
def test_a_well_formed_id_is_accepted_unless_it_is_reserved(text: str):
    if text in (".", "..") or re.fullmatch(r"__.*__", text):
        with pytest.raises(InvalidInput):
            check_id(text, "a job id")
    else:
        assert check_id(text, "a job id") == text


@given(st.text(max_size=200))
@example("ads\n")
@example("a" * 129)
@example("../../etc/passwd")
@example("job:1")
@example("é")
@example("\u0661")  # a digit, but no ASCII one
def test_nothing_else_passes(text: str):
    fits = len(text) in range(1, 129) and all(c.isascii() and (c.isalnum() or c in "._-") for c in text)
    if fits:
        return
    with pytest.raises(InvalidInput) as caught:
        check_id(text, "a job id")
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 120
    assert "\n" not in str(caught.value)


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [None, 5, True, b"ads", ["ads"], 10**5000, Hostile()], ids=lambda v: type(v).__name__)
def test_an_id_that_is_not_a_text_is_refused(value: object):
    with pytest.raises(InvalidInput, match=type(value).__name__):
        check_id(value, "a job id")
