"""Small parts that every package uses. No input or output."""
