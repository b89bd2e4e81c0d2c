-- The word for an event that every sink took is "delivered".

ALTER TABLE projects RENAME COLUMN told_at TO delivered_at;
