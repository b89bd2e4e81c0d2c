"""The user's function: found by name and validated before anything is written."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import linecache
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

#: Default number of items at once, in threads and on an event loop.
_THREADS = 16
_COROUTINES = 32


def load(spec: str, arguments: int = 1) -> Callable[..., Any]:
    """Import ``module:function``, and check that it can be called with an item. See `load_any`, `check`."""
    return check(load_any(spec), spec, arguments)


def load_any(spec: str) -> Any:
    """Import ``module:function``, with the current directory first on the path."""
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
    except SystemExit as error:  # otherwise it would end this command as if it had succeeded
        raise InvalidInput(
            f"The module {module_name!r} ended the program while it was imported (sys.exit, or argparse).",
            hint='Put that code below  if __name__ == "__main__":',
        ) from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise InvalidInput(
            f"The module {module_name!r} failed while it was imported: {type(error).__name__}: {redact(str(error))}",
            hint=f"See the full traceback: python -c 'import {module_name}'",
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
    return function


def check(function: object, name: str, arguments: int = 1) -> Callable[..., Any]:
    """Raise `InvalidInput` unless ``function`` can be called with one item, or with an item and a set-up's value."""
    if not callable(function):
        raise InvalidInput(f"{name} is not a function but {type(function).__name__}.")
    _refuse_generator(function, name)
    try:
        inspect.signature(function).bind(*[object()] * arguments)
    except TypeError as error:
        what, how = "one item", "It must take one argument, or two with setup=."
        if arguments == 2:
            what, how = "an item and the value of its set-up", "With setup= it must take two arguments."
        raise InvalidInput(f"{name} cannot be called with {what}: {error}.", hint=how) from error
    except ValueError:
        pass  # a built-in without a signature: a wrong one fails when called
    return function


def _refuse_generator(function: Callable[..., Any], name: str) -> None:
    """Refuse generator functions: calling one runs none of its code."""
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004 - a callable object may have a generator as __call__
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise InvalidInput(
                f"{name} is a generator function (it has a yield): calling it would run nothing.",
                hint="Do the work and return the result, for example a list, instead of yielding.",
            )


def name_of(function: Callable[..., Any]) -> str:
    """Return the function's name as ``module:qualname``."""
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def default_job(function: Callable[..., Any]) -> str:
    """Return the id of an unnamed job: the function's name, and a hash of its file and code.

    Different code under the same name is a different job: another lambda, a redefined function, another file. The
    hash covers the source, so the id does not depend on the Python version.
    """
    return _job_id(function, _of_source)


def earlier_default_job(function: Callable[..., Any]) -> str:
    """Return the id of earlier Headway versions. It used the bytecode, which depends on the Python version."""
    return _job_id(function, _of_bytecode)


#: Yields parts that identify the code of a function or class.
_Describe = Callable[[Any], Iterator[str]]


def _job_id(function: Callable[..., Any], describe: _Describe) -> str:
    short = re.sub(r"[^A-Za-z0-9._-]", "", getattr(function, "__name__", type(function).__name__)) or "function"
    digest = blake2b(digest_size=6)
    for part in _identity(function, set(), describe):
        digest.update(f"{len(part)}:{part}".encode(errors="backslashreplace"))
    return f"{short[:60].strip('.') or 'function'}-{digest.hexdigest()}"


