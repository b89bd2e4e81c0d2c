"""The application's queue: viewers ask for a preview of a clip, one at a time."""

from __future__ import annotations

import time
from typing import Any

import films

from headway.queue import TaskQueue

queue = TaskQueue.from_settings()  # HEADWAY_DATABASE, HEADWAY_REDIS and HEADWAY_QUEUE_KEYS


@queue.handler("preview", timeout=60, retries=5)
def preview(task: Any, payload: dict[str, Any]) -> dict[str, Any]:
    for quarter in (25, 50, 75):
        task.progress(quarter, "rendering")
        time.sleep(payload["seconds"] / 4)
    return {"clip": payload["clip"], "version": films.VERSION}
