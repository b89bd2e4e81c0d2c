"""The SQL tables of the finish line: projects, their journal and their deliveries."""
