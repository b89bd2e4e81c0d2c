"""Viewers who ask for previews: `python viewers.py 5` submits five for each of them, and waits for the last.

Each line of its output is the id of an accepted task. A viewer may have one task at a time, so some requests are refused:
they are submitted again under the same id until the queue accepts them. The same id is also what makes it safe to repeat
a submission that failed while the database was away.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid

from studio import queue

from headway.errors import HeadwayError

VIEWERS: tuple[str | int, ...] = ("anna@example.org", "bert@example.org", 7, 8)
GIVE_UP_SECONDS = 300


def ask(viewer: str | int, previews: int) -> None:
    for number in range(previews):
        id = uuid.uuid4().hex
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < deadline:
            try:
                queue.submit("preview", {"clip": f"clip-{number:05d}", "seconds": 0.2}, user_id=viewer, id=id)
            except HeadwayError:  # the viewer's previous task has not ended, or the database is away
                time.sleep(0.1)
                continue
            print(id, flush=True)
            break


if __name__ == "__main__":
    threads = [threading.Thread(target=ask, args=(viewer, int(sys.argv[1]))) for viewer in VIEWERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
