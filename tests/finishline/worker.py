"""A process of a fleet, run by the tests: counts items and writes down each one that was acknowledged.

    python -m tests.finishline.worker STATE_URL PROJECT FIRST_ITEM [DATABASE]

It prints "ready" before its first count and "refused" for a call made after the shutdown began.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from headway.core.lifecycle import Shutdown, on_signals
from headway.errors import Stopping
from headway.finishline import FinishLine


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(url: str, project: str, first: str, database: str | None = None) -> int:
    with on_signals(Shutdown()) as shutdown:
        line = FinishLine(url, database, journal=database is not None, shutdown=shutdown)
        line.progress(project)
        say("ready")

        def count() -> None:
            number = int(first)
            with suppress(Stopping):
                while True:
                    line.item_done(project, number)
                    say("ack", number)
                    number += 1

        counting = threading.Thread(target=count)
        counting.start()
        while not shutdown.stop.wait(0.05):
            continue
        try:
            line.item_done(project, -1)
        except Stopping:
            refused = True
        drained = line.close()
        counting.join()
        say("refused" if refused else "accepted")
        say("drained" if drained else "late")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
