"""Results, output files, and what functions print."""
