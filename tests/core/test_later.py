"""RetryLater, the limit of postponements, and the reading of Retry-After."""

from __future__ import annotations

import copy
import http.client
import pickle
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

import headway
from headway.core.retry import LaterLimit
from headway.errors import HeadwayError, InvalidInput, RetryLater


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf"), 30 * 86_400 + 1, True, "5", None])
def test_an_absurd_delay_is_refused_where_it_is_raised(seconds: Any):
    with pytest.raises(InvalidInput, match="must be from 0 to 2,592,000 seconds"):
        RetryLater(seconds)


@pytest.mark.parametrize("scope", ["queue", "", None, ["job"]])
def test_an_unknown_scope_is_refused(scope: Any):
    with pytest.raises(InvalidInput, match="must be 'item' or 'job'"):
        RetryLater(1, scope=scope)


def test_a_reason_must_be_text_and_is_cut():
    with pytest.raises(InvalidInput, match="must be text"):
        RetryLater(1, b"no")  # type: ignore[arg-type]  # what is refused
    assert RetryLater(1, "x" * 500).reason == "x" * 200


def test_it_is_not_a_headway_error_and_survives_pickle_and_copy():
    error = RetryLater(90, "quota is used up", "job")
    assert not isinstance(error, HeadwayError)
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (copied.seconds, copied.reason, copied.scope) == (90.0, "quota is used up", "job")
        assert str(copied) == "retry in 90 s: quota is used up"


@pytest.mark.parametrize(
    ("text", "times", "seconds"),
    [
        ("100/24h", 100, 86_400), ("7", 7, 86_400), ("3/90s", 3, 90), ("0", 0, 86_400), ("5/30min", 5, 1800),
        (" 2 / 1.5d ", 2, 129_600),
    ],
)  # fmt: skip
def test_a_limit_is_a_count_with_or_without_a_duration(text: str, times: int, seconds: float):
    limit = LaterLimit.parse(text)
    assert limit == LaterLimit(times, seconds)
    assert LaterLimit.parse(str(limit)) == limit


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "1.5", "100/", "100/24", "100/24w", "1/400d", "1/-1h", "٣", "1/nan"]
)
def test_an_unreadable_limit_is_refused(text: str):
    with pytest.raises(InvalidInput, match="such as 100/24h"):
        LaterLimit.parse(text)


def test_the_default_limit_is_100_times_or_a_day():
    assert LaterLimit.parse("100/24h") == LaterLimit()
    assert str(LaterLimit()) == "100/24h"
    assert not LaterLimit().exceeded(100, 86_400)
    assert LaterLimit().exceeded(101, 0)
    assert LaterLimit().exceeded(1, 86_401)


# ---- retry_after ------------------------------------------------------------------------------------------------------


def later(response: object, **options: Any) -> RetryLater:
    with pytest.raises(RetryLater) as caught:
        headway.retry_after(response, **options)
    return caught.value


@pytest.mark.parametrize("status", [200, 204, 301, 404, 500, 502])
def test_any_other_response_is_returned_as_it_is(status: int):
    response = httpx2.Response(status, headers={"Retry-After": "5"})
    assert headway.retry_after(response) is response


@pytest.mark.parametrize("status", [429, 503])
def test_the_seconds_of_the_header_are_the_delay(status: int):
    error = later(httpx2.Response(status, headers={"retry-after": " 12 "}))
    assert (error.seconds, error.scope, error.reason) == (12.0, "item", f"the server answered {status}")


def test_responses_of_requests_aiohttp_urllib3_and_the_standard_library_are_understood():
    message = Message()
    message["retry-after"] = "3"
    for response in (
        SimpleNamespace(status_code=429, headers={"Retry-After": "3"}),
        SimpleNamespace(status=429, headers={"Retry-After": "3"}),
        SimpleNamespace(status=503, headers=message),
    ):
        assert later(response).seconds == 3.0
    assert hasattr(http.client.HTTPResponse, "getheader")


def test_an_http_date_is_compared_with_the_clock_of_the_server():
    then = datetime.now(UTC) - timedelta(days=400)
    headers = {
        "Date": format_datetime(then, usegmt=True),
        "Retry-After": format_datetime(then + timedelta(seconds=40), usegmt=True),
    }
    assert later(httpx2.Response(429, headers=headers)).seconds == pytest.approx(40)
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    assert 35 <= later(httpx2.Response(429, headers={"Retry-After": soon})).seconds <= 41


def test_a_date_in_the_past_means_now_and_an_unreadable_header_means_the_default():
    past = format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)
    assert later(httpx2.Response(429, headers={"Retry-After": past})).seconds == 0.0
    for text in ("", "soon", "-5", "1e9", "nan", "Mon, 99 Foo 2026 00:00:00 GMT", "9" * 4000):
        assert later(httpx2.Response(503, headers={"Retry-After": text}), default=7).seconds == 7.0
    assert later(httpx2.Response(503)).seconds == 30.0


def test_the_delay_is_capped_and_the_scope_is_passed_on():
    assert later(httpx2.Response(429, headers={"Retry-After": "999999999"})).seconds == 3600.0
    error = later(httpx2.Response(429, headers={"Retry-After": "100"}), cap=20, scope="job")
    assert (error.seconds, error.scope) == (20.0, "job")


@pytest.mark.parametrize("options", [{"cap": -1}, {"default": float("nan")}, {"cap": "1"}, {"scope": "all"}])
def test_a_bad_argument_is_refused(options: dict[str, Any]):
    with pytest.raises(InvalidInput):
        headway.retry_after(httpx2.Response(429), **options)


@pytest.mark.parametrize("response", [None, "429", SimpleNamespace(status_code=429), SimpleNamespace(headers={})])
def test_an_object_that_is_not_a_response_is_refused(response: object):
    with pytest.raises(InvalidInput, match="needs an HTTP response"):
        headway.retry_after(response)
