"""Good orders, fast: what `solve` is made of."""
