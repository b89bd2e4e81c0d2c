"""The code version a job was started with, which fleet workers compare with their own.

A stamp has a few versions and short hashes: of Python, Headway, the function's file, and the packages its module
uses. A worker with a different stamp would run other code under the same name.
"""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from headway._version import __version__

Stamp = Mapping[str, str]
#: Maximum bytes of a file that are hashed.
_MOST = 64 * 2**20
#: Name of a loaded module -> hash of its file when the worker started. Keyed by name: `sys.modules` also holds objects
#: that allow no weak reference and have no hash, such as the ``lib`` of a cffi binding.
_loaded: dict[str, str] = {}


def remember_loaded() -> None:
    """Record the hash of every loaded module's file.

    A worker calls this after it has loaded its application. It keeps running that code even when a deployment replaces the
    files.
    """
    for name, module in list(sys.modules.items()):
        if _is_module(module) and name.partition(".")[0] not in sys.stdlib_module_names:
            _loaded.setdefault(name, _hash_of_file(module))


def of_function(function: Callable[..., Any]) -> Stamp:
    """Return the stamp of a function."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    found = {**_of_python(), "code": _hash_of(getattr(function, "__module__", ""))}
    for name in sorted(_used(module)):
        found[f"package {name}"] = _version(name)
    return found


def of_program(word: str) -> Stamp:
    """Return the stamp of a program, by content: the same name may be another program on another machine."""
    return {"headway": __version__, "program": _hash(shutil.which(word))}


def difference(wanted: Stamp, here: Stamp) -> str:
    """Describe how two stamps differ; empty if they are equal."""
    parts = [
        f"{name} is {here.get(name) or 'missing'} here and {wanted.get(name) or 'missing'} where the job was started"
        for name in sorted({*wanted, *here})
        if wanted.get(name) != here.get(name)
    ]
    return "; ".join(parts)


def _of_python() -> dict[str, str]:
    return {"headway": __version__, "python": ".".join(map(str, sys.version_info[:2]))}


def _hash_of(name: str) -> str:
    known = _loaded.get(name)
    return _hash_of_file(sys.modules.get(name)) if known is None else known


def _is_module(value: object) -> bool:
    """Return whether ``value`` is a module by type. `isinstance` trusts `__class__`, which proxies override."""
    return issubclass(type(value), types.ModuleType)


def _hash_of_file(module: object) -> str:
    """Hash the file of a module; empty for other objects.

    Reads no attribute that a lazy module would have to import.
    """
    return _hash(vars(module).get("__file__")) if _is_module(module) else ""


def _hash(path: object) -> str:
    if not isinstance(path, str):
        return ""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MOST)
    except (OSError, ValueError):  # ValueError: a null character in the path
        return ""
    return blake2b(content, digest_size=6).hexdigest()


def _used(module: object) -> set[str]:
    """Return the top-level packages the module's names come from, without the standard library and Headway."""
    if not _is_module(module):
        return set()
    found = vars(module)
    names = {home.partition(".")[0] for value in list(found.values()) if isinstance(home := _home(value), str)}
    own = str(found.get("__name__")).partition(".")[0]
    return {name for name in names if name not in sys.stdlib_module_names and name not in ("", own, "headway")}


def _home(value: object) -> object:
    """Return the module name a value comes from. A lazy object may raise anything on attribute access."""
    try:
        return getattr(value, "__name__" if _is_module(value) else "__module__", None)
    except Exception:  # noqa: BLE001 - a proxy of the application, for example settings that are not configured yet
        return type(value).__module__


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a module of the project, or its package has another name
        return _hash_of(package)
