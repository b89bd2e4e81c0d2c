"""An application to try a deployment with; put your own in its place.

headway worker --app tasks:queue
"""

from __future__ import annotations

from typing import Any

from headway.queue import TaskQueue

#: Database, Redis and everything else come from HEADWAY_* of its process.
queue = TaskQueue.from_settings()


@queue.handler("echo", timeout=60)
def echo(task: Any, payload: Any) -> Any:
    """Give back what was sent."""
    task.progress(50, "half way")
    return payload
