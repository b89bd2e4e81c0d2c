"""One no-op task for each task queue headway is compared with; their workers import this file.

BENCH_PEER says which queue, BENCH_REDIS where its Redis is, BENCH_TICKS the file to which a finished task appends
four bytes: that is how the end is seen, for about two microseconds and without any queue's own help.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable

PEER = os.environ["BENCH_PEER"]
REDIS = os.environ["BENCH_REDIS"]
_ticks = os.open(os.environ["BENCH_TICKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def tick(number: int) -> None:
    os.write(_ticks, struct.pack("<I", number))


enqueue: Callable[[int], object]

if PEER == "dramatiq":
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url=REDIS))
    enqueue = dramatiq.actor(tick).send
elif PEER == "huey":
    from huey import RedisHuey

    huey = RedisHuey("bench", url=REDIS)
    enqueue = huey.task()(tick)
elif PEER == "celery":
    from celery import Celery

    app = Celery("queues", broker=REDIS)
    # Its fastest ordinary configuration: acknowledged before it runs, no result kept.
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
    _task = app.task(tick)

    def enqueue(number: int) -> object:
        with app.producer_or_acquire() as producer:
            return _task.apply_async((number,), producer=producer)


def main() -> None:
    """``queues.py COUNT``: enqueue so many tasks; print how long that took."""
    count = int(sys.argv[1])
    began = time.monotonic()
    for number in range(count):
        enqueue(number)
    print(time.monotonic() - began)


if __name__ == "__main__":
    # Under its own name, so that tasks are known by the name the workers import.
    import queues

    queues.main()