def _identity(function: object, seen: set[int], describe: _Describe) -> Iterator[str]:
    """Yield parts that identify the function in every process: names, file, code and closed-over values."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield "partial"
        for each in (function.func, *function.args, *chain.from_iterable(sorted(function.keywords.items()))):
            yield from _value(each, seen, describe)
    elif isinstance(function, types.MethodType):
        yield from _identity(function.__func__, seen, describe)
        yield from _value(function.__self__, seen, describe)
    elif isinstance(function, types.FunctionType):
        yield from _of_function(function, seen, describe)
    elif isinstance(function, type):
        yield name_of(function)
        yield from describe(function)
        for method in [each for _, each in sorted(vars(function).items()) if isinstance(each, types.FunctionType)]:
            if describe is _of_bytecode or _source_node(method.__code__) is not None:  # skip dataclass methods
                yield from _identity(method, seen, describe)
    elif isinstance(function, types.BuiltinFunctionType) and isinstance(function.__self__, types.ModuleType | None):
        yield name_of(function)
    elif hasattr(function, "__wrapped__"):  # functools.lru_cache and similar wrappers
        yield name_of(type(function))
        yield from _identity(function.__wrapped__, seen, describe)
    else:
        raise InvalidInput(
            f"A {type(function).__name__} cannot be recognised when it is called again.",
            hint='Name the job: headway.map(function, items, job="...")',
        )


def _of_function(function: types.FunctionType, seen: set[int], describe: _Describe) -> Iterator[str]:
    code = function.__code__
    yield name_of(function)
    yield os.path.realpath(code.co_filename)
    yield from describe(function)
    for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _value(each, seen, describe)
    for cell in function.__closure__ or ():
        yield from _value(_content(cell), seen, describe)
    # Functions it calls in the same file are part of its code.
    called = (function.__globals__.get(name) for name in sorted(_names(code)))
    for each in called:
        if isinstance(each, types.FunctionType) and each.__code__.co_filename == code.co_filename:
            yield from _identity(each, seen, describe)


def _value(value: object, seen: set[int], describe: _Describe) -> Iterator[str]:
    """Yield a value that the function carries. A value without a reproducible form cannot identify a job."""
    if callable(value):
        yield from _identity(value, seen, describe)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, Path):
        yield str(value)
    else:
        try:
            yield canonical(value)
        except InvalidInput as error:
            raise InvalidInput(
                f"The function carries a {type(value).__name__} with it, so it cannot be recognised when it is called "
                "again.",
                hint='Name the job: headway.map(function, items, job="...")',
            ) from error


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _of_bytecode(function: Any) -> Iterator[str]:
    """Yield the bytecode of a function; a class is identified by its methods."""
    if not isinstance(function, type):
        yield from _code(function.__code__)


def _code(code: types.CodeType) -> Iterator[str]:
    """Yield the code without line numbers, so that moving a function does not matter."""
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))  # the order of a frozenset differs between processes
        else:
            yield repr(constant)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


# ---- the source of a function ----------------------------------------------------------------------------------------


def _of_source(function: Any) -> Iterator[str]:
    """Yield the source of a function or class. Without source (a prompt, exec), yield the function's bytecode."""
    if isinstance(function, type):
        node = _class_node(function)
        if node is not None:
            yield source_form(node)
        return
    node = _source_node(function.__code__)
    if node is None:
        yield from _code(function.__code__)
    else:
        yield source_form(node)


def source_form(part: object) -> str:
    """Return a syntax tree as text that is the same in every Python version.

    Positions, formatting and comments are left out. `ast.dump` is not stable: fields were added, and later versions
    omit empty ones.
    """
    if isinstance(part, ast.JoinedStr):  # Python 3.12 puts empty strings between the parts of an f-string
        return (
            f"JoinedStr({', '.join(source_form(each) for each in part.values if getattr(each, 'value', None) != '')})"
        )
    if isinstance(part, ast.AST):
        fields = [
            f"{name}={source_form(value)}"
            for name, value in sorted(ast.iter_fields(part))
            if name not in ("ctx", "kind", "type_comment") and value is not None and value != []
        ]
        return f"{type(part).__name__}({', '.join(fields)})"
    if isinstance(part, list):
        return f"[{', '.join(map(source_form, part))}]"
    return ascii(part)


def _source_node(code: types.CodeType) -> ast.AST | None:
    """Return the definition of ``code`` in its file. Return None if the file lacks it or was edited since."""
    tree, codes = _parsed(code.co_filename)
    if tree is None or code not in codes:
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and getattr(node, "name", "<lambda>") == code.co_name
        and min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) == code.co_firstlineno
        and _holds(node, code)
    ]
    # Of several lambdas on one line, choose the smallest that contains the code.
    found.sort(key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0, -node.lineno, -node.col_offset))
    return found[0] if found else None


