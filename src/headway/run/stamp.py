"""Which version of the code a job was started with: what the workers of a fleet compare with their own.

A stamp is a few words and short hashes: Python's version, headway's, the hash of the file that has the function, and the
versions of the packages that this file's module uses. A worker that has another one would run other code under the same
name.
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
from weakref import WeakKeyDictionary

from headway._version import __version__

Stamp = Mapping[str, str]
#: Of a program only so many bytes are read; beyond that its size speaks for it.
_MOST = 64 * 2**20
#: Modules that were loaded when their process began to work, with the hash their files had then.
_loaded: WeakKeyDictionary[types.ModuleType, str] = WeakKeyDictionary()


def remember_loaded() -> None:
    """Called by a worker when it has loaded its application: what it runs is what it has in memory, whatever is put in the
    place of those files while it lives."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in sys.stdlib_module_names and isinstance(module, types.ModuleType):
            _loaded.setdefault(module, _hash(getattr(module, "__file__", None)))


def of_function(function: Callable[..., Any]) -> Stamp:
    module = sys.modules.get(getattr(function, "__module__", ""))
    found = {**_of_python(), "code": _hash_of(module)}
    for name in sorted(_used(module)):
        found[f"package {name}"] = _version(name)
    return found


def of_program(word: str) -> Stamp:
    """Programs are compared by their content: whatever is called the same on another machine need not be the same."""
    return {"headway": __version__, "program": _hash(shutil.which(word))}


def difference(wanted: Stamp, here: Stamp) -> str:
    """What differs, for people; empty if nothing does."""
    parts = [
        f"{name} is {here.get(name) or 'missing'} here and {wanted.get(name) or 'missing'} where the job was started"
        for name in sorted({*wanted, *here})
        if wanted.get(name) != here.get(name)
    ]
    return "; ".join(parts)


def _of_python() -> dict[str, str]:
    return {"headway": __version__, "python": ".".join(map(str, sys.version_info[:2]))}


def _hash_of(module: types.ModuleType | None) -> str:
    known = None if module is None else _loaded.get(module)
    return _hash(getattr(module, "__file__", None)) if known is None else known


def _hash(path: str | None) -> str:
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MOST)
    except OSError:
        return ""
    return blake2b(content, digest_size=6).hexdigest()


def _used(module: types.ModuleType | None) -> set[str]:
    """Top-level names of the packages that the module has names from, without Python's own and ours."""
    names = set()
    for value in list(vars(module).values()) if module is not None else ():
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str):
            names.add(home.partition(".")[0])
    own = (module.__name__ if module is not None else "").partition(".")[0]
    return {name for name in names if name not in sys.stdlib_module_names and name not in ("", own, "headway")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a module of the project, or one whose package has another name
        return _hash_of(sys.modules.get(package))
