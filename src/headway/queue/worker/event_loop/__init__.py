"""Async handlers: the event loop of a worker, and the runner that claims for it."""
