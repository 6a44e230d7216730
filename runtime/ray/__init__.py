"""Starting Ray, calls to its actors and their environment."""
