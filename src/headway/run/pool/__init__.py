"""The parent of a run, its workers, and how they talk."""
