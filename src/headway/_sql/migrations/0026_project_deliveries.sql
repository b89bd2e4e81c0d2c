-- The sinks that took the event of a completed project while another sink had not yet taken it. After a loss of Redis the event
-- is announced again, and these sinks are skipped. The rows go when every sink has the event (projects.delivered_at).
CREATE TABLE project_deliveries (
    project BIGINT NOT NULL REFERENCES projects (no) ON DELETE CASCADE,
    sink    TEXT NOT NULL,
    PRIMARY KEY (project, sink)
)
WITHOUT ROWID -- sqlite
;
