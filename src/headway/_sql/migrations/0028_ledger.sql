-- The traceback of a cause is kept once, so that an item that failed three times stays below 1 KB.
-- From now on attempts.detail is '=' (equal to the cause's), empty (no traceback) or NULL (another one, not kept).
-- Attempts of earlier versions keep the traceback in it.
-- A table of its own: every failure updates the cause's row, and PostgreSQL would copy the traceback each time.

CREATE TABLE tracebacks (
    job    BIGINT NOT NULL REFERENCES jobs (no) ON DELETE CASCADE,
    cause  INTEGER NOT NULL,
    detail TEXT NOT NULL,                           -- of the cause's first failure, redacted
    PRIMARY KEY (job, cause)
);
