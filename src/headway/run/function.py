"""The user's function: found by name, checked before anything is written."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from headway.errors import InvalidInput
from headway.ledger import canonical
from headway.run.program import Program, Work
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
    except SystemExit as error:  # let through, it would end this command as if all were done
        raise InvalidInput(
            f"The module {module_name!r} ended the program while it was imported (sys.exit, or argparse).",
            hint='Let only a script that is started do that: put it below  if __name__ == "__main__":',
        ) from error
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


def default_job(function: Callable[..., Any]) -> str:
    """The id of a job that nobody named: the function's name, and a hash of where it is defined and of its code. Other
    code under the same name (another lambda, a function defined again, a function of another file) is another job."""
    short = re.sub(r"[^A-Za-z0-9._-]", "", getattr(function, "__name__", type(function).__name__)) or "function"
    digest = blake2b(digest_size=6)
    for part in _identity(function, set()):
        digest.update(f"{len(part)}:{part}".encode(errors="backslashreplace"))
    return f"{short[:60].strip('.') or 'function'}-{digest.hexdigest()}"


def _identity(function: object, seen: set[int]) -> Iterator[str]:
    """What tells this function from others, the same in every process: names, file, code and what it has closed over."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield "partial"
        for each in (function.func, *function.args, *chain.from_iterable(sorted(function.keywords.items()))):
            yield from _value(each, seen)
    elif isinstance(function, types.MethodType):
        yield from _identity(function.__func__, seen)
        yield from _value(function.__self__, seen)
    elif isinstance(function, types.FunctionType):
        yield from _of_function(function, seen)
    elif isinstance(function, type):
        yield name_of(function)
        for each in [each for _, each in sorted(vars(function).items()) if isinstance(each, types.FunctionType)]:
            yield from _identity(each, seen)
    elif isinstance(function, types.BuiltinFunctionType) and isinstance(function.__self__, types.ModuleType | None):
        yield name_of(function)
    elif hasattr(function, "__wrapped__"):  # functools.lru_cache and its like
        yield name_of(type(function))
        yield from _identity(function.__wrapped__, seen)
    else:
        raise InvalidInput(
            f"Nobody can tell this {type(function).__name__} from another one when it is called again.",
            hint='Name the job: headway.map(function, items, job="...")',
        )


def _of_function(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
    code = function.__code__
    yield name_of(function)
    yield os.path.realpath(code.co_filename)
    yield from _code(code)
    for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _value(each, seen)
    for cell in function.__closure__ or ():
        yield from _value(_content(cell), seen)
    # Functions of the same file that it calls are its code as well.
    called = (function.__globals__.get(name) for name in sorted(_names(code)))
    for each in called:
        if isinstance(each, types.FunctionType) and each.__code__.co_filename == code.co_filename:
            yield from _identity(each, seen)


def _value(value: object, seen: set[int]) -> Iterator[str]:
    """A value that a function carries with it. One that has no form of its own that is the same next time cannot name a
    job."""
    if callable(value):
        yield from _identity(value, seen)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, Path):
        yield str(value)
    else:
        try:
            yield canonical(value)
        except InvalidInput as error:
            raise InvalidInput(
                f"The function carries a {type(value).__name__} with it, so nobody can tell whether it is the same "
                "function when it is called again.",
                hint='Name the job: headway.map(function, items, job="...")',
            ) from error


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return None


def _code(code: types.CodeType) -> Iterator[str]:
    """The code without its line numbers: a function that only moved is the same."""
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))  # their order is another one in every process
        else:
            yield repr(constant)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def choose_mode(function: Work, mode: str | None, name: str, workers: object = None) -> str:
    """``mode`` if it fits the function; async functions need a loop, the others must not have one. Many programs at once
    are started by the threads of one process: a process of ours for each would cost more than they do."""
    if isinstance(function, Program):
        if mode == "async":
            raise InvalidInput("A program cannot run in mode async.", hint="Leave --mode out.")
        return mode or ("thread" if isinstance(workers, int) and workers > 4 * _cores() else "process")
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


class Start(NamedTuple):
    """How worker processes are started: forked from this one, or anew (spawn), and why, where that is worth a word."""

    how: str
    why: str = ""


FORK = Start("fork")


def choose_start(function: Work, encode: object, wanted: str) -> Start:
    """A fork copies this process in the middle of whatever its other threads do: a lock that one of them holds stays locked
    in the child for ever. macOS's own libraries do not bear it at all. So there a worker is started anew, if the function
    can be found by its name in a new process, and else forked all the same; either is said."""
    if wanted == "fork" or isinstance(function, Program):
        return FORK
    if wanted not in ("auto", "spawn"):
        raise InvalidInput(f"start = {wanted!r} is not acceptable.", hint="Use auto, fork or spawn.")
    why = _why_not_forked() if wanted == "auto" else ""
    if wanted == "auto" and not why:
        return FORK
    obstacle = _why_not_sent(function, encode)
    if not obstacle:
        return Start("spawn", why and f"Workers are started anew, not forked, because {why}. start=fork forks them.")
    if wanted == "spawn":
        raise InvalidInput(
            f"A worker that is started anew cannot get the function: {obstacle}.",
            hint="Define it in a module of its own, or leave out start=.",
        )
    if "ipykernel" in sys.modules:
        return FORK  # its threads are always there, and so are functions that are in no module
    return Start("fork", f"Workers are forked although {why}, because {obstacle}. If they hang, put it into a module.")


def _why_not_forked() -> str:
    if sys.platform == "darwin":
        return "macOS does not bear forks"
    here = threading.current_thread()
    others = [each.name for each in threading.enumerate() if each is not here and not each.name.startswith("headway")]
    if not others:
        return ""
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return f"{'another thread runs' if len(others) == 1 else f'{len(others)} other threads run'} here ({shown})"


def _why_not_sent(function: Work, encode: object) -> str:
    """Why a new process cannot get the function; empty if it can."""
    try:
        data = pickle.dumps((function, encode))
    except Exception as error:  # noqa: BLE001 - objects may raise anything when they are pickled
        return f"the function cannot be pickled ({type(error).__name__})"
    return "the function is defined in the main program" if b"__main__" in data else ""


def choose_workers(workers: int | None, mode: str) -> int:
    if workers is not None:
        if workers < 1:
            raise InvalidInput(f"{workers} workers cannot do anything.", hint="Use 1 or more.")
        return workers
    if mode == "process":
        return _cores()
    return _THREADS if mode == "thread" else _COROUTINES


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
