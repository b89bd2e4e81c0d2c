-- The queue: which kinds of task each worker runs, separated by commas. NULL: a worker of an older version, which does not say.

ALTER TABLE task_workers ADD COLUMN kinds TEXT;
