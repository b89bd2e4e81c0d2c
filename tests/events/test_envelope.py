"""The envelope: JSON that every parser takes, and a schema for each type that holds for everything the code decides."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, get_args

import pytest

import headway
from headway import events
from headway._sql import connect
from headway.errors import InvalidInput, NotFound
from headway.events import CallableSink, Event, Relay, SqlOutbox, append
from headway.events.envelope import plain
from headway.finishline import FinishLine
from headway.ledger import Ledger, ProgressManager
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.watcher import EventForm, Publisher
from headway.watcher.publisher import OUTCOMES
from headway.watcher.reports import Kind, Report
from tests.core.databases import everywhere
from tests.events.scene import event
from tests.events.validator import problems
from tests.services.redis import RedisServer
from tests.watcher.fakes import FakeRedis

ROOT = Path(__file__).parents[2]


def check(found: Event, type: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(found.as_json())
    assert list(problems(told, events.schema(type))) == []
    return told


# ---- every event the code can decide ----------------------------------------------------------------------------------


@pytest.fixture
def heard() -> list[Event]:
    return []


def test_events_of_map_open_job_and_the_progress_manager_match_the_schema(tmp_path: Path, heard: list[Event]):
    database = f"sqlite:///{tmp_path}/headway.db"
    headway.map(abs, [1, "x"], job="mapped", retries=0, database=database, progress="none", on_complete=heard.append)
    with headway.open_job("opened", [1], database=database) as job:
        for item in job.remaining():
            with item:
                pass
    with ProgressManager(tmp_path / "headway.db") as progress:
        progress.register([0, 1])
        progress.mark_done(0)
        progress.mark_done(1)
    with Ledger.open(database) as ledger:
        Relay(SqlOutbox(ledger.database), [CallableSink("all", heard.append)]).tick()
    told = [check(found, "job.completed") for found in heard]
    assert {one["job"]: one["data"] for one in told} == {
        "mapped": {"total": 2, "succeeded": 1, "failed": 1},
        "opened": {"total": 1, "succeeded": 1, "failed": 0},
        "progress": {"total": 2, "succeeded": 2, "failed": 0},
    }


def test_events_of_the_finish_line_match_the_schema(redis_server: RedisServer, heard: list[Event]):
    with FinishLine(redis_server.url(1)) as line:
        line.create("p", total=3)
        line.items_done("p", [1, 2])
        line.item_failed("p", 3, "404")
        line.relay([CallableSink("s", heard.append)]).tick()
    [found] = heard
    assert check(found, "job.completed")["data"] == {"total": 3, "succeeded": 2, "failed": 1}


def test_events_of_the_queue_match_the_schemas(tmp_path: Path, heard: list[Event]):
    with TaskQueue(f"sqlite:///{tmp_path}/q.db") as queue:
        queue.handler("caption", retries=0, isolation="none")(lambda task, payload: 1 / payload)
        tasks = [queue.submit("caption", payload, user_id=f"u{payload}") for payload in (1, 0)]
        queue.cancel(queue.submit("caption", 2).id, by="admin")
        Worker(queue).run(burst=True)
        Relay(SqlOutbox(queue.database), [CallableSink("all", heard.append)]).tick()
    told = [check(found, found.type) for found in heard]
    assert {one["type"] for one in told} == {type for type in events.TYPES if type.startswith("task.")}
    assert [one["type"] for one in told if one["job"] == tasks[1].id] == ["task.queued", "task.running", "task.failed"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_events_of_the_watcher_match_the_schema(kind: Kind):
    publisher = Publisher(FakeRedis(), EventForm(fields={"region": "eu"}), "channel")
    report = Report(
        "j-1", kind, "system", "it broke", "x-1", datetime(2026, 11, 1, tzinfo=UTC), error_type="ValueError"
    )
    type = "digits.train.outcome.v1" if kind in OUTCOMES else "digits.train.failed.v1"
    found = publisher.event("digits", report)
    assert found.type == type
    check(found, type)
    other = set(events.TYPES) - {"job.completed", type}
    assert list(problems(json.loads(found.as_json()), events.schema(other.pop())))  # a kind belongs to one of the two


def test_the_published_schemas_are_those_of_the_package_and_the_page_lists_every_type():
    folder = ROOT / "docs" / "reference" / "schemas"
    assert {path.stem for path in folder.glob("*.json")} == set(events.TYPES)
    page = (ROOT / "docs" / "reference" / "events.md").read_text("utf-8")
    for type in events.TYPES:
        assert json.loads((folder / f"{type}.json").read_text("utf-8")) == events.schema(type)
        assert f"[`{type}`](schemas/{type}.json)" in page
    with pytest.raises(NotFound, match=r"job\.begun"):
        events.schema("job.begun")


def test_no_event_is_decided_whose_type_has_no_schema():
    """Whatever the source calls the type of an `Event` it makes."""
    made = set()
    for path in (ROOT / "src" / "headway").rglob("*.py"):
        made |= set(re.findall(r'\btype="([\w.]+)",', path.read_text("utf-8"), re.MULTILINE))
    for path in (ROOT / "src" / "headway").rglob("*.lua"):
        made |= set(re.findall(r"'type', '([\w.]+)'", path.read_text("utf-8")))
    form = EventForm()
    tasks = {f"task.{status.lower()}" for status in Status}
    assert made | tasks | {form.failed, form.outcome} == set(events.TYPES)


# ---- JSON -------------------------------------------------------------------------------------------------------------


def test_an_envelope_goes_through_json_and_back():
    found = event(3, text="é\u2028🎈", list=[1, None, {"a": True}], part=0.5)
    assert Event.from_json(found.as_json()) == found
    assert list(json.loads(found.as_json())) == ["id", "type", "source", "job", "at", "version", "data"]


def test_a_time_is_written_in_utc_with_a_z():
    east = dataclasses.replace(event(), at=datetime(2026, 11, 15, 14, 0, 3, tzinfo=timezone(timedelta(hours=2))))
    assert json.loads(east.as_json())["at"] == "2026-11-15T12:00:03Z"
    with pytest.raises(InvalidInput, match="time zone"):
        dataclasses.replace(event(), at=datetime(2026, 11, 15)).as_json()  # noqa: DTZ001


class Color(str, enum.Enum):  # noqa: UP042  # what programs older than StrEnum have
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


def test_subclasses_of_json_types_are_converted():
    told = json.loads(event(1, color=Color.RED, size=Size.BIG, pair=(1, 2)).as_json())
    assert told["data"] == {"color": "red", "size": 3, "pair": [1, 2]}


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, b"x", {1, 2}, object(), [[[math.nan]]], {"a": math.inf}]
)
def test_values_that_json_lacks_are_refused_before_the_event_is_stored(tmp_path: Path, bad: Any):
    with connect(f"sqlite:///{tmp_path}/e.db") as database:
        with pytest.raises(InvalidInput, match="JSON has no such value"):
            database.run(lambda tx: append(tx, event(1, value=bad)))
        assert database.one("SELECT count(*) FROM outbox") == (0,)
    with pytest.raises(InvalidInput):
        event(1, value=bad).as_json()
    assert json.loads(dataclasses.replace(event(1), data=plain({"value": bad}, lenient=True)).as_json())  # type: ignore[arg-type]


def test_data_nested_too_deeply_is_refused():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidInput, match="deeply"):
        plain(deep)
    assert plain({"a": 1, "b": deep}, lenient=True) is None


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"total": 1},
        {"total": None, "succeeded": 1, "failed": 0},
        {"total": 1, "succeeded": -1, "failed": 0},
        {"total": True, "succeeded": 1, "failed": 0},
        {"total": 1.5, "succeeded": 1, "failed": 0},
    ],
)
def test_a_completion_of_another_shape_is_refused_before_it_is_decided(tmp_path: Path, data: dict[str, Any]):
    bad = dataclasses.replace(event(1), type="job.completed", data=data)
    with connect(f"sqlite:///{tmp_path}/e.db") as database, pytest.raises(InvalidInput, match=r"job\.completed"):
        database.run(lambda tx: append(tx, bad))


@everywhere
def test_half_a_character_anywhere_costs_the_character_and_not_the_event(url: str):
    half = dataclasses.replace(
        event(1, **{"text \udc00": "a \ud800 b"}), id="id \ud800", job="job \udfff", source="\udead"
    )
    heard: list[Event] = []
    with connect(url) as database:
        database.run(lambda tx: append(tx, half))
        Relay(SqlOutbox(database), [CallableSink("s", heard.append)]).tick()
    told = json.loads(heard[0].as_json().encode())
    assert (told["id"], told["job"], told["source"]) == ("id \ufffd", "job \ufffd", "\ufffd")
    assert told["data"] == {"text \ufffd": "a \ufffd b"}
    assert json.loads(half.as_json().encode()) == told


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"id": 1}', b"\xff", "[" * 100_000])
def test_an_invalid_envelope_is_one_clear_error(text: str | bytes):
    with pytest.raises(InvalidInput, match="not an event"):
        Event.from_json(text)
