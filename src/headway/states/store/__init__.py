"""The contract of a store of states, and its implementations."""
