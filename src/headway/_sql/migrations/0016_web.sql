-- Who may use the web application.

CREATE TABLE web_tokens (
    id         TEXT PRIMARY KEY,                    -- its public part, by which it is listed and revoked
    hash       TEXT NOT NULL,                       -- SHA-256 of its secret part, which is 256 random bits
    name       TEXT NOT NULL,                       -- whose it is: the actor of what is done with it
    role       TEXT NOT NULL CHECK (role IN ('viewer', 'operator', 'admin', 'user')),
    created_at DOUBLE PRECISION NOT NULL,
    created_by TEXT NOT NULL,
    expires_at DOUBLE PRECISION,                    -- none: until it is revoked
    revoked_at DOUBLE PRECISION
);

-- Somebody who logged in at a browser with a token. It ends with its token.
CREATE TABLE web_sessions (
    hash       TEXT PRIMARY KEY,                    -- SHA-256 of the cookie
    token      TEXT NOT NULL REFERENCES web_tokens (id) ON DELETE CASCADE,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL
);
CREATE INDEX idx_web_sessions_expiry ON web_sessions (expires_at);
