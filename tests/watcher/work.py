"""What the RQ workers of these tests run, and the worker itself: ``python -m tests.watcher.work URL QUEUE [LEASE]``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


class Boom(Exception):
    """What a failing job raises."""


def succeed() -> int:
    return 1


def fail(message: str = "no digits here", **named: object) -> None:
    raise Boom(message)


def die() -> None:
    """As the kernel does it to a job that took too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(flag: str, then: str = "succeed") -> int:
    """Run until the file is there."""
    while not Path(flag).exists():
        time.sleep(0.01)
    if then == "fail":
        raise Boom("failed after waiting")
    return 1


def main() -> None:
    from redis import Redis
    from rq import Queue, Worker
    from rq.job import Job

    url, name, lease = sys.argv[1], sys.argv[2], int(sys.argv[3])

    class HastyWorker(Worker):
        """The worker of RQ; its lease on an execution is 60 to 90 s, too long for a test to wait for."""

        def get_heartbeat_ttl(self, job: Job) -> int:
            return lease or super().get_heartbeat_ttl(job)

    connection = Redis.from_url(url)
    HastyWorker([Queue(name, connection=connection)], connection=connection, job_monitoring_interval=1).work(
        logging_level="WARNING", with_scheduler=False
    )


if __name__ == "__main__":
    main()
