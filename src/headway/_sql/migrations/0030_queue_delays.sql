-- Tasks that a handler postponed by RetryLater. While such a task waits, its run_at is `until`.
CREATE TABLE task_delays (
    task   BIGINT PRIMARY KEY REFERENCES tasks (no) ON DELETE CASCADE,
    times  INTEGER NOT NULL,                        -- how often it was postponed
    since  DOUBLE PRECISION NOT NULL,               -- when for the first time
    until  DOUBLE PRECISION NOT NULL,
    reason TEXT NOT NULL                            -- redacted
);
-- Kinds of which no task starts before `until`: a handler raised RetryLater with scope="job".
CREATE TABLE task_holds (
    kind   TEXT PRIMARY KEY,
    until  DOUBLE PRECISION NOT NULL,
    reason TEXT NOT NULL                            -- redacted
);
