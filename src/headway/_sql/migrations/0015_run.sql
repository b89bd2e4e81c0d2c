-- Which results were not kept. A done item without a row in results returned nothing, unless this says that it did.

ALTER TABLE progress ADD COLUMN unkept INTEGER; -- 1: it returned something that is not in results
UPDATE progress SET unkept = 1 WHERE status = 'done'
    AND NOT EXISTS (SELECT 1 FROM results r WHERE r.job = progress.job AND r.idx = progress.idx);

-- What a run of an item printed, bounded, redacted: of one that failed with that run, of one that succeeded here.
ALTER TABLE attempts ADD COLUMN printed TEXT;
CREATE TABLE printed (
    job  BIGINT NOT NULL,
    idx  BIGINT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (job, idx),
    FOREIGN KEY (job, idx) REFERENCES input_products (job, idx) ON DELETE CASCADE
);

-- What somebody asked of a run that goes on, from elsewhere. The run looks here several times a second.
CREATE TABLE controls (
    job       BIGINT PRIMARY KEY REFERENCES jobs (no) ON DELETE CASCADE,
    run       INTEGER NOT NULL,                     -- it is meant for this run and no later one
    version   BIGINT NOT NULL,                      -- grows with every request
    paused    INTEGER NOT NULL DEFAULT 0,
    stopping  INTEGER NOT NULL DEFAULT 0,
    workers   INTEGER,                              -- how many items are to run at once; none: as it was started
    actor     TEXT NOT NULL,                        -- who asked last
    at        DOUBLE PRECISION NOT NULL
);
