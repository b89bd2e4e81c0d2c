-- Events: how often a sink refused an event is counted for the sink, whichever relay met it.

ALTER TABLE sinks ADD COLUMN refusing BIGINT;                   -- number of the event that the sink refuses just now
ALTER TABLE sinks ADD COLUMN refusals INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sinks ADD COLUMN refused_at DOUBLE PRECISION;       -- when a refusal was counted last
