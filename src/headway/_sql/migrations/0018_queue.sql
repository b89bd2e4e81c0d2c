-- The queue: fewer indexes for each change of a task. Every change writes an entry into each index that has the row.

-- Tasks of nobody are looked up by no user.
DROP INDEX idx_tasks_user;
CREATE INDEX idx_tasks_user ON tasks (user_id, no) WHERE user_id IS NOT NULL;
-- What runs is little: idx_tasks_worker has it, and it is sorted when it is asked for. The renewal of a lease changes no
-- index any more.
DROP INDEX idx_tasks_running;
-- Nobody asks for the events of one task by its job: see headway.events.store.sql.
DROP INDEX idx_outbox_job;
CREATE INDEX idx_outbox_job ON outbox (job, seq) WHERE source <> 'headway.queue';
