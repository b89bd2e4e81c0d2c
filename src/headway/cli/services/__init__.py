"""Commands that start long-lived processes, or query and control them."""
