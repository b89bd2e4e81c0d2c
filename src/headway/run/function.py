"""The user's function: found by name, checked before anything is written."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from headway.errors import InvalidInput
from headway.telemetry import redact

#: How many items run at once when nobody says.
_THREADS = 16
_COROUTINES = 32


def load(spec: str) -> Callable[..., Any]:
    """``module:function``, the module looked for in the current directory first."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise InvalidInput(
            f"{spec!r} does not name a function.", hint="Write module:function, for example jobs:make_ad"
        )
    if module_name.endswith(".py"):
        meant = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise InvalidInput(f"{module_name!r} is a file, not a module's name.", hint=f"Write {meant}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise InvalidInput(
                f"There is no module {module_name!r} here or among the installed packages.",
                hint="Run from the directory that holds it, or install it.",
            ) from error
        raise InvalidInput(f"The module {module_name!r} needs {error.name!r}, which is not installed.") from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise InvalidInput(
            f"The module {module_name!r} failed while it was imported: {type(error).__name__}: {redact(str(error))}",
            hint=f"See the whole of it: python -c 'import {module_name}'",
        ) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
        if function is None:
            known = [each for each, value in vars(module).items() if inspect.isfunction(value) and each[0] != "_"]
            raise InvalidInput(
                f"The module {module_name!r} has no function {name!r}.",
                hint=f"It has: {', '.join(sorted(known)) or 'none'}",
            )
    return check(function, spec)


def check(function: object, name: str) -> Callable[..., Any]:
    if not callable(function):
        raise InvalidInput(f"{name} is not a function but {type(function).__name__}.")
    _refuse_generator(function, name)
    try:
        inspect.signature(function).bind(object())
    except TypeError as error:
        raise InvalidInput(f"{name} cannot be called with one item: {error}.", hint="It takes one argument.") from error
    except ValueError:
        pass  # a built-in without a signature: calling it will tell
    return function


def _refuse_generator(function: Callable[..., Any], name: str) -> None:
    """Calling a generator function executes nothing of it."""
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004 - a callable object may have one as its __call__
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise InvalidInput(
                f"{name} is a generator function (it has a yield): calling it would execute nothing.",
                hint="Do the work and return the result, for example a list, instead of yielding.",
            )


def name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def choose_mode(function: Callable[..., Any], mode: str | None, name: str) -> str:
    """``mode`` if it fits the function; async functions need a loop, the others must not have one."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - a callable object may have an async __call__
    if mode is None:
        return "async" if is_async else "process"
    if is_async != (mode == "async"):
        fits = "--mode async" if is_async else "--mode process or --mode thread"
        raise InvalidInput(
            f"{name} is {'an async' if is_async else 'a plain'} function and cannot run in mode {mode}.",
            hint=f"Leave --mode out, or use {fits}.",
        )
    return mode


def choose_workers(workers: int | None, mode: str) -> int:
    if workers is not None:
        if workers < 1:
            raise InvalidInput(f"{workers} workers cannot do anything.", hint="Use 1 or more.")
        return workers
    if mode == "process":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _THREADS if mode == "thread" else _COROUTINES
