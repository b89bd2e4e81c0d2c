"""What the user's function prints, while a bar is being drawn on the same terminal.

Printed straight to it, the next drawing would wipe it out. So workers print into a pipe, and the parent shows each line
above the bar. Output that goes to a file or another program is left alone: it does not meet the bar.
"""

from __future__ import annotations

import os
import re

from headway.wording import printable


class Console:
    """The pipe. Its writing end belongs to the workers."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._rest = b""

    @staticmethod
    def is_needed() -> bool:
        return bool(_terminals())

    def fileno(self) -> int:
        return self._reading

    def lines(self) -> list[str]:
        """The whole lines that have arrived."""
        try:
            data = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return []
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > 1 << 16:  # a line without end is shown in parts
            lines.append(self._rest)
            self._rest = b""
        return [shown(line.decode(errors="replace")) for line in lines]

    def enter_worker(self) -> None:
        """In the worker: print into the pipe from now on."""
        for descriptor in _terminals():
            os.dup2(self._writing, descriptor)

    def streams(self) -> dict[str, int]:
        """The same for a worker that is started anew."""
        return {("stdout", "stderr")[descriptor - 1]: self._writing for descriptor in _terminals()}

    def close(self) -> list[str]:
        """The last lines, the unfinished one included."""
        os.close(self._writing)
        last = []
        while True:
            found = self.lines()
            last += found
            if not found:
                break
        os.close(self._reading)
        return last + ([shown(self._rest.decode(errors="replace"))] if self._rest else [])


#: Colours are kept. Everything else that a terminal takes as a command is left out: it would move the bar or wipe it.
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_COMMAND = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: cursor, clearing, modes
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS and their like: title, clipboard
    r"|\x1b[ -/]*[0-~]?"  # the shorter ones, and an escape cut off at the end of the line
)


def shown(line: str) -> str:
    """A line as it may appear above the bar: of one that was overwritten by carriage returns, what was left in the end;
    colours, but no other control."""
    line = next((part for part in reversed(line.split("\r")) if part), "")
    if line.isprintable():
        return line
    kept = _COMMAND.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", line)
    pieces = re.split(f"({_COLOUR.pattern})", kept.expandtabs())
    text = "".join(piece if _COLOUR.fullmatch(piece) else printable(piece) for piece in pieces)
    return f"{text}\x1b[0m" if _COLOUR.search(text) else text


def _terminals() -> list[int]:
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
