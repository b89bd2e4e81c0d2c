"""The published shapes: made of the views, complete, and written down."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from headway.views.jobs.listing import Holder, Job, Jobs
from headway.views.schemas import documents, inner_views, json_schema, page
from headway.views.shape import ABSENT, SCHEMAS, iso, plain
from tests.views.schema_check import problems

DOCS = Path(__file__).parents[2] / "docs"
AT = datetime(2026, 11, 16, 12, 30, 0, 123456, UTC)
JOB = Job(
    "ads", "processing", "ads:make_ad", "products.jsonl", 60, 40, 9, 5, 6, 17, 66.67, True, False, 1, AT, AT, None,
    Holder("build-7", 4242), "headway run ads:make_ad --items products.jsonl",
)  # fmt: skip


def test_the_page_of_json_shapes_is_up_to_date():
    assert (DOCS / "reference" / "json.md").read_text("utf-8") == page()


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_every_key_of_a_document_has_a_type_and_a_description(schema: str):
    described = json_schema(documents()[schema], schema)
    assert described["properties"]["schema"] == {"const": schema}
    assert "schema" in described["required"]
    for name, key in described["properties"].items():
        assert name == "schema" or key["description"]


def test_every_view_has_a_one_sentence_description():
    for view in [*documents().values(), *inner_views()]:
        assert (view.__doc__ or "").rstrip().endswith(".")
        assert "namedtuple" not in (view.__doc__ or "")


def test_the_schemas_are_json():
    for schema, view in documents().items():
        assert json.loads(json.dumps(json_schema(view, schema)))["title"] == schema


def test_a_view_becomes_json_whose_keys_are_its_fields_and_whose_times_are_utc_to_the_millisecond():
    document = Jobs((JOB,)).as_json()
    assert list(document) == ["schema", "jobs"]
    (found,) = document["jobs"]
    assert tuple(found) == Job._fields
    assert found["created_at"] == "2026-11-16T12:30:00.123Z"
    assert found["holder"] == {"host": "build-7", "pid": 4242}
    assert problems(document, json_schema(Jobs, "headway.jobs/1")) == []


def test_the_check_itself_notices_a_missing_an_unknown_and_a_wrong_key():
    schema = json_schema(Jobs, "headway.jobs/1")
    whole = Jobs((JOB,)).as_json()
    wrong = json.loads(json.dumps(whole))
    wrong["jobs"][0]["created_at"] = "2026-11-16T12:30:00+00:00"
    assert problems(wrong, schema)
    del (missing := json.loads(json.dumps(whole)))["jobs"][0]["dead"]
    assert problems(missing, schema)
    assert problems({**whole, "more": 1}, schema)
    assert problems({**whole, "schema": 1}, schema)


def test_a_time_of_another_zone_is_written_in_utc():
    assert iso(datetime(2026, 11, 16, 14, 0, tzinfo=timezone(timedelta(hours=2)))) == "2026-11-16T12:00:00.000Z"
    assert iso(None) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        ({"a": (1, AT)}, {"a": [1, "2026-11-16T12:30:00.123Z"]}),
        ({7: "x"}, {"7": "x"}),
        (JOB._replace(holder=None).holder, None),
    ],
)
def test_what_json_has_no_word_for_is_put_into_its_words(value: object, expected: object):
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)


def test_a_key_that_was_not_asked_for_is_left_out():
    from headway.views.jobs.job import DeadLetter

    letter = DeadLetter(1, None, "boom", 1, 2, AT)
    assert "payload" not in plain(letter)
    assert plain(letter._replace(payload=None))["payload"] is None
    assert repr(ABSENT) == "ABSENT"
