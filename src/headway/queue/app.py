"""The application's queue, found by name: ``module:queue``, or a function that makes one."""

from __future__ import annotations

import importlib
import os
import sys

from headway.errors import InvalidInput
from headway.queue.taskqueue import TaskQueue
from headway.telemetry import redact


def load(spec: str) -> TaskQueue:
    """``module:name`` of a `TaskQueue`, or of a function without arguments that returns one (an app factory)."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise InvalidInput(f"{spec!r} does not name a queue.", hint="Write module:queue, for example app:queue")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the application may raise anything while it is imported, and end nothing
        raise InvalidInput(
            f"The module {module_name!r} cannot be imported: {type(error).__name__}: {redact(str(error))}",
            hint=f"See the whole of it: python -c 'import {module_name}'",
        ) from error
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if callable(found) and not isinstance(found, TaskQueue):
        found = found()
    if not isinstance(found, TaskQueue):
        raise InvalidInput(
            f"{spec} is not a queue but {type(found).__name__}.", hint="It must be a headway.queue.TaskQueue."
        )
    if not found.handlers:
        raise InvalidInput(f"{spec} has no handlers.", hint="Register one: @queue.handler('kind')")
    return found
