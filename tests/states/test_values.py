"""What may be stored: refused with the same words everywhere, and nothing written."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import InvalidInput
from headway.states import LiveStore, Manager, State, open_store
from headway.states.state import DEPTH_LIMIT, MESSAGE_LIMIT, PAYLOAD_LIMIT, checked, storable
from tests.states.conftest import Place

BAD_IDS = ["", "/", "a/b", ".", "..", "__x__", "a\0b", "\ud800", "x" * 129, "a b", "ä", "*", "{x}", "a:b", 7, None]
BAD_STATUSES = [2**31, -(2**31) - 1, 1.0, True, "1", None]
DEEP: dict[str, Any] = {}
for _ in range(DEPTH_LIMIT + 1):
    DEEP = {"deeper": DEEP}
BAD_PAYLOADS = [
    [1],
    "text",
    {1: 2},
    {"": 1},
    {"__x__": 1},
    {"a": math.nan},
    {"a": -math.inf},
    {"a": 2**63},
    {"a": {1, 2}},
    {"a": b"bytes"},
    {"a": [[1]]},
    {"a": "\0"},
    {"a": "\udfff"},
    {"a": object()},
    {"a": "x" * PAYLOAD_LIMIT},
    DEEP,
]


def shown(value: object) -> str:
    return ascii(value)[:40]


@pytest.mark.req("S1-03", "S1-05", "S1-01")
def test_every_store_refuses_the_same_with_one_clear_error_and_writes_nothing(store: LiveStore):
    good = State("job", 0, "a")
    bad = [
        *[State("job", task, "a") for task in (3, -1, True, 0.0, "0", None)],  # type: ignore[arg-type]
        *[State("job", 0, tag) for tag in BAD_IDS],  # type: ignore[arg-type]
        *[State("job", 0, "a", status) for status in BAD_STATUSES],  # type: ignore[arg-type]
        *[State("job", 0, "a", payload=payload) for payload in BAD_PAYLOADS],  # type: ignore[arg-type]
        *[State("job", 0, "a", message=text) for text in ("\0", "\ud83d", "x" * (MESSAGE_LIMIT + 1), 7)],  # type: ignore[arg-type]
        *[State("job", 0, "a", event_id=name) for name in BAD_IDS[1:-2]],  # type: ignore[arg-type]
        *[State("job", 0, "a", schema_version=number) for number in (0, -1, 2**31, "1", True)],  # type: ignore[arg-type]
        State("other", 0, "a"),
    ]
    for state in bad:
        with pytest.raises(InvalidInput):
            store.set_state(state)
    assert store.list_all_states() == []
    assert store.set_state(good).version == 1


@pytest.mark.req("S1-03")
@pytest.mark.parametrize("status", [-(2**31), -3, -1, 0, 1, 2**31 - 1])
def test_every_status_of_32_bits_is_kept(status: int):
    store, _ = open_store("sqlite:///:memory:", "job", 1)
    assert store.set_state(State("job", 0, "a", status)).status == status
    store.close()


@pytest.mark.parametrize("job_id", BAD_IDS, ids=shown)
def test_a_job_id_no_store_could_keep_is_refused_before_anything_is_opened(job_id: Any, tmp_path: Any):
    with pytest.raises(InvalidInput, match="cannot be a job id"):
        open_store(f"sqlite:///{tmp_path}/x.db", job_id, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.req("S1-01")
@pytest.mark.parametrize("num_tasks", [0, -1, 1.0, "3", True, 10**9])
def test_a_job_has_at_least_one_task_and_a_whole_number_of_them(num_tasks: Any, tmp_path: Any):
    with pytest.raises(InvalidInput, match="number of tasks"):
        open_store(f"sqlite:///{tmp_path}/x.db", "job", num_tasks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.req("S1-59")
def test_an_address_that_is_no_store_is_refused_with_the_forms_there_are():
    with pytest.raises(InvalidInput) as caught:
        open_store("mysql://u:hunter22@h/db", "job", 1)
    assert "firestore://PROJECT" in caught.value.hint
    assert "hunter22" not in str(caught.value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.dictionaries(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
                lambda name: not (name.startswith("__") and name.endswith("__"))
            ),
            inner,
            max_size=3,
        )
        | st.lists(inner.filter(lambda value: not isinstance(value, list)), max_size=3)
    ),
    max_leaves=8,
)
payloads = st.dictionaries(st.from_regex(r"[a-zA-Z.*/ é-]{1,8}", fullmatch=True), json_values, max_size=3)


@pytest.mark.req("S1-08")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload=payloads,
    status=st.integers(-(2**31), 2**31 - 1),
    message=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40),
    tag=st.from_regex(r"[A-Za-z0-9.-]{3,20}", fullmatch=True),
)
def test_whatever_passes_the_edge_comes_back_from_every_store(
    store: LiveStore, payload: Any, status: int, message: str, tag: str
):
    stored = store.set_state(State("job", 0, tag, status, message, payload=payload))
    again = store._backend.read_all(store.record, None).states
    found = next(state for state in again if state.key == (0, tag))
    assert found == stored
    assert (found.status, found.message, found.payload) == (status, message, payload)


@settings(max_examples=300)
@given(text=st.text())
def test_text_is_accepted_or_refused_by_one_rule_wherever_it_stands(text: str):
    clean = "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
    for state in (State("job", 0, "a", message=text), State("job", 0, "a", payload={"t": text})):
        if clean:
            assert checked(state, 1).status == 0
        else:
            with pytest.raises(InvalidInput):
                checked(state, 1)
    assert checked(State("job", 0, "a", message=storable(text)), 1).message == storable(text)


def test_an_error_whose_text_no_store_could_keep_is_still_reported(place: Place):
    manager = Manager("job", 0, 3, place.open())
    stored = manager.set_error(OSError("cannot open '\udcff\0': " + "x" * 10_000), "a")
    assert stored.message.startswith("\U0001f534 cannot open '?�'")
    assert len(stored.message) == MESSAGE_LIMIT


def test_a_secret_in_an_error_is_not_stored(place: Place):
    stored = Manager("job", 0, 3, place.open()).set_error(ValueError("postgresql://u:hunter22@h/db is away"), "a")
    assert "hunter22" not in stored.message
