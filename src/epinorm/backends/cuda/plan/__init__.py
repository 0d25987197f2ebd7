"""What runs on a GPU, and why."""
