"""Start of Ray, and its actors' calls and environment."""
