-- Items that a function postponed by RetryLater, until they are done. Their progress row is 'failed' without an attempt
-- counted, and next_attempt_at is `until`.
CREATE TABLE item_delays (
    job       BIGINT NOT NULL REFERENCES jobs (no) ON DELETE CASCADE,
    idx       BIGINT NOT NULL,
    times     INTEGER NOT NULL,                     -- how often it was postponed
    since     DOUBLE PRECISION NOT NULL,            -- when for the first time
    until     DOUBLE PRECISION NOT NULL,
    reason    TEXT NOT NULL,                        -- redacted
    report    BIGINT NOT NULL,                      -- the report that is recorded; a repeated one changes nothing
    last_pass INTEGER NOT NULL DEFAULT 0,           -- 1: it was postponed in its last pass and gets no other
    PRIMARY KEY (job, idx)
);
ALTER TABLE jobs ADD COLUMN wait_since DOUBLE PRECISION; -- ahead of the clock: the clock was set back and the wait is void
ALTER TABLE jobs ADD COLUMN wait_until DOUBLE PRECISION; -- nothing of the job starts before
ALTER TABLE jobs ADD COLUMN wait_reason TEXT;            -- redacted
