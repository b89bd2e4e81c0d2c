"""Registering handlers: what is refused, and how it is said."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from headway.errors import InvalidInput
from headway.queue.taskqueue import TaskQueue


async def asynchronous(task: Any, payload: Any) -> None: ...


async def asynchronous_generator(task: Any, payload: Any) -> Any:
    yield 1


def generator(task: Any, payload: Any) -> Any:
    yield 1


class Callable:
    async def __call__(self, task: Any, payload: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (asynchronous, "an async function"),
        (partial(asynchronous), "an async function"),
        (Callable(), "an async function"),
        (asynchronous_generator, "a generator function"),
        (generator, "a generator function"),
    ],
)
def test_a_function_that_returns_before_its_work_is_done_is_refused(queue: TaskQueue, function: Any, what: str):
    with pytest.raises(InvalidInput, match=f"The handler of 'later' is {what}, which workers do not run") as refused:
        queue.handler("later")(function)
    assert "asyncio.run" in refused.value.hint
    assert "later" not in queue.handlers
