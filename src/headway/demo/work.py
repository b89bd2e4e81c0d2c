"""The work of the demo.

The demo copies this file and imports it as ``docjobs``, so that it counts as user code: failures name a frame in it.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.queue.task_queue import TaskQueue
    from headway.queue.worker.execution import RunningTask


class UpstreamTimeout(Exception):
    pass


class DocumentCorrupt(Exception):
    pass


def extract(item: dict[str, Any]) -> int:
    """Process one item of the job. Some items always fail, others sometimes."""
    document = fetch(item["id"], int(item["number"]))
    return count_pages(item["id"], document)


def fetch(name: str, number: int) -> int:
    time.sleep(random.uniform(0.01, 0.08))
    if number % 60 == 7:
        raise UpstreamTimeout(f"GET https://store.example/docs/{name}.pdf timed out after 30.0 s")
    if random.random() < 0.02:
        raise ConnectionResetError("the store hung up")
    return number


def count_pages(name: str, document: int) -> int:
    if document % 190 == 11:
        raise DocumentCorrupt(f"{name}.pdf: xref table not found at offset {document * 41}")
    return document % 40


def train(rate: float) -> float:
    """Run one job of a plain RQ queue that the watcher follows."""
    if rate > 0.5:
        raise ValueError(f"the loss is not a number at rate {rate}")
    return rate


def queue(database: str | None = None) -> TaskQueue:
    """Return the queue with its handlers, for ``headway worker --app docjobs:queue``."""
    from headway.config import Config
    from headway.queue.task_queue import TaskQueue

    made = TaskQueue(database or Config().text("database"))

    @made.handler("caption", timeout=30, retries=1, retry_delay=2.0)
    def caption(task: RunningTask, payload: Any) -> str:
        for percent in (25, 50, 75):
            time.sleep(random.uniform(0.05, 0.4))
            task.progress(percent, f"{percent} of 100 pixels")
        return describe(payload["image"])

    @made.handler("export", timeout=30, retries=0)
    def export(task: RunningTask, payload: Any) -> int:  # noqa: ARG001 - a handler gets both
        time.sleep(random.uniform(0.2, 1.5))
        return int(payload["image"])

    return made


def describe(image: int) -> str:
    if image % 9 == 4:
        raise DocumentCorrupt(f"image-{image}.png: unknown chunk")
    return "a dog on a bicycle"
