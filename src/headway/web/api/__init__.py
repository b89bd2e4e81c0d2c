"""The HTTP API and the actions that it shares with the pages."""
