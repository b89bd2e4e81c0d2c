"""Runs that the workers of many machines share."""
