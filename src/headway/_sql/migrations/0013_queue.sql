-- The queue: who asked for a worker to end, and settings that are changed while it runs.

ALTER TABLE task_workers ADD COLUMN wanted_by TEXT;
ALTER TABLE task_workers ADD COLUMN wanted_at DOUBLE PRECISION;

-- What an operator set for every worker and supervisor, and (with the prefix app.) what the application says of itself.
CREATE TABLE task_settings (
    name   TEXT PRIMARY KEY,
    value  TEXT NOT NULL,                           -- as it would be written in headway.toml
    set_by TEXT NOT NULL,
    set_at DOUBLE PRECISION NOT NULL
);
