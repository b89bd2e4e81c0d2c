"""Worker processes, and the supervisor that starts and stops them."""
