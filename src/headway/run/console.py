"""What the user's function prints, while a bar is being drawn on the same terminal.

Printed straight to it, the next drawing would wipe it out. So workers print into a pipe, and the parent shows each line
above the bar. Output that goes to a file or another program is left alone: it does not meet the bar.
"""

from __future__ import annotations

import os


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
        return [line.decode(errors="replace") for line in lines]

    def enter_worker(self) -> None:
        """In the worker: print into the pipe from now on."""
        for descriptor in _terminals():
            os.dup2(self._writing, descriptor)

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
        return last + ([self._rest.decode(errors="replace")] if self._rest else [])


def _terminals() -> list[int]:
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
