"""What may be stored: refused with the same words everywhere, and nothing written."""

from __future__ import annotations

import math
import os
import random
from enum import Enum, IntEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import InvalidInput
from headway.states import LiveStore, Manager, State, open_store
from headway.states.state import DEPTH_LIMIT, MESSAGE_LIMIT, PAYLOAD_LIMIT, checked, storable
from tests.states.conftest import Place, replayed

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
def test_an_invalid_address_is_refused_with_the_supported_forms():
    with pytest.raises(InvalidInput) as caught:
        open_store("mysql://u:hunter22@h/db", "job", 1)
    assert "firestore://PROJECT" in caught.value.hint
    assert "hunter22" not in str(caught.value)


@pytest.mark.req("S1-54")
def test_event_ids_differ_also_where_programs_seed_their_random_numbers_or_fork():
    def made() -> str:
        random.seed(1)
        return checked(State("job", 0, "a"), 1).event_id

    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, made().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert len({made(), made(), os.read(reading, 100).decode()}) == 3
    os.close(reading)
    os.close(writing)


class Phase(IntEnum):
    LOADING = 5


class Stream(str, Enum):  # noqa: UP042  (unlike a StrEnum it has another text than its value)
    INGEST = "ingest"


class Weight(float):
    pass


@pytest.mark.req("S1-03", "S1-08")
def test_members_of_enumerations_are_stored_and_found_as_the_plain_values_they_are(store: LiveStore):
    manager = Manager("job", 0, 3, store)
    sent = State("job", 0, Stream.INGEST, Phase.LOADING, Stream.INGEST, payload={
        "phase": Phase.LOADING, Stream.INGEST: [Stream.INGEST, Weight(0.5)],
    })  # fmt: skip
    stored = store.set_state(sent)
    assert [type(found) for found in (stored.tag, stored.status, stored.message)] == [str, int, str]
    assert stored.payload == {"phase": 5, "ingest": ["ingest", 0.5]}
    again = manager.set_state("ingest", status=6, event_id=Stream.INGEST)
    assert again.version == 2, "one key, whichever way its tag is written"
    assert type(again.event_id) is str
    assert len(store.list_all_states()) == 1
    assert manager.get_state(task_id=0, tag=Stream.INGEST) == again
    assert store.get_state(0, Stream.INGEST) == again
    with manager.subscribe(tag=Stream.INGEST) as subscription:
        assert [state.version for state in replayed(subscription)] == [2]


def test_an_enumeration_as_job_and_number_of_tasks_is_the_same_job(place: Place):
    class Job(str, Enum):  # noqa: UP042  (as above)
        NIGHTLY = "nightly"

    class Size(IntEnum):
        SMALL = 3

    store = place.open(Job.NIGHTLY, Size.SMALL)
    assert (type(store.job_id), store.job_id, type(store.num_tasks)) == (str, "nightly", int)
    assert Manager(Job.NIGHTLY, 0, Size.SMALL, store).set_started("a").job_id == "nightly"


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), Phase(5), object(), "x" * 10_000],
    ids=["huge", "tiny", "enumeration", "object", "text"],
)
def test_a_refusal_is_immediate_and_short(value: Any):
    for state in (State("job", value, "a"), State("job", 0, "a", value), State("job", 0, "a", schema_version=value)):
        if isinstance(value, Phase) and state.task_id == 0:
            continue  # a number like any other
        with pytest.raises(InvalidInput) as caught:
            checked(state, 3)
        assert len(str(caught.value)) < 200


def test_an_error_that_cannot_say_itself_is_still_reported(place: Place):
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        @property
        def status_code(self) -> int:
            raise RuntimeError("no number either")

    stored = Manager("job", 0, 3, place.open()).set_error(Mute(), "a")
    assert (stored.status, stored.message) == (-1, "\U0001f534 Mute")


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
def test_every_accepted_state_is_returned_by_every_store(
    store: LiveStore, payload: Any, status: int, message: str, tag: str
):
    stored = store.set_state(State("job", 0, tag, status, message, payload=payload))
    again = store._backend.read_all(store.record, None).states
    found = next(state for state in again if state.key == (0, tag))
    assert found == stored
    assert (found.status, found.message, found.payload) == (status, message, payload)


@settings(max_examples=300)
@given(text=st.text())
def test_one_rule_decides_on_text_in_every_field(text: str):
    clean = "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
    for state in (State("job", 0, "a", message=text), State("job", 0, "a", payload={"t": text})):
        if clean:
            assert checked(state, 1).status == 0
        else:
            with pytest.raises(InvalidInput):
                checked(state, 1)
    assert checked(State("job", 0, "a", message=storable(text)), 1).message == storable(text)


def test_of_an_error_of_megabytes_only_both_ends_are_read_and_kept():
    with Manager("job", 0, 1, open_store("sqlite:///:memory:", "job", 1)[0]) as manager:
        text = "begun with this; " + "x " * 1_000_000 + "; ended with this"
        for stored in (manager.set_error(ValueError(text), "a"), manager.set_warning(text, "a")):
            assert MESSAGE_LIMIT // 2 < len(stored.message) <= MESSAGE_LIMIT
            assert stored.message[2:].startswith("begun with this")
            assert f"({len(text)} characters)" in stored.message
            assert stored.message.endswith("ended with this")


@pytest.mark.parametrize("payload", ["text", 5, [1]])
def test_a_payload_that_is_no_object_is_refused_in_the_same_words_by_an_error_after_some_progress(payload: Any):
    with Manager("job", 0, 1, open_store("sqlite:///:memory:", "job", 1)[0]) as manager:
        manager.set_started("a")
        for report in (manager.set_error, manager.set_warning):
            with pytest.raises(InvalidInput, match="A payload is a JSON object"):
                report("broken", "a", payload=payload)


def test_an_error_whose_text_no_store_could_keep_is_still_reported(place: Place):
    manager = Manager("job", 0, 3, place.open())
    stored = manager.set_error(OSError("cannot open '\udcff\0': " + "x" * 10_000), "a")
    assert stored.message.startswith("\U0001f534 cannot open '?�'")
    assert MESSAGE_LIMIT // 2 < len(stored.message) <= MESSAGE_LIMIT


def test_a_secret_in_an_error_is_not_stored(place: Place):
    stored = Manager("job", 0, 3, place.open()).set_error(ValueError("postgresql://u:hunter22@h/db is away"), "a")
    assert "hunter22" not in stored.message
