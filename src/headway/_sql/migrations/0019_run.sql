-- The slowest items of a job are found without reading the others. Only items that took at least a tenth of a second are
-- in this index, so that fast ones, of which there may be thousands a second, are written as before.

CREATE INDEX idx_progress_slow ON progress (job, seconds) WHERE status = 'done' AND seconds >= 0.1;
