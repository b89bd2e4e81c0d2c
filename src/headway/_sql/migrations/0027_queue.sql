-- The queue: completed and failed tasks of each queue up to and including the minute counted_until. Later minutes are in task_minutes.

ALTER TABLE task_queues ADD COLUMN completed BIGINT NOT NULL DEFAULT 0;
ALTER TABLE task_queues ADD COLUMN failed BIGINT NOT NULL DEFAULT 0;
ALTER TABLE task_queues ADD COLUMN counted_until BIGINT NOT NULL DEFAULT 0;
