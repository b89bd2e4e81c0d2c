"""What the third attack on the queue found: each of these once failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from headway._sql import Tx
from headway.queue import records
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status, Task
from tests.services.waiting import eventually

# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def test_a_task_that_is_tried_again_while_the_sweeper_deletes_it_is_not_lost(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue, ThreadPoolExecutor(1) as threads:
        queue.handler("caption")(lambda task, payload: payload)
        old = queue.cancel(queue.submit("caption").id)
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET ended_at = ended_at - 40 * 86400"))

        def try_again(tx: Tx) -> Task:
            task = records.retry(tx, old.id, per_user=1)
            purged = threads.submit(Sweeper(queue).purge)
            eventually(lambda: purged.done() or queue.database.one("SELECT 1 FROM pg_locks WHERE NOT granted"))
            return task

        queue.database.run(try_again)
        threads.submit(lambda: None).result(60)  # the sweeper is through
        assert queue.get(old.id).status is Status.QUEUED
