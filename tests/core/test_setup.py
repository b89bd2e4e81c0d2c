"""Set-ups: which are accepted, how they are entered and closed."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from headway.core.setup import checked, enter, enter_async
from headway.errors import InvalidInput, SetupFailed

events: list[str] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    events.clear()


def generator() -> Iterator[str]:
    events.append("open")
    yield "client"
    events.append("closed")


async def async_generator() -> AsyncIterator[str]:
    events.append("open")
    yield "client"
    await asyncio.sleep(0)
    events.append("closed")


class Client:
    def __enter__(self) -> str:
        events.append("open")
        return "client"

    def __exit__(self, *_: object) -> None:
        events.append("closed")


def make_client() -> Any:
    return Client()


class AsyncClient:
    async def __aenter__(self) -> str:
        events.append("open")
        return "client"

    async def __aexit__(self, *_: object) -> None:
        events.append("closed")


def make_async_client() -> Any:
    return AsyncClient()


def takes(name: str) -> Client:
    return Client()


SYNC = [generator, contextlib.contextmanager(generator), Client, make_client, partial(takes, "a")]
ASYNC = [async_generator, contextlib.asynccontextmanager(async_generator), AsyncClient, make_async_client]


@pytest.mark.parametrize("setup", SYNC)
def test_a_sync_set_up_is_entered_once_and_closed(setup: Any):
    opened = enter(checked(setup, loop=False))
    assert (opened.value, events) == ("client", ["open"])
    assert opened.close() == ""
    assert events == ["open", "closed"]


@pytest.mark.parametrize("setup", SYNC + ASYNC)
def test_both_kinds_can_be_used_on_an_event_loop(setup: Any):
    async def use() -> None:
        opened = await enter_async(checked(setup, loop=True))
        assert (opened.value, events) == ("client", ["open"])
        assert await opened.aclose() == ""

    asyncio.run(use())
    assert events == ["open", "closed"]


@pytest.mark.parametrize("setup", [async_generator, AsyncClient])
def test_an_async_set_up_of_a_plain_function_is_refused_before_anything_runs(setup: Any):
    with pytest.raises(InvalidInput, match="async"):
        checked(setup, loop=False)
    assert events == []


async def coroutine() -> Client:
    return Client()


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        (None, "must be a function that returns a context manager"),
        ("module:function", "must be a function that returns a context manager"),
        (Client(), "is a context manager, and each worker needs one of its own"),
        (contextlib.contextmanager(generator)(), "is a context manager, and each worker needs one of its own"),
        (contextlib.asynccontextmanager(async_generator)(), "each worker needs one of its own"),
        (takes, "must not need arguments"),
        (coroutine, "without a yield"),
        (dict, "must return a context manager"),
    ],
)
@pytest.mark.parametrize("loop", [False, True])
def test_an_invalid_set_up_is_refused(setup: Any, why: str, loop: bool):
    with pytest.raises(InvalidInput, match=why):
        checked(setup, loop=loop)


def fails() -> Iterator[None]:
    raise OSError("no route to model store")
    yield


def exits() -> Iterator[None]:
    raise SystemExit(3)
    yield


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        (fails, "OSError: no route to model store"),
        (exits, "SystemExit: 3"),
        (lambda: 5, r"must return a context manager \(got a value of type int\)"),
        (make_async_client, "async context manager, and the function is not async"),
    ],
)
def test_a_failing_set_up_is_one_error_that_names_the_cause(setup: Any, why: str):
    with pytest.raises(SetupFailed, match=why):
        enter(checked(setup, loop=False))


def test_a_failing_set_up_on_a_loop_is_the_same_error():
    with pytest.raises(SetupFailed, match="no route to model store"):
        asyncio.run(enter_async(checked(fails, loop=True)))
    with pytest.raises(SetupFailed, match="must return a context manager"):
        asyncio.run(enter_async(checked(lambda: 5, loop=True)))


def closes_badly() -> Iterator[int]:
    yield 1
    raise OSError("the server went away")


async def closes_badly_later() -> AsyncIterator[int]:
    yield 1
    raise OSError("the server went away")


def test_an_error_while_closing_is_returned_not_raised():
    assert enter(checked(closes_badly, loop=False)).close() == "OSError: the server went away"

    async def use(setup: Any) -> str:
        return await (await enter_async(checked(setup, loop=True))).aclose()

    for setup in (closes_badly, closes_badly_later):
        assert asyncio.run(use(setup)) == "OSError: the server went away"


def test_a_checked_set_up_can_be_sent_to_a_spawned_worker():
    for setup in (generator, Client, partial(takes, "a")):
        assert enter(pickle.loads(pickle.dumps(checked(setup, loop=False)))).value == "client"
