-- How often a block was taken over from a slot that had not left it: one of its items may be what kills slots.
ALTER TABLE blocks ADD COLUMN takeovers INTEGER NOT NULL DEFAULT 0;
