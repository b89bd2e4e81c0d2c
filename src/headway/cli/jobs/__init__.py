"""Commands that run jobs and show them."""
