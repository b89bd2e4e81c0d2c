"""Build the wheel and the sdist into dist/, check their data, and try the wheel where nothing else is installed.

    python tools/package.py

Exits 1 when `twine check --strict` or the trial fails. The trial runs a job by the command line and from Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from headway import __version__
from headway._version import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

#: A new user's first steps. Each command has to exit 0.
TRIAL = """
set -eu
headway --version
printf '1\\n2\\n3\\n' > numbers.txt
echo 'def double(text): return 2 * int(text)' > work.py
headway run work:double --items numbers.txt --job numbers --output numbers.csv
headway show numbers
headway doctor
python -c 'import headway; assert headway.map(abs, [-1, -2], job="from-python").done == 2'
"""


def build() -> list[Path]:
    """Build both archives and return their paths."""
    stem = f"{DISTRIBUTION.replace('-', '_')}-{__version__}"
    archives = [DIST / f"{stem}-py3-none-any.whl", DIST / f"{stem}.tar.gz"]
    for archive in archives:
        archive.unlink(missing_ok=True)
    run([sys.executable, "-m", "hatchling", "build", "--directory", str(DIST)])
    return archives


def try_alone(wheel: Path) -> None:
    """Install the wheel into an empty environment and take a new user's first steps there."""
    with tempfile.TemporaryDirectory(prefix="headway-package-") as name:
        place = Path(name, "venv")
        venv.create(place, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "--disable-pip-version-check"]
        run([*pip, "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel)])
        work = Path(name, "work")
        work.mkdir()
        path = os.pathsep.join([str(place / "bin"), "/usr/bin", "/bin"])
        run(["sh", "-c", TRIAL], cwd=work, env={"PATH": path, "HOME": name})


def run(command: Sequence[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit {done.returncode}: {' '.join(command[:4])}")


def main() -> None:
    archives = build()
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)])
    try_alone(archives[0])
    print(f"{archives[0].name}: built, checked and tried alone")


if __name__ == "__main__":
    main()
