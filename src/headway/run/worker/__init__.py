"""Code that runs inside worker processes and executors."""
