-- The queue: a claim asks whether a retry waits longer than any retry may (the clock was set back), however many tasks are
-- delayed; and nobody asks for the running tasks of a worker by an index.

CREATE INDEX idx_tasks_retrying ON tasks (run_at) WHERE status = 'QUEUED' AND ready = 0 AND attempts > 0;
DROP INDEX idx_tasks_worker;
