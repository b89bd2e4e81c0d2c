"""Commands that start long-lived processes or ask them."""
