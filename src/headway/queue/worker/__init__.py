"""Worker processes: what runs tasks, and what starts and stops it."""
