"""Payloads and results: encryption, custom codecs, text that a database cannot store."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from headway.core.lifecycle import Shutdown
from headway.errors import InvalidInput, NotFound, StorageError
from headway.queue.payload import PlainCodec
from headway.queue.rq.source import RqSource
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from headway.testing import eager
from tests.queue import app


def work_off(queue: TaskQueue) -> None:
    Worker(queue, settings=Settings(rest=0.05)).run(burst=True)


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_what_a_handler_returned_can_be_read_by_whose_task_it_is(database_url: str, isolation: Any):
    with TaskQueue(database_url) as queue:
        queue.handler("caption", isolation=isolation)(lambda task, payload: payload)
        told = queue.submit("caption", {"words": ["a", "boat"]}, user_id="anna")
        silent = queue.submit("caption")
        with pytest.raises(InvalidInput, match="is QUEUED: it has no result"):
            queue.result(told.id)
        work_off(queue)
        assert queue.result(told.id, user_id="anna") == {"words": ["a", "boat"]}
        assert queue.result(silent.id) is None
        with pytest.raises(NotFound):
            queue.result(told.id, user_id="ben")


@pytest.mark.parametrize("isolation", ["fork", "none", "eager"])
def test_with_keys_what_a_handler_returned_is_stored_encrypted(database_url: str, isolation: Any):
    with TaskQueue(database_url, keys=[Fernet.generate_key()]) as queue:
        queue.handler("caption", isolation="none" if isolation == "eager" else isolation)(lambda task, payload: payload)

        def look() -> None:
            (stored,) = queue.database.one("SELECT result FROM tasks WHERE id = ?", (task.id,)) or ("",)
            assert "canary" not in stored
            assert queue.result(task.id) == "canary"

        if isolation == "eager":
            with eager(queue):
                task = queue.submit("caption", "canary")
                look()
            return
        task = queue.submit("caption", "canary")
        work_off(queue)
        look()


@pytest.mark.parametrize("stored", ['"forged"', "payload"])
def test_a_result_that_somebody_put_there_is_refused_also_if_it_is_the_tasks_own_payload(
    queue: TaskQueue, stored: str, database_url: str
):
    with TaskQueue(database_url, keys=[Fernet.generate_key()]) as keyed:
        keyed.handler("caption", isolation="none")(lambda task, payload: "a boat")
        task = keyed.submit("caption", "canary")
        work_off(keyed)
        value = "payload" if stored == "payload" else f"'{stored}'"
        keyed.database.run(lambda tx: tx.execute(f"UPDATE tasks SET result = {value}"))
        with pytest.raises(StorageError, match=f"The result of task {task.id} cannot be decoded") as refused:
            keyed.result(task.id)
        assert "canary" not in str(refused.value)


@pytest.mark.parametrize("cannot", ["read the payload", "write the result"])
def test_a_codec_of_the_application_that_raises_costs_its_own_task_alone(tmp_path: Path, cannot: str):
    class Fussy(PlainCodec):
        def encode(self, task_id: str, text: str) -> str:
            if text == '"write the result"' and " " in task_id:
                raise RuntimeError
            return text

        def decode(self, task_id: str, stored: str) -> str:
            if stored == '"read the payload"':
                raise RuntimeError
            return stored

    with TaskQueue(f"sqlite:///{tmp_path}/queue.db", codec=Fussy()) as queue:
        queue.handler("caption", isolation="none")(lambda task, payload: payload)
        refused, taken = queue.submit("caption", cannot), queue.submit("caption", "a boat")
        work_off(queue)
        assert queue.get(refused.id).status is Status.FAILED
        assert "RuntimeError" in str(queue.get(refused.id).error)
        assert queue.result(taken.id) == "a boat"


def test_a_text_that_only_spells_the_character_zero_is_a_payload_and_a_result(queue: TaskQueue):
    queue.handler("echo", retries=0, isolation="none")(lambda task, payload: payload)
    task = queue.submit("echo", {"pattern": "\\u0000", "path": "C:\\\\u0000"})
    Worker(queue, shutdown=Shutdown()).run(burst=True)
    assert queue.get(task.id).status is Status.COMPLETED
    with pytest.raises(InvalidInput, match=r"U\+0000"):
        queue.submit("echo", "C:\\\0")


def drain(queue: TaskQueue) -> None:
    source = None if queue.backend.redis_url is None else RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, context=queue.context, settings=Settings(rest=0.05)).run(burst=True)


def test_a_payload_that_was_moved_to_another_task_is_refused_and_said(
    database_url: str, caplog: pytest.LogCaptureFixture
):
    from cryptography.fernet import Fernet

    with app.build(database_url, keys=[Fernet.generate_key()]) as queue:
        for id in ("one", "two", "fine"):
            queue.submit("echo.none", id, id=id)
        queue.database.run(
            lambda tx: tx.execute(
                "UPDATE tasks SET payload = (SELECT payload FROM tasks AS other WHERE other.id = 'two') WHERE id = 'one'"
            )
        )
        with caplog.at_level(logging.CRITICAL, "headway"):
            drain(queue)
        assert queue.get("one").error == "PayloadRefused: The payload of task one belongs to another task."
        assert (queue.get("one").attempts, queue.get("one").status) == (1, Status.FAILED)
        assert queue.get("two").status is queue.get("fine").status is Status.COMPLETED
        assert [record.message for record in caplog.records] == ["🔴 security: a payload was refused"]
