"""Statements that record and read the items of a job."""
