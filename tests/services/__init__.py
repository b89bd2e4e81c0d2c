"""The real servers the tests talk to: found or obtained, private to one test run, ended with it."""
