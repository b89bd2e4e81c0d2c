-- A job that many machines work on: what they are to do, and which stretch of its items each of them has.

CREATE TABLE fleets (
    job      BIGINT PRIMARY KEY REFERENCES jobs (no) ON DELETE CASCADE,
    run      INTEGER NOT NULL,
    token    BIGINT NOT NULL,                    -- of the hold under which all slots record
    work     TEXT NOT NULL,                      -- what the slots run and how, as the queue's codec wrote it
    queue    TEXT NOT NULL,                      -- urgent, high, normal, low: where its slots wait
    slots    INTEGER,                            -- how many are wanted; none: as many as there are workers
    most     INTEGER,                            -- so many items may die before the run stops
    died     BIGINT NOT NULL DEFAULT 0,          -- items that did in this run
    pass     INTEGER NOT NULL DEFAULT 1,         -- 1: dead letters get a pass at the end
    stopped  INTEGER NOT NULL DEFAULT 0,         -- 1: too many died
    note     TEXT,                               -- why a worker would not take part, if one would not
    noted_at DOUBLE PRECISION
);

-- Open ones only: a block whose items are all recorded is counted in the job's row and goes.
CREATE TABLE blocks (
    job         BIGINT NOT NULL REFERENCES jobs (no) ON DELETE CASCADE,
    no          BIGINT NOT NULL,
    first       BIGINT NOT NULL,
    last        BIGINT NOT NULL,
    slot        TEXT NOT NULL,                   -- who works on it
    holder      TEXT NOT NULL,                   -- JSON of headway._lease.Owner
    token       BIGINT NOT NULL DEFAULT 1,       -- grows when another slot takes it over: the one before is refused
    lease_until DOUBLE PRECISION NOT NULL,       -- by the database's clock
    done        BIGINT NOT NULL DEFAULT 0,       -- recorded and not yet counted in the job's row
    seconds     DOUBLE PRECISION NOT NULL DEFAULT 0,
    PRIMARY KEY (job, no)
);
