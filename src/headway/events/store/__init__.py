"""Outboxes: the tables of SQLite and PostgreSQL, and the stream of Redis."""
