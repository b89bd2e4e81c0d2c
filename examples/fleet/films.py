"""The work: render a clip. It stands for a program that takes from a millisecond to five seconds.

`render` knows nothing of Headway. What happens to a clip depends on its codec:

- `h264` and `av1` are rendered.
- `vhs`: each machine misreads the tape once. The next try on that machine succeeds.
- `betamax` is supported by no version: the item becomes a dead letter.
- `broken` ends the process that decodes it.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

#: Part of every result, so that a reader sees which version rendered the clip.
VERSION = 1
#: A line for every clip that this machine began: time, version, clip.
JOURNAL = Path("begun.log")
#: Tapes that this machine has misread once.
TAPES = Path(".tapes")


class UnsupportedCodec(Exception):
    """No version of this module can decode the clip."""


class TapeMisread(Exception):
    """The tape has to be rewound and read again."""


def render(clip: dict[str, Any]) -> dict[str, Any]:
    """Render one clip."""
    with JOURNAL.open("a", encoding="utf-8") as journal:
        journal.write(f"{time.time()} {VERSION} {clip['clip']}\n")
    match clip["codec"]:
        case "betamax":
            raise UnsupportedCodec(f"{clip['clip']}: betamax cannot be decoded")
        case "broken":
            os._exit(11)
        case "vhs" if _is_first_read(clip["clip"]):
            raise TapeMisread(f"{clip['clip']}: rewind the tape")
    time.sleep(clip["seconds"])
    return {"clip": clip["clip"], "version": VERSION, "host": socket.gethostname()}


def _is_first_read(name: str) -> bool:
    TAPES.mkdir(exist_ok=True)
    try:
        (TAPES / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
