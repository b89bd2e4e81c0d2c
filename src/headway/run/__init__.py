"""Running a function over many items, durably."""
