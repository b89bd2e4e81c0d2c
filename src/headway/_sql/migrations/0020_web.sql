-- Somebody of an application that has users of its own, who came with a ticket. The row is the use of the ticket and the
-- session that it opened, in one: a ticket opens one session, ever.
CREATE TABLE web_visits (
    ticket     TEXT PRIMARY KEY,                    -- the ticket's id
    hash       TEXT NOT NULL UNIQUE,                -- SHA-256 of the cookie
    name       TEXT NOT NULL,
    role       TEXT NOT NULL CHECK (role IN ('viewer', 'operator', 'admin', 'user')),
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL
);
CREATE INDEX idx_web_visits_expiry ON web_visits (expires_at);
