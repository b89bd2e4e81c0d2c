"""Who is asking, and whether the request is allowed."""
