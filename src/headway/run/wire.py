"""How parent and workers talk: frames over a socket, and a shared page that says what runs right now.

A frame is a line of JSON, for work followed by the payloads as they are stored: the parent decodes no payload, and a
damaged one spoils neither the frame nor its neighbours. Frames to a worker:

    {"work": [[idx, attempts, length], ...], "failures": n or null}     to be run, in this order; the payloads follow
    {"recall": true}                              give back what has not begun
    {"stop": true}                                the same, then end

``length`` counts characters. ``failures``: when so many items have failed in that worker, ever, it gives the rest back.
And from it:

    {"done": [[idx, seconds, result, or false: not kept, or null: none], ...],
     "failed": [[idx, attempts, seconds, type, message, frame, detail, retryable, printed or null], ...],
     "printed": [[idx, text], ...]}               what items that are done, or will be in a later frame, printed
    {"back": [idx, ...]}                          what it does not begin
    {"alone": [idx, ...]}                         what another item may have disturbed: to be run again, alone
"""

from __future__ import annotations

import json
import mmap
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from headway.ledger import Item

_LENGTH = struct.Struct("<I")
#: Of a slot: the item that runs (its index + 1, or 0) and since when, then the item begun last.
_SLOT = struct.Struct("<qdq")
_RUNNING = struct.Struct("<q")
#: Before the slots: whether the worker found its socket gone.
_HEADER = 8


def work_frame(items: Iterable[Item], failures: int | None) -> str:
    """``items`` to be run, and how many failures the worker may have had in all before it gives the rest back."""
    heads, payloads = [], []
    for item in items:
        payload: object = "null" if item.payload is None else item.payload
        # Whatever a foreign hand put into the column: what is no text is no JSON either, and fails as damaged.
        text = payload if isinstance(payload, str) else ""
        heads.append(f"[{item.idx},{item.attempts},{len(text)}]")
        payloads.append(text)
    limit = "null" if failures is None else failures
    return f'{{"work":[{",".join(heads)}],"failures":{limit}}}\n{"".join(payloads)}'


def unpack_work(frame: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """(idx, attempts, payload) of a frame of work."""
    body, at = frame["body"], 0
    for idx, attempts, length in frame["work"]:
        yield idx, attempts, body[at : at + length]
        at += length


class Wire:
    """One end of the socket. A worker's blocks; the parent's never does: what a worker does not take yet waits here, so
    that two ends which both have much to say cannot wait for each other."""

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        self.socket = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        end.setblocking(blocking)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, frame: str) -> None:
        """Send a frame, as far as it goes; `push` sends the rest."""
        data = frame.encode(errors="replace")
        self._outgoing += _LENGTH.pack(len(data)) + data
        self.push()

    def push(self) -> None:
        """Go on sending what waits."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    def receive(self) -> bool:
        """Take what has arrived; False at the end of the stream."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:  # reset: the other end died with our words unread
            return False
        self._incoming += data
        return bool(data)

    def frames(self) -> Iterator[dict[str, Any]]:
        """The frames that are complete."""
        start, size = 0, len(self._incoming)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            end = start + _LENGTH.size + length
            if end > size:
                break
            head, _, body = self._incoming[start + _LENGTH.size : end].decode().partition("\n")
            frame = json.loads(head)
            frame["body"] = body
            yield frame
            start = end
        del self._incoming[:start]

    def close(self) -> None:
        self.socket.close()


class Slots:
    """Which item each slot of a worker runs and since when, readable by the parent after the worker was killed."""

    def __init__(self, count: int, file: int = -1) -> None:
        """``file``: its descriptor, for a process that is not forked from the one that made the page."""
        self.count = count
        self._page = mmap.mmap(file, self.size(count))

    @staticmethod
    def size(count: int) -> int:
        return max(mmap.PAGESIZE, _HEADER + count * _SLOT.size)

    def begin(self, slot: int, idx: int, now: float) -> None:
        _SLOT.pack_into(self._page, _HEADER + slot * _SLOT.size, idx + 1, now, idx + 1)

    def end(self, slot: int) -> None:
        _RUNNING.pack_into(self._page, _HEADER + slot * _SLOT.size, 0)

    def running(self) -> list[tuple[int, float]]:
        """(idx, began by the monotonic clock, which all processes of a machine share)."""
        return [(idx - 1, began) for idx, began, _ in self._all() if idx]

    def last(self) -> set[int]:
        """What each slot began last, whether or not it has ended."""
        return {last - 1 for _, _, last in self._all() if last}

    def mark_cut_off(self) -> None:
        """The worker cannot reach the parent any more: the function closed its socket."""
        self._page[0] = 1

    @property
    def cut_off(self) -> bool:
        return self._page[0] == 1

    def close(self) -> None:
        self._page.close()

    def _all(self) -> Iterator[tuple[int, float, int]]:
        return (_SLOT.unpack_from(self._page, _HEADER + slot * _SLOT.size) for slot in range(self.count))
