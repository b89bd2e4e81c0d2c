"""Jobs, their items, causes, durations and rates."""
