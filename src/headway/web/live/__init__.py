"""Changes sent to open pages."""
