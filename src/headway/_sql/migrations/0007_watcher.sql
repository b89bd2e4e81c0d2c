-- Since when the outcome of an execution is awaited: one that RQ gave up is not awaited for ever.
ALTER TABLE followed ADD COLUMN since DOUBLE PRECISION NOT NULL DEFAULT 0;
