"""RQ workers train digit classifiers; some runs fail, hang, are canceled or killed; the watcher tells of each.

    python examples/training/run.py

Starts a private Redis, two RQ workers and the watcher, puts seven training runs into the queue, and prints the
watcher's events beside them. Takes about ten seconds and leaves nothing behind. (A killed *worker* is told as lost when
its lease lapses, which RQ sets to 60 to 90 seconds: too long to wait for here.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(HERE)]

import jobs  # noqa: E402 - after the path
from redis import Redis  # noqa: E402
from rq import Queue  # noqa: E402
from rq.command import send_stop_job_command  # noqa: E402

from tests.services.redis import RedisServer, installations  # noqa: E402 - any redis-server would do

CHANNEL = "digits:events"
EXPECTED = {
    "wrong-rate": "failed",
    "out-of-memory": "killed",
    "never-arrives": "stuck",
    "not-needed": "canceled",
    "changed-my-mind": "stopped",
}


def start(directory: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join((str(ROOT / "src"), str(HERE)))
    return subprocess.Popen(
        command, cwd=directory, env={**os.environ, "PYTHONPATH": path, **environment}, stderr=subprocess.DEVNULL
    )


def wait(what: str, check: object, seconds: float = 30) -> None:
    assert callable(check)
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain: {what}")
        time.sleep(0.05)


def main() -> None:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        server = RedisServer(Path(directory, "redis"), installations()[0], notify_keyspace_events="Kz")
        stack.callback(server.discard)
        server.start()
        redis = Redis(port=server.port)
        events = redis.pubsub(ignore_subscribe_messages=True)
        events.subscribe(CHANNEL)

        watcher = start(
            directory, sys.executable, "-m", "headway", "watch",
            REDIS_URL=server.url(), RQ__QUEUE="digits", DIGITS_EVENTS_CHANNEL=CHANNEL,
            RQ_WATCHER_STUCK_TIMEOUT_SECONDS="3", RQ_WATCHER_FIELDS='{"site": "example"}',
        )  # fmt: skip
        stack.callback(lambda: (watcher.terminate(), watcher.wait()))
        wait("the watcher listens", lambda: redis.pubsub_numpat() == 3)
        for _ in range(2):
            worker = start(
                directory, sys.executable, "-m", "rq.cli", "worker", "digits", "--quiet", "--url", server.url()
            )
            stack.callback(lambda worker=worker: (worker.kill(), worker.wait()))

        queue = Queue("digits", connection=redis)
        queue.enqueue(jobs.train, "small", job_id="small")
        queue.enqueue(jobs.train, "wrong", rate=7, job_id="wrong-rate")
        queue.enqueue(jobs.train_until_killed, "big", job_id="out-of-memory")
        queue.enqueue(jobs.train, "noisy", noise=0.4, job_id="noisy")
        endless = queue.enqueue(jobs.train_for_ever, "endless", job_id="never-arrives", job_timeout=-1)
        regret = queue.enqueue(jobs.train_for_ever, "regret", job_id="changed-my-mind")
        spare = queue.enqueue(jobs.train, "spare", job_id="not-needed")
        spare.cancel()
        wait("both endless runs are under way", lambda: endless.get_status() == regret.get_status() == "started")
        send_stop_job_command(redis, regret.id)

        told: dict[str, str] = {}
        deadline = time.monotonic() + 30
        while set(told) != set(EXPECTED) and time.monotonic() < deadline:
            message = events.get_message(timeout=1)
            if message is not None:
                event = json.loads(message["data"])
                told[event["job"]] = event["data"]["kind"]
                print(f"{event['type']}  {event['job']:<16} {event['data']['kind']:<9} {event['data']['message']}")
        for job_id in ("small", "noisy"):
            job = queue.fetch_job(job_id)
            assert job is not None
            print(f"finished                {job_id:<16} accuracy {job.return_value():.0%}")
        assert told == EXPECTED, told
        send_stop_job_command(redis, endless.id)
        wait("the last run ended", lambda: endless.get_status() == "stopped")


if __name__ == "__main__":
    main()
