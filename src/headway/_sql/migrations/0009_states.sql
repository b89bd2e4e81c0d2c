-- Who wrote a state last, and the last event of each earlier writer, by which a repeated write is recognised:
-- "writer:event:version:time " for each, newest first.
ALTER TABLE states ADD COLUMN writer TEXT NOT NULL DEFAULT '';
ALTER TABLE states ADD COLUMN recent TEXT NOT NULL DEFAULT '';

-- Every version of the jobs made with history. The log, which every writer appends to and every reader follows, has one
-- index only: there is no wrong one to choose, and none to keep for jobs without history.
CREATE TABLE state_history (
    job            TEXT NOT NULL REFERENCES state_jobs (id) ON DELETE CASCADE,
    task_id        INTEGER NOT NULL,
    tag            TEXT NOT NULL,
    version        BIGINT NOT NULL,
    status         INTEGER NOT NULL,
    message        TEXT NOT NULL,
    timestamp      DOUBLE PRECISION NOT NULL,
    event_id       TEXT NOT NULL,
    payload        TEXT,
    schema_version INTEGER NOT NULL,
    PRIMARY KEY (job, task_id, tag, version)
)
WITHOUT ROWID -- sqlite
;
INSERT INTO state_history (job, task_id, tag, version, status, message, timestamp, event_id, payload, schema_version)
SELECT job, task_id, tag, version, status, message, timestamp, event_id, payload, schema_version FROM state_log
WHERE job IN (SELECT id FROM state_jobs WHERE history = 1);
DROP INDEX idx_state_log_key;
