"""Write the clips to render as JSON lines: `python make_clips.py 1000 > clips.jsonl`. They are the same every time."""

from __future__ import annotations

import json
import sys


def seconds(number: int) -> float:
    """Most clips take milliseconds, some a second, a few five seconds."""
    if number % 150 == 20:
        return 5.0
    if number % 40 == 7:
        return 1.0
    if number % 8 == 3:
        return 0.2
    return 0.001 + number % 10 / 1000


def codec(number: int) -> str:
    if number % 300 == 45:
        return "broken"
    if number % 100 == 60:
        return "betamax"
    if number % 50 == 10:
        return "vhs"
    return "av1" if number % 2 else "h264"


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        print(json.dumps({"clip": f"clip-{number:05d}", "codec": codec(number), "seconds": seconds(number)}))
