"""Chromium: the machine's own. Run as a module, this installs Debian's package where there is none and we may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALLING = (
    ("apt-get", "update", "-q"),
    ("apt-get", "install", "-q", "-y", "chromium"),
)


def find() -> str | None:
    """Its path, if it is there."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def obtain() -> str | None:
    """Its path, after it was installed if need be."""
    if find() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in INSTALLING:
            subprocess.run(
                command, check=False, timeout=600, stdout=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
    return find()


if __name__ == "__main__":
    if obtain() is None:
        sys.exit("There is no Chromium; its tests will say so. Install it: apt-get install chromium")
