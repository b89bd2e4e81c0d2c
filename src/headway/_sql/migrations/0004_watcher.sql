-- What the watcher has reported of RQ's registries, so that it reports nothing twice.

CREATE TABLE watched (
    queue    TEXT NOT NULL,                         -- queue@db
    registry TEXT NOT NULL CHECK (registry IN ('failed', 'canceled', 'started')),
    member   TEXT NOT NULL,                         -- job id; in started: job id:execution id
    score    DOUBLE PRECISION NOT NULL,             -- in the registry, when the job was looked at
    seen     TEXT NOT NULL,                         -- the result, cancellation or state that was reported last
    at       DOUBLE PRECISION NOT NULL,             -- when the job was looked at, by Redis's clock
    found    DOUBLE PRECISION NOT NULL,             -- when it was last found in the registry
    PRIMARY KEY (queue, registry, member)
)
WITHOUT ROWID -- sqlite
;
CREATE INDEX idx_watched_found ON watched (queue, registry, found);

-- Executions that were reported canceled, stuck or lost and whose outcome is still awaited.
CREATE TABLE followed (
    queue  TEXT NOT NULL,
    member TEXT NOT NULL,                           -- job id:execution id
    kind   TEXT NOT NULL,                           -- what it was reported as
    event  TEXT NOT NULL,                           -- id of that event
    PRIMARY KEY (queue, member)
)
WITHOUT ROWID -- sqlite
;

CREATE TABLE watchers (
    queue    TEXT PRIMARY KEY,
    baseline DOUBLE PRECISION NOT NULL              -- when it was watched for the first time, by Redis's clock
);
