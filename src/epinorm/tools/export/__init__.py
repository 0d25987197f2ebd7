"""A problem as one self-contained file."""
