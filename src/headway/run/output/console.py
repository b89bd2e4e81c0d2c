"""Output of the user's function while a bar is drawn on the same terminal.

The next redraw would erase output printed directly. So workers print into a pipe, and the parent shows each line
above the bar. Output to a file or another program is not redirected.
"""

from __future__ import annotations

import os
import re

from headway.core.text import printable


class Console:
    """The pipe into which workers print."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._rest = b""

    @staticmethod
    def is_needed() -> bool:
        """Return whether stdout or stderr is a terminal."""
        return bool(_terminals())

    def fileno(self) -> int:
        """Return the descriptor to read from, for the selector."""
        return self._reading

    def lines(self) -> list[str]:
        """Return the complete lines that have arrived."""
        try:
            data = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return []
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > 1 << 16:  # show an endless line in parts
            lines.append(self._rest)
            self._rest = b""
        return [shown(line.decode(errors="replace")) for line in lines]

    def enter_worker(self) -> None:
        """Redirect this worker's terminal output into the pipe."""
        for descriptor in _terminals():
            os.dup2(self._writing, descriptor)

    def streams(self) -> dict[str, int]:
        """Return the same redirection for a spawned worker."""
        return {("stdout", "stderr")[descriptor - 1]: self._writing for descriptor in _terminals()}

    def close(self) -> list[str]:
        """Close the pipe and return the last lines, including an unfinished one."""
        os.close(self._writing)
        last = []
        while True:
            found = self.lines()
            last += found
            if not found:
                break
        os.close(self._reading)
        return last + ([shown(self._rest.decode(errors="replace"))] if self._rest else [])


#: Colours are kept. All other terminal commands are removed, because they could move or erase the bar.
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_COMMAND = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: cursor, clearing, modes
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS and their like: title, clipboard
    r"|\x1b[ -/]*[0-~]?"  # short sequences, and an escape cut off at the end of the line
)


def shown(line: str) -> str:
    """Return a line as it may appear above the bar.

    Only the text after the last carriage return is kept, and of control sequences only colours.
    """
    line = next((part for part in reversed(line.split("\r")) if part), "")
    if line.isprintable():
        return line
    kept = _COMMAND.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", line)
    pieces = re.split(f"({_COLOUR.pattern})", kept.expandtabs())
    text = "".join(piece if _COLOUR.fullmatch(piece) else printable(piece) for piece in pieces)
    return f"{text}\x1b[0m" if _COLOUR.search(text) else text


def _terminals() -> list[int]:
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
