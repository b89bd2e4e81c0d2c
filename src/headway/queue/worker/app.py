"""The application's queue, found by name, as ``flask --app`` and Gunicorn find an application.

shop:queue                    a `TaskQueue`, or a Flask extension that is bound to its application
shop:app                      a Flask application that has the extension
shop:create_app               a factory of either, called without arguments
shop:create_app("staging")    the same, called with literal arguments
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from headway.errors import InvalidInput
from headway.queue.task_queue import TaskQueue
from headway.telemetry import redact


def load(spec: str) -> TaskQueue:
    """Import the application and return its queue. See the module for the forms of ``spec``."""
    module_name, colon, expression = spec.partition(":")
    if not colon or not module_name or not expression:
        raise _malformed(spec)
    name, arguments = _parse(spec, expression)
    found: Any = _import(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    queue = _queue_of(found)
    if queue is None and callable(found) and not hasattr(found, "extensions"):
        found = _call(spec, found, arguments or ((), {}))
        queue = _queue_of(found)
    if queue is None:
        raise InvalidInput(
            f"{spec} is not a queue but {type(found).__name__}.",
            hint="Name a TaskQueue, a Flask application with the extension (headway.init_app(app)), or a factory of either.",
        )
    if not queue.backend.is_configured:
        raise InvalidInput(
            f"{spec} has no database: init_app() was not called.",
            hint=f"Name the application or its factory, which calls init_app: {module_name}:create_app",
        )
    if not queue.handlers:
        raise InvalidInput(f"{spec} has no handlers.", hint="Register one: @queue.handler('kind')")
    return queue


def _queue_of(found: Any) -> TaskQueue | None:
    """Return the queue that ``found`` is or, as a Flask application, has."""
    if isinstance(found, TaskQueue):
        return found
    extensions = getattr(found, "extensions", None)
    queue = extensions.get("headway") if isinstance(extensions, Mapping) else None
    return queue if isinstance(queue, TaskQueue) else None


def _parse(spec: str, expression: str) -> tuple[str, tuple[list[Any], dict[str, Any]] | None]:
    """Split ``create_app("staging")`` into the name and its arguments, which must be literals."""
    try:
        node = ast.parse(expression.strip(), mode="eval").body
        if not isinstance(node, ast.Call):
            return _dotted(node), None
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        if len(keywords) < len(node.keywords):
            raise ValueError("** is not a literal")
        return _dotted(node.func), ([ast.literal_eval(argument) for argument in node.args], keywords)
    except (SyntaxError, ValueError) as error:
        raise _malformed(spec) from error


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("not a name")  # noqa: TRY004 - reported as any other malformed name
    return node.id


def _malformed(spec: str) -> InvalidInput:
    return InvalidInput(f"{spec!r} does not name a queue.", hint="Write module:queue, or a factory: module:create_app")


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the application may raise anything while it is imported, and end nothing
        raise InvalidInput(
            f"The module {name!r} cannot be imported: {type(error).__name__}: {redact(str(error))}",
            hint=f"See the whole traceback: python -c 'import {name}'",
        ) from error


def _call(spec: str, factory: Any, arguments: tuple[Any, Any]) -> Any:
    positional, keywords = arguments
    try:
        return factory(*positional, **keywords)
    except (Exception, SystemExit) as error:
        raise InvalidInput(
            f"The factory {spec} failed: {type(error).__name__}: {redact(str(error))}",
            hint=f"Call it with literal arguments if it needs some: '{spec.partition('(')[0]}(\"production\")'",
        ) from error
