-- States: where each task of a job is with each tag, and the log by which readers follow the changes.
-- A line that ends with the name of an engine is for that engine alone.

CREATE TABLE state_jobs (
    id          TEXT PRIMARY KEY,
    num_tasks   INTEGER NOT NULL CHECK (num_tasks > 0),
    incarnation TEXT NOT NULL,                      -- differs when the job was deleted and made again
    change      BIGINT NOT NULL DEFAULT 0,          -- grows with every write; its row lock puts the log in commit order
    history     INTEGER NOT NULL DEFAULT 0,         -- keep every version, not only the newest entries of the log
    deleted     INTEGER NOT NULL DEFAULT 0,
    created_at  DOUBLE PRECISION NOT NULL
);

CREATE TABLE states (
    job            TEXT NOT NULL REFERENCES state_jobs (id) ON DELETE CASCADE,
    task_id        INTEGER NOT NULL CHECK (task_id >= 0),
    tag            TEXT NOT NULL,
    status         INTEGER NOT NULL,
    message        TEXT NOT NULL,
    timestamp      DOUBLE PRECISION NOT NULL,       -- by the database's clock
    version        BIGINT NOT NULL,
    event_id       TEXT NOT NULL,
    payload        TEXT,                            -- JSON
    schema_version INTEGER NOT NULL,
    PRIMARY KEY (job, task_id, tag)
)
WITHOUT ROWID -- sqlite
;

CREATE TABLE state_log (
    job            TEXT NOT NULL REFERENCES state_jobs (id) ON DELETE CASCADE,
    seq            BIGINT NOT NULL,
    task_id        INTEGER NOT NULL,
    tag            TEXT NOT NULL,
    status         INTEGER NOT NULL,
    message        TEXT NOT NULL,
    timestamp      DOUBLE PRECISION NOT NULL,
    version        BIGINT NOT NULL,
    event_id       TEXT NOT NULL,
    payload        TEXT,
    schema_version INTEGER NOT NULL,
    PRIMARY KEY (job, seq)
)
WITHOUT ROWID -- sqlite
;
CREATE INDEX idx_state_log_key ON state_log (job, task_id, tag, version);
