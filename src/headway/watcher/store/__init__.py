"""The watcher's record of reported jobs. ``contract.py`` says what a store does; there is one in SQL and one in Redis."""
