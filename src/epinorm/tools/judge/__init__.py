"""Whether a solution is right, and how fast."""
