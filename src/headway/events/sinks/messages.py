"""Messages for people: one sentence that says what happened, and what to do next."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote

from headway.core.text import printable
from headway.events.envelope import Event, Json
from headway.telemetry import redact

#: Event types that chat and mail sinks take unless their address names others.
NOTIFIED = ("job.completed", "task.failed", "alert.opened", "alert.closed")

#: The type of the event that ``headway notify test`` sends.
TEST = "notify.test"

#: Characters of a sentence.
LENGTH = 500


def test_event() -> Event:
    """Return a new event of type notify.test."""
    id = f"{TEST}:{uuid.uuid4().hex[:12]}"
    return Event(
        id, TEST, datetime.now(UTC), "headway.notify", "test", 1, {"text": "This is a test message from Headway."}
    )


class Message(NamedTuple):
    """A sentence, and lines with the command and the link to act."""

    sentence: str
    actions: tuple[str, ...]


def message_of(event: Event, web_url: str | None = None) -> Message:
    """Write the message for an event. ``web_url`` is the address of the dashboard; without it there is no link."""
    sentence, command, page = _described(event)
    actions = [f"Run: {command}"] if command else []
    if web_url and page:
        actions.append(f"Open: {web_url.rstrip('/')}{page}")
    return Message(_one_line(sentence), tuple(_one_line(action) for action in actions))


def _described(event: Event) -> tuple[str, str, str]:
    """Return the sentence, the command and the path of the page. Any of the last two may be empty."""
    data, subject = event.data, shlex.quote(event.job)
    match event.type:
        case "job.completed":
            total, done, failed = (_number(data, name) for name in ("total", "succeeded", "failed"))
            if event.source != "headway.ledger":  # a project of the finish line
                ended = f"Project {event.job} finished: {done:,} of {total:,} items succeeded, {failed:,} failed."
                return ended, f"headway progress {subject}", "/projects"
            page = f"/jobs/{quote(event.job, safe='')}"
            if failed:
                ended = (
                    f"Job {event.job} finished with failures: {done:,} of {total:,} items succeeded, {failed:,} failed."
                )
                return ended, f"headway dead list {subject}", page
            return f"Job {event.job} completed: all {total:,} items succeeded.", f"headway show {subject}", page
        case "task.failed":
            user = f" of user {data['user_id']}" if data.get("user_id") else ""
            why = f": {data['error']}" if data.get("error") else "."
            tries = _number(data, "attempts")
            failed_task = f"Task {event.job} ({data.get('kind')}){user} failed after {tries} tries{why}"
            return failed_task, f"headway task show {subject}", f"/tasks/{quote(event.job, safe='')}"
        case "alert.opened":
            return (
                f"Alert ({data.get('severity')}): {data.get('text')}",
                f"headway alerts ack {_number(data, 'alert')}",
                "/alerts",
            )
        case "alert.closed":
            lasted = f" It was open for {_number(data, 'seconds'):,} s."
            return f"Alert closed: {data.get('text')}{lasted}", "headway alerts --history", "/alerts"
        case _ if event.type == TEST:
            return "This is a test message from Headway. Notifications work.", "headway relay --status", "/"
    return f"{event.type}: {event.job}", "", ""


def _number(data: Mapping[str, Json], name: str) -> int:
    value = data.get(name)
    return int(value) if isinstance(value, int | float) else 0


def _one_line(text: str) -> str:
    """Return ``text`` redacted, without control characters and at most `LENGTH` characters long."""
    return printable(redact(text).replace("\n", " "))[:LENGTH]
