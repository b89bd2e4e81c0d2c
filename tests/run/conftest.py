"""Fixtures of the run's tests."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from headway import telemetry
from headway.cli import invoke


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(bytes)`: a file system of that size."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def quick_cli(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    headway_cli: Callable[..., subprocess.CompletedProcess[str]],
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """`headway_cli` without the start of a new Python, which takes most of the time of a short run: the command runs in
    this process, its workers are forked from it. With standard input, or settings, it is a process of its own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        if options:
            return headway_cli(*arguments, **options)
        words = [str(word) for word in arguments]
        out, err = io.StringIO(), io.StringIO()
        before = set(sys.modules)
        importlib.invalidate_caches()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["headway", *words])
            code = invoke(words)
        for name in set(sys.modules) - before:  # the user's modules: the next test has others of that name
            if getattr(sys.modules[name], "__file__", None) and str(sys.modules[name].__file__).startswith(
                str(tmp_path)
            ):
                del sys.modules[name]
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    yield run
    telemetry.configure()
