-- What the ledger needs besides: the retry policy of a job, who holds a claim, and what became of a COMMIT nobody heard of.

ALTER TABLE jobs ADD COLUMN retry_base   DOUBLE PRECISION NOT NULL DEFAULT 1.0;   -- seconds before the first repetition
ALTER TABLE jobs ADD COLUMN retry_factor DOUBLE PRECISION NOT NULL DEFAULT 2.0;
ALTER TABLE jobs ADD COLUMN retry_cap    DOUBLE PRECISION NOT NULL DEFAULT 300.0; -- no item waits longer
ALTER TABLE jobs ADD COLUMN retry_jitter DOUBLE PRECISION NOT NULL DEFAULT 0.5;

ALTER TABLE progress ADD COLUMN holder TEXT; -- JSON of headway._lease.Owner while a claim is open

-- One row for each connection that writes: the number of its last transaction that was committed. Whoever loses the
-- answer to COMMIT asks here, and knows.
CREATE TABLE transactions ( -- postgresql
    session TEXT PRIMARY KEY, -- postgresql
    no      BIGINT NOT NULL, -- postgresql
    at      DOUBLE PRECISION NOT NULL -- postgresql
); -- postgresql
