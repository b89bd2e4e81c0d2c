-- Events: a sink is served by one relay at a time, may hear of one job only, and may refuse an event for good.

ALTER TABLE sinks ADD COLUMN job TEXT;                          -- it hears of this job only; none: of all
ALTER TABLE sinks ADD COLUMN at DOUBLE PRECISION;               -- when it was first seen
ALTER TABLE sinks ADD COLUMN holder TEXT;                       -- JSON: see headway._lease.Owner; who serves it now
ALTER TABLE sinks ADD COLUMN token BIGINT NOT NULL DEFAULT 0;   -- grows with every change of hands
ALTER TABLE sinks ADD COLUMN lease_until DOUBLE PRECISION;      -- by the database's clock

ALTER TABLE deliveries ADD COLUMN refused TEXT;                 -- why it was put aside; none: the sink took it
ALTER TABLE deliveries ADD COLUMN at DOUBLE PRECISION;
CREATE INDEX idx_deliveries_refused ON deliveries (sink, seq) WHERE refused IS NOT NULL;
CREATE INDEX idx_outbox_job ON outbox (job, seq);

-- These were named otherwise: nobody would ever take what is kept for them.
DELETE FROM deliveries WHERE sink LIKE 'on_complete %' OR sink LIKE 'webhook %';
DELETE FROM sinks WHERE name LIKE 'on_complete %' OR name LIKE 'webhook %';
