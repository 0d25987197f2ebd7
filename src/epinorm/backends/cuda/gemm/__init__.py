"""Products with what follows them in their epilogue."""
