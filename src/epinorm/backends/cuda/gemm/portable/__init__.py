"""By mma.sync, on every GPU since Ampere."""
