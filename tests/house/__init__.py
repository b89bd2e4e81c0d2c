"""The house itself: its tools, its documents, its contracts."""
