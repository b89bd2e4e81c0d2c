-- The queue: a claim asks whether a retry waits longer than any retry may (the clock was set back), however many tasks are
-- delayed.

CREATE INDEX idx_tasks_retrying ON tasks (run_at) WHERE status = 'QUEUED' AND ready = 0 AND attempts > 0;
-- The newest cancelled tasks are listed without a look at all the others, as the failed ones are.
CREATE INDEX idx_tasks_cancelled ON tasks (no) WHERE status = 'CANCELLED';
