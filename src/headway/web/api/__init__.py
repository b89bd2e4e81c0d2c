"""The HTTP API and the actions behind it."""
