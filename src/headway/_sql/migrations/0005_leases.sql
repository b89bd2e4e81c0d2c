-- Leases by name: who may do something of which there is one in the whole deployment.

CREATE TABLE leases (
    name        TEXT PRIMARY KEY,
    holder      TEXT,                               -- JSON: see headway._lease.Owner; none while it is free
    token       BIGINT NOT NULL DEFAULT 0,          -- grows with every change of hands
    lease_until DOUBLE PRECISION                    -- by the database's clock
);
