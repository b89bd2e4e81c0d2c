"""Queries for people: statistics of jobs, lists with filters, search."""
