"""States: one behavioural suite over every store, and what each store promises beside it."""
