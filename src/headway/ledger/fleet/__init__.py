"""Jobs that many processes work on at once."""
