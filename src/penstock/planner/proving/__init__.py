"""The exact solver: what `prove` is made of."""