def _holds(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, code: types.CodeType) -> bool:
    """Return whether every instruction of ``code`` comes from inside ``node``."""
    if not isinstance(node, ast.Lambda):
        return True
    first, last = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    places = [each for each in code.co_positions() if None not in each and each[2] != each[3]]
    return all(first <= (line, column) and (end, end_column) <= last for line, end, column, end_column in places)


def _class_node(kind: type) -> ast.AST | None:
    module = sys.modules.get(kind.__module__)
    tree, _ = _parsed(getattr(module, "__file__", None) or "")
    found: list[ast.AST] = [] if tree is None else [tree]
    for name in kind.__qualname__.split("."):
        found = [
            each for node in found for each in ast.walk(node) if isinstance(each, ast.ClassDef) and each.name == name
        ]
    return found[0] if len(found) == 1 else None


def _parsed(filename: str) -> tuple[ast.AST | None, frozenset[types.CodeType]]:
    """Return the syntax tree of a file and all its code objects. The file may have been edited since its import."""
    linecache.checkcache(filename)
    return _parse("".join(linecache.getlines(filename)), filename)


@functools.lru_cache(maxsize=16)
def _parse(text: str, filename: str) -> tuple[ast.AST | None, frozenset[types.CodeType]]:
    try:
        tree = ast.parse(text, filename)
        return tree, frozenset(_codes(compile(text, filename, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError):
        return None, frozenset()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def choose_mode(function: Work, mode: str | None, name: str, workers: object = None) -> str:
    """Return the mode for the function; raise `InvalidInput` if ``mode`` does not fit.

    Async functions need an event loop; others must not have one. Many concurrent programs are started from threads of
    one process, because a worker process for each would cost more than the programs.
    """
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
    """How worker processes start, fork or spawn, and a message with the reason, if needed."""

    how: str
    why: str = ""


FORK = Start("fork")


def choose_start(function: Work, encode: object, wanted: str) -> Start:
    """Choose between forking and spawning workers.

    A fork copies this process in the middle of what its other threads do. A lock that one of them holds stays locked
    in the child forever. The system libraries of macOS do not support forks at all. In these cases workers are
    spawned if a new process can import the function, and forked otherwise. The returned message explains either
    choice.
    """
    if wanted == "fork" or isinstance(function, Program):
        return FORK
    if wanted not in ("auto", "spawn"):
        raise InvalidInput(f"start must be auto, fork or spawn (got {wanted!r}).")
    why = _why_not_forked() if wanted == "auto" else ""
    if wanted == "auto" and not why:
        return FORK
    obstacle = _why_not_sent(function, encode)
    if not obstacle:
        return Start("spawn", why and f"Workers are spawned, not forked, because {why}. To fork them: start=fork.")
    if wanted == "spawn":
        raise InvalidInput(
            f"A spawned worker cannot import the function: {obstacle}.",
            hint="Define it in a module, or leave out start=.",
        )
    if "ipykernel" in sys.modules:
        return FORK  # notebooks always have threads, and functions that are in no module
    return Start("fork", f"Workers are forked although {why}, because {obstacle}. If they hang, move it to a module.")


def _why_not_forked() -> str:
    if sys.platform == "darwin":
        return "forks are unsafe on macOS"
    here = threading.current_thread()
    others = [each.name for each in threading.enumerate() if each is not here and not each.name.startswith("headway")]
    if not others:
        return ""
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return f"{'another thread runs' if len(others) == 1 else f'{len(others)} other threads run'} here ({shown})"


def _why_not_sent(function: Work, encode: object) -> str:
    """Return why a new process cannot get the function; empty if it can."""
    try:
        data = pickle.dumps((function, encode))
    except Exception as error:  # noqa: BLE001 - objects may raise anything when they are pickled
        return f"the function cannot be pickled ({type(error).__name__})"
    return "the function is defined in the main program" if b"__main__" in data else ""


def default_workers(mode: str) -> int:
    """Return how many items run at once by default."""
    return {"thread": _THREADS, "async": _COROUTINES}.get(mode) or _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
