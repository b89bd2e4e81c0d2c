"""Communication between parent and workers: frames over a socket, and a shared page of running items.

A frame is a line of JSON. The payloads of work frames follow it as they are stored. So the parent decodes no payload,
and a damaged one affects neither the frame nor other items. Frames to a worker:

    {"work": [[idx, attempts, length], ...], "failures": n or null}     run these in order; the payloads follow
    {"recall": true}                              give back items that have not begun
    {"stop": true}                                the same, then exit

``length`` counts characters. Once ``failures`` items have failed in the worker's lifetime, it gives back the rest.
Frames from a worker:

    {"done": [[idx, seconds, result, or false: not kept, or null: none], ...],
     "failed": [[idx, attempts, seconds, type, message, frame, detail, retryable, printed or null], ...],
     "later": [[idx, seconds, delay, reason, whole job], ...],     postponed by RetryLater
     "printed": [[idx, text], ...]}               output of items in this or a later "done"
    {"back": [idx, ...]}                          items it will not begin
    {"alone": [idx, ...]}                         items that another one may have disturbed: rerun each alone
    {"short": reason}                             no program could be started for lack of resources
    {"setup": reason}                             its set-up failed; it exits
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from headway.ledger import Item

_LENGTH = struct.Struct("<I")
#: A slot: running item (index + 1, or 0), its start, last item begun (index + 1), and process id.
_SLOT = struct.Struct("<qdqq")
SLOT_SIZE = _SLOT.size
_RUNNING = struct.Struct("<q")
#: Size of the header, whose first byte says whether the worker lost its socket.
_HEADER = 8


def payload_text(item: Item) -> str:
    """Return the payload to send. One that was changed to a non-text value is sent as "", which fails as damaged."""
    payload: object = "null" if item.payload is None else item.payload
    return payload if isinstance(payload, str) else ""


def work_frame(items: Iterable[Item], failures: int | None) -> str:
    """Build a work frame. ``failures`` is the total at which the worker gives the rest back."""
    heads, payloads = [], []
    for item in items:
        text = payload_text(item)
        heads.append(f"[{item.idx},{item.attempts},{len(text)}]")
        payloads.append(text)
    limit = "null" if failures is None else failures
    return f'{{"work":[{",".join(heads)}],"failures":{limit}}}\n{"".join(payloads)}'


def unpack_work(frame: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Yield (idx, attempts, payload) of a work frame."""
    body, at = frame["body"], 0
    for idx, attempts, length in frame["work"]:
        yield idx, attempts, body[at : at + length]
        at += length


class Wire:
    """One end of the socket.

    A worker's end blocks. The parent's end buffers instead, so that the two cannot deadlock while both send.
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        self.socket = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        end.setblocking(blocking)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, frame: str) -> None:
        """Queue a frame and send as much as possible; `push` sends the rest."""
        data = frame.encode(errors="replace")
        self._outgoing += _LENGTH.pack(len(data)) + data
        self.push()

    def push(self) -> None:
        """Send as much of the buffer as possible."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass

    @property
    def pending(self) -> bool:
        """Whether data waits to be sent."""
        return bool(self._outgoing)

    def receive(self) -> bool:
        """Read available data; return False at the end of the stream."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:  # connection reset: the other end died before it read our data
            return False
        self._incoming += data
        return bool(data)

    def frames(self) -> Iterator[dict[str, Any]]:
        """Yield the complete frames."""
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
        """Close the socket."""
        self.socket.close()


class SlotTable:
    """The running item of each slot, in memory that processes of one machine share.

    The parent can read it after the process that wrote it was killed. All processes of a machine share the monotonic
    clock.
    """

    def __init__(self, memory: mmap.mmap, header: int) -> None:
        self._memory, self._header = memory, header

    def begin(self, slot: int, idx: int, now: float) -> None:
        """Record that the slot runs item ``idx`` since ``now``."""
        _SLOT.pack_into(self._memory, self._header + slot * _SLOT.size, idx + 1, now, idx + 1, os.getpid())

    def end(self, slot: int) -> None:
        """Record that the slot's item has ended."""
        _RUNNING.pack_into(self._memory, self._header + slot * _SLOT.size, 0)

    def clear(self, slot: int) -> None:
        """Forget all items of the slot."""
        _SLOT.pack_into(self._memory, self._header + slot * _SLOT.size, 0, 0.0, 0, 0)

    def read(self, slot: int) -> tuple[int, float, int, int]:
        """Return running item (index + 1, or 0), its start, last item begun (index + 1, or 0), and process id."""
        return _SLOT.unpack_from(self._memory, self._header + slot * _SLOT.size)


class Slots(SlotTable):
    """The slots of a worker process. It runs one item per slot."""

    def __init__(self, count: int, file: int = -1) -> None:
        """Map the page. A spawned process passes the descriptor ``file``."""
        self.count = count
        super().__init__(mmap.mmap(file, self.size(count)), _HEADER)

    @staticmethod
    def size(count: int) -> int:
        """Return the size of the page for ``count`` slots, bytes."""
        return max(mmap.PAGESIZE, _HEADER + count * _SLOT.size)

    def running(self) -> list[tuple[int, float]]:
        """Return (idx, start) of running items."""
        return [(idx - 1, began) for idx, began, _, _ in map(self.read, range(self.count)) if idx]

    def last(self) -> set[int]:
        """Return the last item each slot began, whether or not it has ended."""
        return {last - 1 for _, _, last, _ in map(self.read, range(self.count)) if last}

    def mark_cut_off(self) -> None:
        """Record that the worker lost its socket because the function closed it."""
        self._memory[0] = 1

    @property
    def cut_off(self) -> bool:
        """Whether the worker lost its socket."""
        return self._memory[0] == 1

    def close(self) -> None:
        """Unmap the page."""
        self._memory.close()
