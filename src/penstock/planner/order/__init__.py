"""Good orders, fast."""
