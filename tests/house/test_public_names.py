"""Every public name has a docstring and a page of the Python reference."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tools import docs

REFERENCE = docs.ROOT / "docs" / "reference" / "python"
MODULES = sorted(
    name
    for page in REFERENCE.glob("*.md")
    for name in re.findall(r"^\.\. automodule:: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)
)


def public_objects(module: ModuleType) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    found = {name: getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isroutine(value)}


def public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        if not base.__module__.startswith("headway"):
            continue
        for name, value in vars(base).items():
            method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not name.startswith("_") and inspect.isfunction(method):
                yield name, method


def undocumented(module: ModuleType) -> Iterator[str]:
    objects = public_objects(module)
    # A store documents its methods once, in the protocol that its implementations follow.
    protocols = [value for value in objects.values() if getattr(value, "_is_protocol", False)]
    in_a_protocol = {name for protocol in protocols for name, method in public_methods(protocol) if method.__doc__}
    for name, value in objects.items():
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):
            yield f"{module.__name__}.{name}"
        if inspect.isclass(value):
            for method_name, method in public_methods(value):
                if not method.__doc__ and method_name not in in_a_protocol:
                    yield f"{module.__name__}.{name}.{method_name}"


def test_the_python_reference_has_the_modules_that_users_import():
    assert set(MODULES) >= {
        "headway", "headway.alerts", "headway.client", "headway.errors", "headway.events", "headway.finishline",
        "headway.ledger", "headway.queue", "headway.queue.fastapi", "headway.queue.flask", "headway.queue.gunicorn",
        "headway.queue.migration", "headway.states", "headway.telemetry", "headway.testing", "headway.watcher", "headway.web",
    }  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str):
    assert list(undocumented(importlib.import_module(name))) == []


def test_a_name_without_a_docstring_is_noticed():
    class Silent:
        def method(self) -> None:
            pass

    module = ModuleType("headway.made_up")
    Silent.__module__ = "headway.made_up"
    vars(module)["Silent"] = Silent
    assert list(undocumented(module)) == ["headway.made_up.Silent", "headway.made_up.Silent.method"]
