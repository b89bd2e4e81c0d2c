-- The traceback of a cause is kept once. Rows of attempts keep a short error each, so that an entry stays below 1 KB.
-- A table of its own: every failure updates the cause's row, and PostgreSQL would copy the traceback each time.

CREATE TABLE tracebacks (
    job    BIGINT NOT NULL REFERENCES jobs (no) ON DELETE CASCADE,
    cause  INTEGER NOT NULL,
    detail TEXT NOT NULL,                           -- of the cause's first failure, redacted
    PRIMARY KEY (job, cause)
);
