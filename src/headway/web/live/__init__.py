"""The live path: WebSocket messages with the changes, for open pages."""
