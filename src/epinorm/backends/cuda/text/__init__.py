"""From a plan to the text of a kernel."""
