"""The rows of tasks, and the keys beside them."""
