"""The main job, start to end: write an advertisement for each of 400 products, on a SQLite file.

Some calls fail the first time and are tried again. Everything this makes is in ``.work`` beside it. Interrupted in any
way, the next call goes on where it was; after a finished one it starts over, so that there is always something to see.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = HERE / ".work"
PRODUCTS = 400

NAMES = (
    "desk lamp",
    "rain jacket",
    "tea pot",
    "bicycle bell",
    "wool scarf",
    "picture frame",
    "garden chair",
    "notebook",
)
COLORS = ("green", "dark blue", "white", "copper", "yellow")


def main() -> int:
    # Ctrl-C reaches the command below as well, and it decides what to do. Not SIG_IGN: that it would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    finished = WORK / "finished"
    if finished.exists():
        shutil.rmtree(WORK)
    WORK.mkdir(exist_ok=True)
    products = write_products(WORK / "products.jsonl")
    os.chdir(ROOT)
    headway, place = Path(sys.executable).with_name("headway"), WORK.relative_to(ROOT)
    command = [
        "headway", "run", "examples.ads.ads:make_ad", "--items", str(place / products.name), "--key", "sku", "--job", "ads",
        "--database", f"sqlite:///{place / 'ads.db'}", "--output", str(place / "ads.jsonl"), "--workers", "4",
    ]  # fmt: skip
    environment = {**os.environ, "HEADWAY_RETRY_DELAY": "0.3"}  # the service of this example recovers quickly
    print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
    code = subprocess.run([str(headway), *command[1:]], env=environment, timeout=120, check=False).returncode
    if code == 0:
        finished.touch()
        say_what_next(place, headway)
    return code


def write_products(path: Path) -> Path:
    """The same products every time."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(PRODUCTS):
            product = {
                "sku": f"P-{number:04d}",
                "name": NAMES[number % len(NAMES)],
                "color": COLORS[number % len(COLORS)],
                "price": 490 + 37 * number % 9000,
            }
            file.write(json.dumps(product) + "\n")
    return path


def say_what_next(place: Path, headway: Path) -> None:
    with (place / "ads.jsonl").open(encoding="utf-8") as file:
        first = json.loads(file.readline())["result"]
    program = os.path.relpath(headway)
    database = f"--database sqlite:///{place / 'ads.db'}"
    print(f"""
The first advertisement: {first["ad"]}

What to try next:
  {program} show ads {database}
      how it went
  {program} log ads --tsv {database} | head
      every run of every product, also the failed ones
  head -3 {place / "ads.jsonl"}
      the results
  make run
      once more; press Ctrl-C in the middle (or kill -9 it), then make run again: it goes on where it was""")


if __name__ == "__main__":
    sys.exit(main())
