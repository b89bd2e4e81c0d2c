"""Progress while a run works, and the summary at its end."""
